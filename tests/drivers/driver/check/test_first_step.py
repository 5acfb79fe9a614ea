"""The first step gives the plain model's numbers, or an error whose advice, followed, gives them: whatever the model does."""

import contextlib
import copy
import functools
import math
import random
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import (
    LossWrapper,
    MicroBatches,
    PipelineDriver,
    PipelineDriver1F1B,
    PipelineDriverFillDrain,
    pipe_split,
    pipeline,
)
from pippy.drivers.base.errors import MicrobatchError
from pippy.drivers.batch.divide_call import divide_call
from pippy.drivers.driver.check import comparisons
from pippy.drivers.driver.check.comparisons import Cost
from pippy.drivers.driver.check.first_step import FirstStep
from pippy.drivers.driver.check.rows import TriedRows
from pippy.drivers.driver.check.trial_steps import TrialSteps
from pippy.drivers.driver.check.witness import Witness
from pippy.drivers.worker.driver_state import DriverState
from pippy.drivers.worker.measure.live_storages import LiveStorages
from tests.comparisons import Beside, assert_gradients, assert_loss

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")
WEIGHTS = torch.tensor([0.5, 2.0, 0.0, 1.0], dtype=torch.float64)
ADVICE = re.compile(r"loss_reduction=(.*)$")


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


def assert_same(driver, chunks, model, loss_fn, x, target):
    model.zero_grad()
    driver.zero_grad()
    found = driver.run(chunks, x, target)
    assert_loss(found, loss_fn(model(x), target), rtol=1e-9, atol=1e-12)
    assert_gradients(driver, model, rtol=1e-9, atol=1e-12)


def follow(threads, pipe, chunks, x, target, **options):
    """A driver that runs this step: an ordinary one, or one made as the error says; and what it said."""
    driver = PipelineDriver1F1B(pipe, threads, **options)
    try:
        driver.run(chunks, x, target)
    except MicrobatchError as error:
        assert all(gradient is None for gradient in driver.gradients().values()), "nothing is adopted"
        found = ADVICE.search(str(error))
        if found is not None:
            return PipelineDriver1F1B(pipe, threads, loss_reduction=eval(found[1])), found[1]
        if "single_loss=True" in str(error):
            return PipelineDriverFillDrain(pipe, threads, single_loss=True), "single_loss"
        return None, str(error)
    return driver, None


def padded(rows=8, value=0):
    target = torch.randint(1, 4, (rows,))
    target[:3] = value
    return target


# Losses as functions, and what the error advises; None where the step is right without being told.
LOSSES = {
    "sum": (lambda o, t: F.cross_entropy(o, t, reduction="sum"), padded(), "'sum'"),
    "ignore": (lambda o, t: F.cross_entropy(o, t, ignore_index=0), padded(), None),
    "default": (lambda o, t: F.cross_entropy(o, t), padded(value=-100), None),
    "no padding": (lambda o, t: F.cross_entropy(o, t), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]), None),
    "mean": (lambda o, t: ((o - 1) ** 2).mean(), padded(), None),
    "class weights": (lambda o, t: F.cross_entropy(o, t, WEIGHTS + 0.25, label_smoothing=0.1), padded(value=3), None),
    "a mask": (lambda o, t: F.cross_entropy(o[t > 0], t[t > 0]), padded(), "lambda target: (target > 0).sum()"),
    "contrastive": (lambda o, t: F.cross_entropy(o @ o.t(), torch.arange(len(o))), padded(), "single_loss"),
    "std": (lambda o, t: (o - t[:, None]).std(), padded(), "single_loss"),
    "broadcast": (lambda o, t: F.mse_loss(o[:, :1], t.double()), padded(), "single_loss"),
}


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_written_as_functions(threads, name, zero):
    loss_fn, target, advice = LOSSES[name]
    model, x = Net(zero and name != "std"), torch.randn(8, 4)
    driver, given = follow(threads, pipeline(copy.deepcopy(model), loss_fn), 4, x, target)
    assert given == advice
    assert_same(driver, 4 if given != "single_loss" else 2, model, loss_fn, x, target)
    assert_same(driver, 3, model, loss_fn, x, target)


class Mixing(Net):
    def __init__(self, mix):
        super().__init__()
        self.mix = mix

    def forward(self, x):
        x = self.mix(torch.tanh(self.a(x)))
        pipe_split()
        return self.b(x)


LOSSES_OF_TORCH = [nn.MSELoss(), F.cross_entropy, functools.partial(F.mse_loss, reduction="sum")]


@pytest.mark.parametrize("loss_fn", LOSSES_OF_TORCH)
@pytest.mark.parametrize(
    "mix",
    [lambda x: x - x.mean(0), lambda x: x.softmax(0), lambda x: x / x.abs().max(), lambda x: F.normalize(x, dim=0)],
)
def test_rows_that_are_mixed_under_a_loss_of_torch(threads, mix, loss_fn):
    model, x = Mixing(mix), torch.randn(8, 4)
    target = torch.randint(4, (8,)) if loss_fn is F.cross_entropy else torch.randn(8, 4)
    pipe = pipeline(copy.deepcopy(model), loss_fn)
    driver, said = follow(threads, pipe, 4, x, target)
    assert driver is None and "the model mixes rows" in said and "chunks=1" in said
    assert_same(PipelineDriver1F1B(pipe, threads), 1, model, loss_fn, x, target)


