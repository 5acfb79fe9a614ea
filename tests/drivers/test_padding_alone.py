"""A micro-batch of padding alone has no share in a step, though its loss is nan: in the loss, and in no gradient."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import PipelineDriver, PipelineDriverFillDrain, pipe_split, pipeline

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")
SCHEDULES = [
    "fill_drain",
    "1f1b",
    "eager_1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "v_min",
    "dualpipe_v",
]


class Words(nn.Module):
    """Four stages, and with ``returns`` the loss."""

    def __init__(self, returns=False):
        super().__init__()
        self.embed, self.head, self.returns = nn.Embedding(9, 6), nn.Linear(6, 9), returns
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, words, labels=None):
        h = self.embed(words)
        for layer in self.layers[:-1]:
            h = torch.tanh(layer(h))
            pipe_split()
        logits = self.head(self.layers[-1](h)).transpose(1, 2)
        return F.cross_entropy(logits, labels, ignore_index=0) if self.returns else logits


class Entropy(nn.Module):
    """A mean of what is no padding, written out: 0 / 0 for padding alone."""

    def forward(self, logits, labels):
        counts = labels != 0
        return (F.cross_entropy(logits, labels, reduction="none") * counts).sum() / counts.sum()


def selected(logits, labels):
    keep = labels != 0
    return F.cross_entropy(logits.transpose(1, 2)[keep], labels[keep])


def counted(target):
    return (target != 0).sum()


WORDS, LABELS = torch.randint(1, 9, (7, 5)), torch.randint(1, 9, (7, 5))
LABELS[3:5] = 0  # the second of three micro-batches
LABELS[0, 3:] = 0
LOSSES = {
    "a module of torch": (nn.CrossEntropyLoss(ignore_index=0), None),
    "a function": (lambda logits, labels: F.cross_entropy(logits, labels, ignore_index=0), counted),
    "written out": (Entropy(), counted),
    "selected": (selected, counted),
    "of the model": (None, lambda *, labels: counted(labels)),
}


def step(threads, name, kind=PipelineDriver, **options):
    """Run a step without the check of the first one, and compare it with the plain model's."""
    loss_fn, how = LOSSES[name]
    model = Words(returns=loss_fn is None)
    plain = copy.deepcopy(model)
    pipe = pipeline(model, loss_fn, output_loss_value_spec=None if loss_fn else True)
    driver = kind(pipe, threads, check=False, loss_reduction=how, **options)
    try:
        loss = driver.run(3, WORDS, LABELS)
        wanted = loss_fn(plain(WORDS), LABELS) if loss_fn else plain(WORDS, LABELS)
        wanted.backward()
        torch.testing.assert_close(loss, wanted.detach())
        for path, parameter in plain.named_parameters():
            torch.testing.assert_close(driver.get_grad(path), parameter.grad, msg=path)
        with torch.no_grad():
            torch.testing.assert_close(driver.run(3, WORDS, LABELS), wanted.detach())
    finally:
        driver.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", LOSSES)
def test_every_schedule(schedule, name, threads):
    step(
        threads,
        name,
        schedule=schedule,
        world_size=4 if schedule in ("fill_drain", "1f1b", "eager_1f1b", "zb_h1", "zb_h2") else 2,
    )


@pytest.mark.parametrize("options", [{"out_of_order": True}, {"compile": True}, {"schedule": "zb_h1", "compile": True}])
def test_other_ways_to_run(options, threads):
    step(threads, "written out", **options)


def test_one_loss_over_all(threads):
    step(threads, "a module of torch", PipelineDriverFillDrain, single_loss=True)
