"""A loss that pippy cannot read gives the plain model's numbers, or an error whose advice, followed, gives them."""

import copy
import functools
import math
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import PipelineDriver1F1B, PipelineDriverFillDrain, pipe_split, pipeline
from pippy.drivers.errors import MicrobatchError

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")
WEIGHTS = torch.tensor([0.5, 2.0, 0.0, 1.0], dtype=torch.float64)


class Net(nn.Module):
    def __init__(self, zero=False):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)
        if zero:
            nn.init.zeros_(self.b.weight)
            nn.init.zeros_(self.b.bias)

    def forward(self, x):
        x = torch.relu(self.a(x))
        pipe_split()
        return self.b(x)


def plain_step(model, loss_fn, x, target):
    loss = loss_fn(model(x), target)
    loss.backward()
    return loss.detach()


def assert_same(driver, chunks, model, loss_fn, x, target):
    model.zero_grad()
    driver.zero_grad()
    torch.testing.assert_close(
        driver.run(chunks, x, target), plain_step(model, loss_fn, x, target), rtol=1e-9, atol=1e-12
    )
    for name, gradient in driver.gradients().items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-9, atol=1e-12)


def follow(threads, pipe, chunks, x, target):
    """A driver that runs this step: an ordinary one, or one made as the error says."""
    driver = PipelineDriver1F1B(pipe, threads)
    try:
        driver.run(chunks, x, target)
    except MicrobatchError as error:
        assert all(gradient is None for gradient in driver.gradients().values()), "nothing is adopted"
        found = re.search(r"loss_reduction=(.*)$", str(error))
        if found is None:
            return PipelineDriverFillDrain(pipe, threads, single_loss=True), "single_loss"
        return PipelineDriver1F1B(pipe, threads, loss_reduction=eval(found[1])), found[1]
    return driver, None


def padded(rows=8, value=0):
    target = torch.randint(4, (rows,))
    target[:3] = value
    target[3:] = target[3:].clamp(min=1) if value == 0 else target[3:]
    return target


LOSSES = {
    "sum": (lambda o, t: F.cross_entropy(o, t, reduction="sum"), padded(), "'sum'"),
    "ignore": (lambda o, t: F.cross_entropy(o, t, ignore_index=0), padded(), "lambda target: (target != 0).sum()"),
    "default": (lambda o, t: F.cross_entropy(o, t), padded(value=-100), "lambda target: (target != -100).sum()"),
    "no padding": (lambda o, t: F.cross_entropy(o, t), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]), None),
    "mean": (lambda o, t: ((o - 1) ** 2).mean(), padded(), None),
    "weights": (
        lambda o, t: F.cross_entropy(o, t, WEIGHTS + 0.25, label_smoothing=0.1),
        padded(value=3),
        "torch.tensor",
    ),
    "contrastive": (lambda o, t: F.cross_entropy(o @ o.t(), torch.arange(len(o))), padded(), "single_loss"),
    "std": (lambda o, t: (o - t[:, None]).std(), padded(), "single_loss"),
}


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_written_as_functions(threads, name, zero):
    loss_fn, target, advice = LOSSES[name]
    model, x = Net(zero and name != "std"), torch.randn(8, 4)
    driver, given = follow(threads, pipeline(copy.deepcopy(model), loss_fn), 4, x, target)
    assert given == advice or (advice and given and given.find(advice) >= 0), given
    assert_same(driver, 4 if given != "single_loss" else 2, model, loss_fn, x, target)
    assert_same(driver, 3, model, loss_fn, x, target)


def test_padding_that_comes_later(threads):
    loss_fn = lambda o, t: F.cross_entropy(o, t, ignore_index=2)  # noqa: E731
    model, x = Net(), torch.randn(8, 4)
    driver = PipelineDriver1F1B(pipeline(copy.deepcopy(model), loss_fn), threads)
    assert_same(driver, 4, model, loss_fn, x, torch.tensor([0, 1, 3, 0, 1, 3, 0, 1]))
    before = driver.gradients()
    with pytest.raises(MicrobatchError, match=re.escape("loss_reduction=lambda target: (target != 2).sum()")):
        driver.run(4, x, torch.tensor([0, 1, 3, 0, 1, 3, 2, 2]))
    for name, gradient in driver.gradients().items():
        assert torch.equal(gradient, before[name])


