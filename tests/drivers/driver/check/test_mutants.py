"""The check of a driver's first step, damaged in one place, accepts a model that it refuses: each part of it is needed."""

import pytest
import torch
from torch import nn

from pippy import PipelineDriver1F1B, pipe_split, pipeline
from pippy.drivers.base.errors import MicrobatchError
from pippy.drivers.driver.check import first_step
from pippy.drivers.driver.check.comparisons import Comparisons
from pippy.drivers.worker.gradients.buffers import StepBuffers

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


class Habit(nn.Module):
    """Three stages; the first one does something to its values."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def act(self, h):
        return h

    def forward(self, x):
        h = self.act(torch.tanh(self.first(x)))
        pipe_split()
        h = torch.tanh(self.second(h))
        pipe_split()
        return self.last(h)


class MixesGradients(Habit):
    """Its values are those of each row; the gradients of the first stage mix rows."""

    def act(self, h):
        mean = h.mean(0) ** 2
        return h + mean - mean.detach()


class Counts(Habit):
    """Keeps a running mean, and uses it nowhere."""

    def act(self, h):
        with torch.no_grad():
            self.mean.lerp_(h.mean(0), 0.1)
        return h


def masked(output, target):
    keep = (target != -100).unsqueeze(1)
    return ((output - target.unsqueeze(1)) ** 2 * keep).sum() / keep.sum()


def squares(output, target):
    return ((output - target.unsqueeze(1)) ** 2).mean()


def compared_without(monkeypatch, left_out):
    """Leave out the numbers for which ``left_out`` is true, on both sides."""
    inner = Comparisons.beside

    def beside(self, plain, numbers):
        both = inner(self, plain, numbers)
        return tuple({key: each for key, each in side.items() if not left_out(*key)} for side in both)

    monkeypatch.setattr(Comparisons, "beside", beside)


def without_the_first_stage(monkeypatch):
    compared_without(monkeypatch, lambda kind, name: kind == "gradient" and name.startswith("first"))


def without_buffers(monkeypatch):
    compared_without(monkeypatch, lambda kind, name: kind == "buffer")
    monkeypatch.setattr(StepBuffers, "disagreeing", lambda self: [])


def of_losses_alone(monkeypatch):
    compared_without(monkeypatch, lambda kind, name: kind != "loss")


def of_the_rows_as_they_are(monkeypatch):
    monkeypatch.setattr(first_step, "edited", lambda *_: iter(()))
    monkeypatch.setattr(first_step.FirstStep, "_check_choices", lambda *_: None)


@pytest.mark.parametrize(
    "mutant, model, loss_fn",
    [
        (without_the_first_stage, MixesGradients, squares),
        (without_buffers, Counts, squares),
        (of_losses_alone, MixesGradients, squares),
        (of_the_rows_as_they_are, Habit, masked),
    ],
)
def test_a_damaged_check_accepts_what_is_wrong(threads, monkeypatch, mutant, model, loss_fn):
    x, target = torch.randn(8, 4), torch.arange(8.0)

    def first_loss():
        driver = PipelineDriver1F1B(pipeline(model(), loss_fn), threads)
        try:
            return driver.run(2, x, target)
        finally:
            driver.close()

    with pytest.raises(MicrobatchError):
        first_loss()
    mutant(monkeypatch)
    assert first_loss().isfinite()