class WithPenalty(nn.Module):
    """A model whose loss has a part that is made in its first stage."""

    def __init__(self, penalty):
        super().__init__()
        self.penalty, self.a, self.b = penalty, nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x, labels):
        x = torch.tanh(self.a(x))
        penalty = self.penalty(x)
        pipe_split()
        return F.cross_entropy(self.b(x), labels) + penalty


def balance(x):
    p = x.softmax(-1)
    return 0.001 * (F.one_hot(p.argmax(-1), 6).to(p.dtype).mean(0) * p.mean(0)).sum()


def balance_of_gradients(x):
    """It is 0, and has a gradient."""
    return balance(x) - balance(x).detach()


@pytest.mark.parametrize(
    ("penalty", "right"),
    [
        (lambda x: 0.1 * x.square().mean(), True),
        (balance_of_gradients, False),
        (lambda x: 0.01 * x.square().sum(), False),
        (balance, False),
    ],
)
def test_a_part_of_the_loss_from_an_early_stage(threads, penalty, right):
    x, labels = torch.randn(8, 4), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    pipe = pipeline(WithPenalty(penalty), output_loss_value_spec=True)
    if right:
        driver = PipelineDriver1F1B(pipe, threads)
        for _ in range(2):
            driver.run(4, x, labels)
        labels[3:5] = -100  # the mean of the entropies is over less, and that of the penalty is not
        with pytest.raises(MicrobatchError, match="The numbers differ"):
            driver.run(4, x, labels)
        return
    with pytest.raises(MicrobatchError, match=r"gradient of 'a\.(weight|bias)' \(submod_0\)"):
        PipelineDriver1F1B(pipe, threads).run(4, x, labels)
    PipelineDriver1F1B(pipe, threads, check=False).run(4, x, labels)


def shifted(output, labels):
    return F.cross_entropy(output[:, :-1].flatten(0, 1), F.pad(labels, (0, 1), value=-100)[:, 1:-1].flatten())


@pytest.mark.parametrize("seed", range(3))
def test_a_shifted_loss_is_weighted_by_the_targets_that_count(threads, seed):
    """Right padding of a causal language model: (labels != -100).sum() is wrong, it was advised, and was not checked."""
    torch.manual_seed(seed)
    model, x, labels = Net(), torch.randn(6, 5, 4), torch.randint(4, (6, 5))
    for row, length in enumerate((5, 2, 5, 1, 4, 3)):
        labels[row, length:] = -100
    pipe = pipeline(copy.deepcopy(model), shifted)
    assert_same(PipelineDriver1F1B(pipe, threads), 3, model, shifted, x, labels)
    driver, advice = follow(threads, pipe, 3, x, labels, loss_reduction=lambda target: (target != -100).sum())
    assert advice == "lambda target: (target[:, 1:] != -100).sum()"
    assert_same(driver, 3, model, shifted, x, labels)


def mean_where(counts):
    def loss(output, target):
        return (output.square().sum(1) * counts(target)).sum() / counts(target).sum()

    return loss


def by_hand(o, t):
    return -o.log_softmax(-1).gather(-1, t.clamp(min=0).unsqueeze(-1)).mean()


LATER = {
    "a number": (mean_where(lambda t: t != 7), [1, 2, 3, 0], [1, 7, 7, 2], "lambda target: (target != 7).sum()"),
    "a limit": (mean_where(lambda t: t > 0), [1, 2, 3, 1], [0, 0, 0, 2], "lambda target: (target > 0).sum()"),
    "a mask": (mean_where(lambda t: t), [True] * 4, [True, False, False, True], "lambda target: target.sum()"),
    "weights": (mean_where(lambda t: t), [1.0] * 4, [0.5, 2.0, 0.0, 1.0], "lambda target: target.sum()"),
    "not a number": (
        lambda o, t: torch.where(t.isnan(), 0, o.sum(1)).sum() / (~t.isnan()).sum(),
        [1.0, 2.0, 3.0, 4.0],
        [1.0, math.nan, math.nan, 4.0],
        "lambda target: (~target.isnan()).sum()",
    ),
    "equal to itself": (
        lambda o, t: F.mse_loss(o.sum(1)[t == t], t[t == t]),
        [1.0, 2.0, 3.0, 4.0],
        [1.0, math.nan, math.nan, 4.0],
        "lambda target: (~target.isnan()).sum()",
    ),
    "chosen": (
        lambda o, t: F.cross_entropy(o[t >= 0], t[t >= 0]),
        [1, 2, 3, 0],
        [1, -1, -1, 2],
        "lambda target: (target >= 0).sum()",
    ),
    "what torch leaves out": (lambda o, t: F.cross_entropy(o, t, ignore_index=2), [0, 1, 3, 0], [0, 1, 2, 2], None),
    "a number that is counted": (
        lambda o, t: (o.square().sum(1) * torch.where(t == 7, 2.0, 1.0)).mean(),
        [1, 2, 3, 0],
        [1, 7, 7, 0],
        None,
    ),
    "a number that only torch's losses leave out": (by_hand, [0, 1, -100, 3], [0, 1, -100, -100], None),
}