def test_random_numbers(threads):
    loss_fn = lambda o, t: F.mse_loss(F.dropout(o, 0.5), t)  # noqa: E731
    pipe, x = pipeline(Net(), loss_fn), torch.randn(8, 4)
    with pytest.raises(MicrobatchError, match=r"draws random numbers.*loss_reduction='mean'"):
        PipelineDriver1F1B(pipe, threads).run(2, x, x)
    PipelineDriver1F1B(pipe, threads, loss_reduction="mean").run(2, x, x)


class Counting(nn.Module):
    """A loss with a buffer, an attribute and random numbers that do not change it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.times, self.dropout = 0, nn.Dropout()

    def forward(self, output, target):
        self.calls += 1
        self.times += 1
        return (self.dropout(output) - target).square().mean()


def test_a_check_leaves_nothing_behind(threads):
    loss_fn, x = Counting(), torch.randn(6, 4)
    driver = PipelineDriver1F1B(pipeline(Net(), loss_fn), threads)
    driver.run(3, x, x)
    state = next(
        state for worker in threads.control.threads for state in worker.drivers.values() if "_loss" in state.modules
    )
    assert state.modules["_loss"].calls == state.modules["_loss"].times == 3
    assert state.modules["_loss"].dropout.training


class WithLoss(Net):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.dropout = kind, nn.Dropout(0.1)

    def forward(self, x, labels):
        logits = self.dropout(super().forward(x))
        return F.cross_entropy(logits, labels, **self.kind)


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ({}, None),
        ({"reduction": "sum"}, "'sum'"),
        ({"ignore_index": 0}, "lambda labels: (labels != 0).sum()"),
    ],
)
def test_a_model_that_returns_its_loss(threads, kind, advice):
    model, x, target = WithLoss(kind), torch.randn(8, 4), padded()
    pipe = pipeline(copy.deepcopy(model), output_loss_value_spec=True)
    driver, given = follow(threads, pipe, 4, x, target)
    assert given == advice
    model.eval()
    pipe.eval()
    assert_same(driver, 4, lambda_model(model, target), lambda o, t: o, x, target)


def lambda_model(model, target):
    class Called:
        zero_grad, get_parameter = model.zero_grad, model.get_parameter

        def __call__(self, x):
            return model(x, target)

    return Called()


class Flattening(nn.Module):
    """Its batches have several values for each row, in one dimension with the rows, or no rows in the first."""

    def __init__(self, place):
        super().__init__()
        self.place, self.words, self.places = place, nn.Embedding(7, 6), nn.Embedding(5, 6)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 7)

    def mark(self, place):
        if place == self.place:
            pipe_split()

    def forward(self, ids, labels):
        rows, length = ids.shape
        positions = self.places(torch.arange(length))
        x = self.words(ids)
        size = x.size()[:-1] + (7,)
        self.mark(0)
        flat = x.view(-1, x.size(-1))
        self.mark(1)
        flat = self.a(flat)
        turned = (flat.view(rows, length, 6) + positions).transpose(0, 1)
        self.mark(2)
        pairs = {"turned": turned.tanh(), "flat": [flat]}
        self.mark(3)
        turned, flat = pairs["turned"].flatten(0, 1), pairs["flat"][0].view(rows, length, 6)
        self.mark(4)
        both = turned.view(length, rows, 6).transpose(0, 1) + flat
        logits = self.b(both).view(size)
        self.mark(5)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("front_end", ["fx", "export", None])
@pytest.mark.parametrize("place", range(6))
def test_a_model_that_returns_its_loss_may_be_cut_anywhere(threads, place, front_end):
    model, ids, labels = Flattening(place), torch.randint(7, (8, 5)), torch.randint(7, (8, 5))
    example = {"example_args": (ids[:4], labels[:4]), "front_end": front_end} if front_end else {}
    pipe = pipeline(copy.deepcopy(model), output_loss_value_spec=True, **example)
    driver = PipelineDriver1F1B(pipe, threads)
    assert_same(driver, 3, lambda_model(model, labels), lambda o, t: o, ids, labels)


def test_only_first_steps_are_checked(threads, monkeypatch):
    from pippy.drivers.workers.loss_judge import Judge

    checked = []
    inner = Judge.judge
    monkeypatch.setattr(Judge, "judge", lambda self, *args: checked.append(1) or inner(self, *args))
    x = torch.randn(6, 4)
    driver = PipelineDriver1F1B(pipeline(Net(), lambda o, t: ((o - t) ** 2).mean()), threads)
    for _ in range(3):
        driver.run(3, x, x)
    assert len(checked) == 1
    driver.run(2, x, x)
    with torch.no_grad():
        driver.run(2, x, x)
    assert len(checked) == 3
    for known in (nn.MSELoss(), F.mse_loss, functools.partial(F.mse_loss, reduction="sum")):
        PipelineDriver1F1B(pipeline(Net(), known), threads).run(2, x, x)
    PipelineDriver1F1B(pipeline(Net(), lambda o, t: (o - t).std()), threads, loss_reduction="mean").run(2, x, x)
    assert len(checked) == 3


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_micro_batches_of_one_row(threads, rows):
    loss_fn = lambda o, t: F.cross_entropy(o, t, reduction="sum")  # noqa: E731
    pipe, x, target = pipeline(Net(), loss_fn), torch.randn(rows, 4), torch.randint(4, (rows,))
    assert follow(threads, pipe, rows, x, target)[1] == "'sum'"


@pytest.mark.parametrize("how", ["mean", "sum", lambda target: (target != -100).sum()])
@pytest.mark.parametrize("loss_fn", [F.cross_entropy, nn.CrossEntropyLoss(), lambda o, t: F.cross_entropy(o, t)])
def test_a_micro_batch_that_is_all_padding_counts_nothing(threads, loss_fn, how):
    model, x, target = Net(), torch.randn(8, 4), torch.tensor([0, 1, 2, 3, -100, -100, 1, 2])
    driver = PipelineDriver1F1B(pipeline(copy.deepcopy(model), loss_fn), threads, loss_reduction=how)
    loss, plain = driver.run(4, x, target), plain_step(model, loss_fn, x, target)
    scale = 3.0 if how == "sum" else 1.0
    torch.testing.assert_close(loss, plain * scale)
    for name, gradient in driver.gradients().items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad * scale)


def mean_where(counts):
    def loss(output, target):
        return (output.square().sum(1) * counts(target)).sum() / counts(target).sum()

    return loss


LATER = {
    "a number": (mean_where(lambda t: t != 7), [1, 2, 3, 0], [1, 7, 7, 2], "lambda target: (target != 7).sum()"),
    "a limit": (mean_where(lambda t: t > 0), [1, 2, 3, 1], [0, 0, 0, 2], "lambda target: (target > 0).sum()"),
    "a mask": (mean_where(lambda t: t), [True] * 4, [True, False, False, True], "lambda target: target.sum()"),
    "weights": (mean_where(lambda t: t), [1.0] * 4, [0.5, 2.0, 0.0, 1.0], "lambda target: target.clamp(min=0).sum()"),
    "not a number": (
        lambda o, t: torch.where(t.isnan(), 0, o.sum(1)).sum() / (~t.isnan()).sum(),
        [1.0, 2.0, 3.0, 4.0],
        [1.0, math.nan, math.nan, 4.0],
        "lambda target: (~target.isnan()).sum()",
    ),
}


@pytest.mark.parametrize("name", LATER)
def test_what_first_comes_in_a_later_step(threads, name):
    loss_fn, first, later, advice = LATER[name]
    model, x, first, later = Net(), torch.randn(4, 4), torch.tensor(first), torch.tensor(later)
    pipe = pipeline(copy.deepcopy(model), loss_fn)
    driver = PipelineDriver1F1B(pipe, threads)
    assert_same(driver, 2, model, loss_fn, x, first)
    with pytest.raises(MicrobatchError, match=re.escape(f"loss_reduction={advice}") + "$"):
        driver.run(2, x, later)
    driver = PipelineDriver1F1B(pipe, threads, loss_reduction=eval(advice))
    assert_same(driver, 2, model, loss_fn, x, later)


def test_what_matters_not_is_not_looked_for(threads):
    loss_fn = lambda o, t: (o.square().sum(1) * torch.where(t == 7, 2.0, 1.0)).mean()  # noqa: E731
    driver = PipelineDriver1F1B(pipeline(Net(), loss_fn), threads)
    driver.run(2, torch.randn(4, 4), torch.tensor([1, 2, 3, 0]))
    assert {(each.sign, each.value) for each in driver.loss_checks.watched} == {("==", -100)}


def test_targets_of_which_the_first_counts_nothing(threads):
    loss_fn = lambda o, t: F.cross_entropy(o[:, :-1].flatten(0, 1), t[:, 1:].flatten(), ignore_index=0)  # noqa: E731
    target = torch.tensor([[1, 2, 3], [0, 0, 0], [3, 1, 2], [0, 0, 0]])
    pipe, x = pipeline(Net(), loss_fn), torch.randn(4, 3, 4)
    assert follow(threads, pipe, 2, x, target)[1] == "lambda target: (target[:, 1:] != 0).sum()"