@pytest.mark.parametrize("name", LATER)
def test_what_first_comes_in_a_later_step_is_seen_in_the_first(threads, name):
    loss_fn, first, later, advice = LATER[name]
    model, x, first, later = Net(), torch.randn(4, 4), torch.tensor(first), torch.tensor(later)
    driver, given = follow(threads, pipeline(copy.deepcopy(model), loss_fn), 2, x, first)
    assert given == advice
    assert_same(driver, 2, model, loss_fn, x, first)
    assert_same(driver, 2, model, loss_fn, x, later)


def mean_of_kept(output, target):
    kept = target + 0 * output.sum(1) > -0.5
    return F.cross_entropy(output[kept], target[kept])


@pytest.mark.parametrize("returned", [False, True])
def test_a_mask_that_leaves_rows_out_later_is_seen_in_the_step_in_which_it_does(threads, returned):
    """``loss_reduction="mean"`` says that it never does; such a step was wrong without a word."""
    model, x, target = Net(), torch.randn(8, 4), torch.tensor([0, 1, 2, 3] * 2)
    given = copy.deepcopy(model)
    pipe = pipeline(Keeping(given, mean_of_kept)) if returned else pipeline(given, mean_of_kept)
    driver = PipelineDriver1F1B(pipe, threads, loss_reduction="mean")
    driver.run(4, x, target)
    torch.testing.assert_close(
        driver.get_grad("a.weight" if not returned else "module.a.weight"), grad_of(model, x, target)
    )
    driver.zero_grad()
    target[[0, 1, 2, 4, 6]] = -1  # of the first micro-batch no row is left, of the second one
    with pytest.raises(MicrobatchError, match=r"unequal parts.*0 of 2, 1 of 2(.|\n)*has left no gradients"):
        driver.run(4, x, target)
    assert all(each is None for each in driver.gradients().values())
    driver.run(1, x, target)


class Keeping(LossWrapper):
    def forward(self, x, target):
        return self.loss_fn(self.module(x), target)


def grad_of(model, x, target):
    mean_of_kept(model(x), target).backward()
    return model.a.weight.grad


def alike(model, expert):
    """The model, all of whose rows choose this expert: a few rows do not show what becomes of others."""
    with torch.no_grad():
        model.a.bias[expert] = 9.0
    return model


@pytest.mark.parametrize(
    "chosen",
    [
        lambda p: F.one_hot(p.argmax(-1), 6).to(p.dtype).mean(0),
        lambda p: F.one_hot(p.topk(1, -1).indices, 6).double().sum(1).sum(dim=0) / p.size(0),
        lambda p: torch.zeros_like(p.detach()).scatter(1, p.argmax(1, keepdim=True), 1.0).mean((0,)),
        lambda p: (p.argmax(1, keepdim=True) == torch.arange(6)).double().mean(0, keepdim=True),
    ],
)
def test_a_mean_of_choices_that_are_alike_asks_for_a_reduction(threads, chosen):
    model = alike(WithPenalty(lambda x: (chosen(x.softmax(-1)) * x.softmax(-1).mean(0)).sum()), 2)
    pipe = pipeline(model, output_loss_value_spec=True)
    x, labels = torch.randn(8, 4), torch.tensor([0, 1, 2, 3] * 2)
    with pytest.raises(MicrobatchError, match=r"what each row chooses(.|\n)*mean(.|\n)*loss_reduction='mean'"):
        PipelineDriver1F1B(pipe, threads).run(4, x, labels)
    driver = PipelineDriver1F1B(pipe, threads, loss_reduction="mean")
    loss = driver.run(4, x, labels)
    torch.testing.assert_close(loss, model(x, labels).detach())
    torch.testing.assert_close(PipelineDriver1F1B(pipe, threads).run(1, x, labels), loss)


class Chooses(nn.Module):
    """Experts that are chosen by each row, and how many labels are met: no choice is averaged in what is trained."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)
        self.experts = nn.Parameter(torch.randn(6, 6, 6))

    def forward(self, x, labels):
        p = self.a(x).softmax(-1)
        top = p.topk(2, -1)
        mean = p.mean(0, keepdim=True).detach() * 0
        x = (self.experts[top.indices].sum(-1) * top.values.unsqueeze(-1)).sum(1) * F.one_hot(p.argmax(-1), 6) + mean
        pipe_split()
        logits = self.b(x)
        return {"loss": F.cross_entropy(logits, labels), "met": (logits.argmax(-1) == labels).double().mean()}


def test_choices_of_each_row_are_not_refused(threads):
    model = alike(Chooses(), 2)
    x, labels = torch.randn(8, 4), torch.tensor([0, 1, 2, 3] * 2)
    driver = PipelineDriver1F1B(pipeline(copy.deepcopy(model)), threads)
    loss = driver.run(4, x, labels, outputs=False)
    expected = model(x, labels)["loss"]
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, gradient in driver.gradients().items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)


# Random numbers, buffers, and what a check leaves


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
    before, random_state = torch.get_rng_state(), driver.random_state
    driver.run(3, x, x)
    state = next(
        state for worker in threads.engine.workers for state in worker.drivers.values() if "_loss" in state.modules
    )
    assert state.modules["_loss"].times == 3 and state.modules["_loss"].dropout.training
    assert torch.equal(torch.get_rng_state(), before)
    assert driver.random_state["steps"] == random_state["steps"] + 1
    assert state.modules["_loss"].calls == 1 and loss_fn.times == 0 and loss_fn.calls == 0


class Rounded(torch.autograd.Function):
    """Straight through: its gradient is that of its input, clamped."""

    @staticmethod
    def forward(ctx, x):
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-0.02, 0.02)


class RoundsWeights(Net):
    def forward(self, x):
        x = torch.tanh(F.linear(x, Rounded.apply(self.a.weight), self.a.bias))
        pipe_split()
        return self.b(x)


@pytest.mark.parametrize("chunks", [2, 3])
def test_a_straight_through_gradient_of_values_is_clamped_row_by_row(threads, chunks):
    model, x, target = Mixing(Rounded.apply), torch.randn(8, 4), torch.randn(8, 4)
    driver = PipelineDriver1F1B(pipeline(copy.deepcopy(model), nn.MSELoss()), threads)
    assert_same(driver, chunks, model, nn.MSELoss(), x, target)
    values = torch.tanh(model.a(x)).detach().requires_grad_()
    F.mse_loss(model.b(Rounded.apply(values)), target).backward()
    assert values.grad.abs().max() == 0.02, "the clamp is at work"


class WithBuffer(nn.Module):
    """``change`` gets the buffer and the rows."""

    def __init__(self, change):
        super().__init__()
        self.a, self.b, self.change = nn.Linear(4, 6), nn.Linear(6, 4), change
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        x = torch.tanh(self.a(x))
        with torch.no_grad():
            self.change(self.seen, x)
        pipe_split()
        return self.b(x)


def spectral():
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 4))


WITH_BUFFERS = {
    "counted": lambda: WithBuffer(lambda seen, x: seen.add_(1)),
    "added up": lambda: WithBuffer(lambda seen, x: seen.add_(x.sum(0))),
    "halved": lambda: WithBuffer(lambda seen, x: seen.mul_(0.5).add_(1)),
    "refined": spectral,
}


@pytest.mark.parametrize("name", WITH_BUFFERS)
def test_buffers_that_follow_the_plain_model(threads, name):
    both = Beside(threads, WITH_BUFFERS[name](), pipe={"split": ["2"]} if name == "refined" else None)
    for _ in range(3):
        x = torch.randn(8, 4)
        both.step(4, x, x)
        both.same_state()


def test_a_running_mean_is_refused_or_of_each_micro_batch(threads):
    model, x = WithBuffer(lambda seen, x: seen.lerp_(x.mean(0), 0.1)), torch.randn(8, 4)
    pipe = pipeline(model, nn.MSELoss())
    with pytest.raises(MicrobatchError, match=r"buffer of 'seen' \(submod_0\)(.|\n)*buffers=\"per_microbatch\""):
        PipelineDriver1F1B(pipe, threads).run(4, x, x)
    driver = PipelineDriver1F1B(pipe, threads, buffers="per_microbatch")
    driver.run(4, x, x)
    expected = torch.zeros(6)
    for part in x.chunk(4):
        expected.lerp_(torch.tanh(model.a(part)).detach().mean(0), 0.1)
    torch.testing.assert_close(driver.state_dict()["seen"], expected)


class Centred(nn.Module):
    """A loss with a running mean of itself, a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, output, target):
        loss = F.mse_loss(output, target)
        self.mean.mul_(0.9).add_(0.1 * loss.detach())
        return loss / self.mean


def test_a_buffer_of_the_loss_is_that_of_the_workers_when_a_later_step_is_compared(threads):
    """Its buffer here was as old as the first step: "tracing has lost something" was said of a step that was right."""
    model, loss_fn = Net(), Centred()
    driver = PipelineDriver1F1B(pipeline(copy.deepcopy(model), copy.deepcopy(loss_fn)), threads)
    for rows in (6, 7, 9):
        assert_same(driver, 1, model, loss_fn, torch.randn(rows, 4), torch.randn(rows, 4))
        assert driver.checked.rows == rows


def test_a_buffer_that_depends_on_rows_in_a_later_step_is_refused_there(threads):
    model, x = WithBuffer(lambda seen, x: seen.add_(1 + (x.abs() > 0.999).sum())), torch.randn(8, 4)
    driver = PipelineDriver1F1B(pipeline(model, nn.MSELoss()), threads)
    driver.run(4, x, x)
    x[0] = 1000.0
    with pytest.raises(RuntimeError, match=r"forward changes 'seen' of submod_0 by the rows that it is given"):
        driver.run(4, x, x)
    assert driver.state_dict()["seen"].eq(1).all()


def mean_of_known(output, target):
    return F.cross_entropy(output[target >= 0], target[target >= 0])


def weighted(o, t):
    return (F.cross_entropy(o, t, reduction="none") * t).sum() / t.sum()


class Tokens(Net):
    """Gives three numbers of two classes for each row."""

    def forward(self, x):
        return torch.cat([super().forward(x), x[:, :2]], 1).unflatten(1, (3, 2)).flatten(0, 1)


def least(seen, x):
    seen[:2].copy_(torch.minimum(seen[:2], x.amin(0)[:2]))


def infinite_buffer():
    model = WithBuffer(least)
    model.seen.fill_(math.inf)
    return model


def halves(one, other):
    return MicroBatches([torch.tensor(one), torch.tensor(other)])


def chosen(o, t):
    return F.cross_entropy(o[o.amax(1) > -100], t[o.amax(1) > -100], ignore_index=-1)


def refused(words, loss_fn, target, make=Net, **options):
    return words, make, loss_fn, torch.tensor(target) if isinstance(target, list) else target, options


KNOWN = r"loss_reduction=lambda target: \(target >= 0\)\.sum\(\)"
ALIKE = torch.zeros(8, 4, dtype=torch.float64)
ALIKE[::2] = torch.linspace(-1, 2, 16, dtype=torch.float64).reshape(4, 4) ** 2
REFUSED = {
    "a choice by computed numbers": refused(
        r"a mean over the rows that a mask chooses(.|\n)*loss_reduction=", chosen, [0, 1, 2, 3, 0, 1, 2, 3]
    ),
    "random numbers that are not torch's": refused(
        r"draws random numbers.*loss_reduction='mean'", lambda o, t: (o - t).square().mean() * random.random(), ALIKE
    ),
    "a gradient of weights that is clamped in each micro-batch": refused(
        r"gradient of 'a\.weight'(.|\n)*the model mixes rows(.|\n)*chunks=1", nn.MSELoss(), ALIKE, RoundsWeights
    ),
    "a sum beside a buffer that begins at infinity": refused(
        "loss_reduction='sum'", lambda o, t: (o - t).square().sum(), ALIKE, infinite_buffer
    ),
    "a single row in each micro-batch, which is taken several times": refused(
        KNOWN, lambda o, t: mean_of_known(o, t.flatten()), halves([[1, 0, 1]], [[1, 0, -1]]), Tokens
    ),
    "padding in another piece than the one that is tried": refused(
        KNOWN, mean_of_known, halves([0, 1, 2, 3], [0, -1, 2])
    ),
    "rows that are alike, of which a variance of one and two others is a mean": refused(
        "The numbers differ", lambda o, t: o.var(0).mean() + 0 * t.sum(), ALIKE
    ),
    **{  # a mean that is weighted by labels is one over rows, if the labels of both micro-batches have the same mean
        f"labels {labels}": refused(
            r"loss_reduction=lambda target: target.sum\(\)", weighted, labels, loss_reduction="mean"
        )
        for labels in ([3, 3, 3, 3, 3, 3], [1, 2, 2, 1, 2, 3], [1, 3, 2, 2, 1, 3])
    },
    "numbers that were put into the rows": refused(
        r"^5 of the rows, in some of which 'target' is 7, were run as one micro-batch",
        mean_where(lambda t: t != 7),
        [1, 2, 3, 0, 1, 2, 3, 0],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(threads, name):
    words, make, loss_fn, target, options = REFUSED[name]
    pieces = isinstance(target, MicroBatches)
    x = MicroBatches([torch.randn(len(each), 4) for each in target.values]) if pieces else torch.randn(len(target), 4)
    x, pipe = target if target is ALIKE else x, pipeline(make(), loss_fn)
    with pytest.raises(MicrobatchError, match=words):
        PipelineDriver1F1B(pipe, threads, **options).run(2, x, target)
    if name in ("a choice by computed numbers", "random numbers that are not torch's"):  # as the message advises
        PipelineDriver1F1B(pipe, threads, loss_reduction="mean").run(2, x, target)


# When it is checked


def test_a_kind_of_step_is_checked_once(threads, monkeypatch):
    checked = []
    inner = FirstStep._check
    monkeypatch.setattr(FirstStep, "_check", lambda self, *args: checked.append(1) or inner(self, *args))
    x, pipe = torch.randn(6, 4), pipeline(Net(), lambda o, t: ((o - t) ** 2).mean())
    driver = PipelineDriver1F1B(pipe, threads)
    for chunks in (3, 3, 2):
        driver.run(chunks, x, x)
    with torch.no_grad():
        driver.run(2, x, x)
    assert len(checked) == 1
    driver.run(1, x, x)  # what is not cut is another kind
    assert len(checked) == 2
    pipe.eval()
    driver.run(2, x, x)
    assert len(checked) == 3
    PipelineDriver1F1B(pipe, threads, check=False).run(2, x, x)
    assert len(checked) == 3


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_micro_batches_of_one_row(threads, rows):
    loss_fn = lambda o, t: F.cross_entropy(o, t, reduction="sum")  # noqa: E731
    pipe, x, target = pipeline(Net(), loss_fn), torch.randn(rows, 4), torch.randint(4, (rows,))
    assert follow(threads, pipe, rows, x, target)[1] == "'sum'"


def test_pieces_without_rows_are_compared_one_after_the_other(threads):
    driver = PipelineDriver1F1B(pipeline(Net(), nn.MSELoss()), threads)
    pieces, rowless = MicroBatches([torch.randn(2, 4), torch.randn(2, 4)]), [torch.randn(2, 4), torch.randn(2, 4)]
    driver.run(2, pieces, MicroBatches(rowless, dim=None))
    assert driver.checked.by_model and driver.checked.compared == {"loss": 1, "gradient": 4}


def test_what_cannot_be_compared_is_refused(threads):
    """It was a warning, and the training went on. A copy of a Pipe has no model that could be the witness."""
    driver = PipelineDriver1F1B(copy.deepcopy(pipeline(Net(), nn.MSELoss())), threads)
    pieces, rowless = MicroBatches([torch.randn(2, 4), torch.randn(2, 4)]), [torch.randn(2, 4), torch.randn(2, 4)]
    with pytest.raises(
        MicrobatchError, match=r"not compared is not equal.*nothing says where its rows are.*check=False"
    ):
        driver.run(2, pieces, MicroBatches(rowless, dim=None))
    unchecked = PipelineDriver1F1B(copy.deepcopy(pipeline(Net(), nn.MSELoss())), threads, check=False)
    unchecked.run(2, pieces, MicroBatches(rowless, dim=None))
    assert unchecked.checked is None


@pytest.mark.parametrize("infinite", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_said_and_compared_later(threads, infinite):
    """It is the plain model's, too, and shows nothing."""
    driver = PipelineDriver1F1B(pipeline(Net(), lambda o, t: (o * t).square().sum()), threads)
    x, target = torch.randn(8, 4), torch.full((8, 4), infinite)
    driver.run(2, x, target)
    assert not driver.checked.is_finite and "so the next step is compared" in str(driver.checked)
    with pytest.raises(MicrobatchError, match="loss_reduction='sum'"):
        driver.run(2, x, x)


def test_a_gradient_that_is_no_number_is_said(threads):
    driver = PipelineDriver1F1B(pipeline(Net(), lambda o, t: (o * 0).sqrt().mean() + t.mean()), threads)
    driver.run(2, torch.randn(8, 4), torch.randn(8, 4))
    assert not driver.checked.is_finite


def trials_of_a_first_step(threads, monkeypatch, loss_fn, target):
    sent, inner = [], TrialSteps.run
    monkeypatch.setattr(TrialSteps, "run", lambda self, *args, **more: sent.append(1) or inner(self, *args, **more))
    model, x = Net(), torch.randn(8, 4)
    driver = PipelineDriver1F1B(pipeline(copy.deepcopy(model), loss_fn), threads)
    assert_same(driver, 4, model, loss_fn, x, target)
    return len(sent)


def test_it_takes_two_trials_of_few_rows_if_nothing_is_asked(threads, monkeypatch):
    assert trials_of_a_first_step(threads, monkeypatch, nn.MSELoss(), torch.randn(8, 4)) == 2


@pytest.mark.parametrize("target", [[0, 1, 2, 3] * 2, [0, 1, -100, 3, -100, 1, 2, -100]])
def test_it_takes_nine_trials_at_most_where_a_loss_of_torch_counts(threads, monkeypatch, target):
    """Three sets of rows, cut in two places; and those once as a mean over rows that have other weights then."""
    loss_fn = lambda o, t: F.cross_entropy(o, t)  # noqa: E731
    assert trials_of_a_first_step(threads, monkeypatch, loss_fn, torch.tensor(target)) <= 9


@pytest.mark.parametrize("loss_fn", [F.cross_entropy, nn.CrossEntropyLoss(), lambda o, t: F.cross_entropy(o, t)])
@pytest.mark.parametrize("how", [None, lambda target: (target != -100).sum()])
def test_a_micro_batch_that_is_all_padding_counts_nothing(threads, loss_fn, how):
    model, x, target = Net(), torch.randn(8, 4), torch.tensor([0, 1, 2, 3, -100, -100, 1, 2])
    driver = PipelineDriver1F1B(pipeline(copy.deepcopy(model), loss_fn), threads, loss_reduction=how)
    assert_same(driver, 4, model, loss_fn, x, target)


class LossOfMany(nn.Module):
    """It returns its loss beside other things; an input is called as functions call their only parameter."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x, t=None):
        x = torch.tanh(self.a(x) + (0 if t is None else t))
        pipe_split()
        return self.b(x)


def test_a_function_of_one_argument_gets_the_target_or_is_refused(threads):
    """``lambda t:`` got the model's input of that name, and gradients were off by 80 %."""
    x, t, target = torch.randn(8, 4), torch.rand(8, 1), torch.tensor([0, 1, 2, 3, -100, -100, 1, 2])
    pipe = pipeline(LossOfMany(), F.cross_entropy)
    with pytest.raises(MicrobatchError, match=r"is ambiguous.*input 't'.*lambda \*, t: "):
        PipelineDriver1F1B(pipe, threads, loss_reduction=lambda t: (t != -100).sum()).run(4, x, t, target)
    PipelineDriver1F1B(pipe, threads, loss_reduction=lambda y: (y != -100).sum()).run(4, x, t, target)
    with pytest.raises(MicrobatchError, match="The numbers differ"):
        PipelineDriver1F1B(pipe, threads, loss_reduction=lambda *, t: t.sum()).run(4, x, t, target)


# Which rows are tried, and how they are cut


class Cumulated(nn.Module):
    """It adds up what comes from the rows above, and returns its loss, which leaves padding out."""

    def __init__(self, reduction):
        super().__init__()
        self.a, self.b, self.reduction = nn.Linear(4, 6), nn.Linear(6, 4), reduction

    def forward(self, x, target):
        x = torch.tanh(self.a(x))
        pipe_split()
        x = self.b(x.cumsum(0)).flatten(0, -2)
        return F.cross_entropy(x, target.flatten(), reduction=self.reduction)


@pytest.mark.parametrize(("reduction", "said"), [("sum", "sum"), ("mean", None)])
@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("padded_rows", [[1, 3, 4], [1, 4, 5], [0, 3, 5], [3, 5], [0, 1, 2]])
def test_rows_that_are_all_padding_do_not_hide_others(threads, padded_rows, chunks, reduction, said):
    """The second micro-batch of the tried rows had padding alone: what it mixed had no loss."""
    pipe = pipeline(Cumulated(reduction), output_loss_value_spec=True)
    x, target = torch.randn(6, 3, 4), torch.randint(4, (6, 3))
    target[padded_rows] = -100
    for check in (True, 1e-9):  # a few rows alone
        with pytest.raises(MicrobatchError, match="the model mixes rows"):
            PipelineDriver1F1B(pipe, threads, loss_reduction=said, check=check).run(chunks, x, target)


MIXED_A_LITTLE = {
    "sums": lambda h: h + 1e-3 * h.cumsum(0),
    "sums, less": lambda h: h + 1e-5 * h.cumsum(0),
    "first row": lambda h: h - 1e-4 * h[:1],
    "opposite row": lambda h: h + 1e-5 * h.flip(0),
    "mean": lambda h: h + 1e-4 * h.mean(0),
}


@pytest.mark.parametrize("mix", MIXED_A_LITTLE.values(), ids=MIXED_A_LITTLE)
def test_what_the_order_of_rows_changes_is_not_rounding(threads, mix):
    """In float32 the model with its rows turned showed what was taken for rounding: gradients were off by 2.6e-3."""
    torch.set_default_dtype(torch.float32)
    model, x, target = Mixing(mix), torch.randn(8, 4), torch.randn(8, 4)
    with pytest.raises(MicrobatchError, match="were run as one micro-batch by the plain model"):
        PipelineDriver1F1B(pipeline(model, nn.MSELoss()), threads).run(2, x, target)


class SixLargest(Net):
    def forward(self, x):
        h = super().forward(x)
        norms = h.flatten(1).norm(dim=1)
        return h * (norms >= norms.sort(descending=True).values[:6].min()).view(-1, 1, 1)


def test_rows_of_padding_that_tie_do_not_hide_a_choice_among_rows(threads):
    """Six of seven rows were the largest, or all where three tied: the second mini-batch was silently wrong."""
    x, target = torch.randn(7, 3, 4), torch.randint(4, (7, 3))
    x[4:], target[4:] = 0, -100
    model, loss_fn = Net(), lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten())
    with pytest.raises(
        MicrobatchError, match=r"^All 7 rows, where rows with the same inputs have others, in the opposite"
    ):
        PipelineDriver1F1B(pipeline(SixLargest(), loss_fn), threads).run(2, x, target)
    driver = PipelineDriver1F1B(pipeline(copy.deepcopy(model), loss_fn), threads)
    assert_same(driver, 2, model, loss_fn, x, target)


def test_a_mean_that_is_given_counts_micro_batches_that_torchs_losses_would_leave_out(threads):
    model, x = Net(), torch.randn(8, 4)
    driver = PipelineDriver1F1B(pipeline(copy.deepcopy(model), by_hand), threads, loss_reduction="mean")
    assert_same(driver, 4, model, by_hand, x, torch.tensor([0, 1, -100, 3, 2, -100, 1, 2]))
    assert_same(driver, 4, model, by_hand, x, torch.tensor([0, 1, 2, 3, -100, -100, 1, 2]))


# Memory


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        x = torch.tanh(self.a(x))
        pipe_split()
        return self.b(x)


def test_what_it_holds_is_counted(threads, monkeypatch):
    held, inner = [], DriverState._try_out

    def measuring(self, trial, number):
        live = LiveStorages()
        with live:
            live.add(self._held(trial.step))
            result = inner(self, trial, number)
        held.append((self.index, live.most))
        return result

    monkeypatch.setattr(DriverState, "_try_out", measuring)
    x = torch.randn(32, 64)
    driver = PipelineDriver1F1B(pipeline(Wide(), nn.MSELoss()), threads)
    driver.run(8, x, x)
    counted = driver.memory(8, x, x).check
    for worker, count in enumerate(counted):
        assert 0.5 * count < max(bytes for index, bytes in held if index == worker) <= 1.05 * count


@pytest.mark.parametrize("room", [1 << 40, 0], ids=["all rows", "few rows"])
def test_what_the_plain_model_holds_is_counted(threads, monkeypatch, room):
    """Without the numbers of the workers and a copy of its own, which are there around its steps."""
    monkeypatch.setattr("pippy.drivers.driver.check.comparisons.free_bytes", lambda device: 2 * room)
    live, inner = LiveStorages(), Witness.step

    def measuring(self, division, how):
        with live:
            return inner(self, division, how)

    monkeypatch.setattr(Witness, "step", measuring)
    x = torch.randn(512, 64)
    driver = PipelineDriver1F1B(pipeline(Wide(), nn.MSELoss()), threads, check="full")
    state = sum(each.nbytes for each in driver.pipe.parameters())
    counted = driver.memory(8, x, x).in_script - 2 * state
    driver.run(8, x, x)
    assert (driver.checked.tried == 512) is (room > 0)
    assert 0.6 * counted < live.most - state <= 1.05 * counted  # the model's own parameters were there before
    assert "in the script's process" in str(driver.memory(8, x, x))


@pytest.mark.parametrize(
    "fixed, of_row, seconds, tried",
    [
        (0.0, 0.01, 0.05, 5),
        (0.0, 0.01, 0.09, 5),
        (0.0, 0.01, 0.12, 12),
        (0.0, 0.01, 1.0, 100),
        (0.5, 1e-4, 2.0, 512),  # the fixed part of what five rows take does not count 102 times
    ],
)
def test_as_many_rows_are_compared_as_fit(threads, monkeypatch, fixed, of_row, seconds, tried):
    monkeypatch.setattr(comparisons, "Cost", lambda rows, seconds, bytes: Cost(rows, fixed + of_row * rows, bytes))
    x = torch.randn(512, 64)
    driver = PipelineDriver1F1B(pipeline(Wide(), nn.MSELoss()), threads, check=seconds)
    driver.run(8, x, x)
    assert driver.checked.tried == tried
    found = PipelineDriver1F1B(pipeline(Wide(), lambda o, t: F.mse_loss(o[:11], t[:11])), threads, check=seconds)
    with contextlib.nullcontext() if tried == 5 else pytest.raises(MicrobatchError):
        found.run(2, x, x)


def test_it_stays_within_memory(threads):
    x = torch.randn(32, 64)
    pipe = pipeline(Wide(), nn.MSELoss())
    tried = PipelineDriver1F1B(pipe, threads).steps
    needed = max(tried.trial_bytes(tried.graphs.all[0]).of(TriedRows(division_of(tried.model, x)).divided(1)))
    driver = PipelineDriver(pipe, threads, schedule="auto", memory=needed)
    assert driver.steps.trial_fits(driver.graphs[0], TriedRows(division_of(driver, x)).divided(1))
    parameters = 1 * min(sum(each.nbytes for each in stage.parameters()) for _, stage in tried.compiled.stages())
    limited = PipelineDriver(pipe, threads, schedule="auto", memory_limit=needed - parameters)
    assert limited.steps.trial_fits(limited.graphs[0], TriedRows(division_of(limited, x)).divided(1)), (
        "parameters are no activations"
    )
    less = PipelineDriver(pipe, threads, schedule="auto", memory=needed - 1)
    assert not less.steps.trial_fits(less.graphs[0], TriedRows(division_of(less, x)).divided(1))


def division_of(driver, x):
    return divide_call(driver.compiled_pipe, 8, (x, x), {})
