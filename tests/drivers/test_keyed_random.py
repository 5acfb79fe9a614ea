"""Random numbers that depend on the seed, the step, the micro-batch and the operation: no split changes them.

The second way to compute them is the Pipe with one mark, called in this process for one micro-batch after the other.
"""

import copy
import itertools
import random
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pippy import (
    MultiUseParameterConfig,
    Pipe,
    SplitPoint,
    annotate_split_points,
    clear_split_points,
    keyed_random,
    pipeline,
)
from pippy.drivers.base.errors import DriverError, StepError
from pippy.drivers.driver.drivers import PipelineDriver, PipelineDriver1F1B, PipelineDriverFillDrain
from pippy.ir.run.random_state import draw_from_torch
from tests.comparisons import update

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")
CHUNKS = 4


class Block(nn.Module):
    """All that draws: modules, functions, methods, one module twice, and a checkpointed part."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout, self.rrelu = nn.Linear(8, 8), nn.Dropout(0.5), nn.RReLU()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def forward(self, x):
        x = self.dropout(self.linear(x))
        heads = x.view(x.shape[0], -1, 2, 4).transpose(1, 2)
        seen = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3).transpose(1, 2).flatten(2)
        x = self.rrelu(x + self.attention(x, x, x)[0] + seen)
        x = x + torch.rand_like(x) * torch.empty_like(x).bernoulli_(0.5)
        return checkpoint(self.part, self.dropout(x), use_reentrant=False, preserve_rng_state=False)

    def part(self, x):
        return F.dropout(self.linear(x).tanh(), 0.2, self.training)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.lstm(x)[0]


@pytest.fixture(scope="module")
def batch():
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(2, 8, 3, 8, generator=numbers, dtype=torch.float64)


def net():
    torch.manual_seed(0)
    return Net()


def marked(model, *blocks):
    annotate_split_points(model, {f"blocks.{block}": SplitPoint.BEGINNING for block in blocks})
    return model


def new(*blocks):
    return pipeline(marked(net(), *blocks), nn.MSELoss())


cut = cache(new)  # drivers train copies


def trained(cluster, pipe, batch, schedule="1f1b", steps=2, chunks=CHUNKS, **options):
    """Some steps with SGD: the losses, and the parameters."""
    driver = PipelineDriver(pipe, cluster, schedule=schedule, keyed_random=7, **options)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    losses = []
    for _ in range(steps):
        losses.append(driver.run(chunks, *batch))
        update(optimizer)
    state = driver.state_dict()
    return losses, state


def trained_here(pipe, batch, steps=2, sizes=(2,) * CHUNKS):
    """The same with the Pipe in this process."""
    losses = []
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        weighed = []
        for number, rows in enumerate(zip(*(each.split(sizes) for each in batch))):
            with keyed_random(7, step, number):
                weighed.append(pipe(*rows) * sizes[number] / sum(sizes))
        for parameter in pipe.parameters():
            parameter.grad = parameter.grad / len(sizes)  # of even micro-batches
        losses.append(torch.stack(weighed).sum())
        optimizer.step()
    return losses, pipe.state_dict()


def assert_same(one, other):
    assert all(map(torch.equal, one[0], other[0])), (one[0], other[0])
    assert [name for name, tensor in one[1].items() if not torch.equal(tensor, other[1][name])] == []


@pytest.fixture
def wanted(cluster, batch):
    return trained(cluster, cut(2), batch)


WAYS = [
    ((1, 2, 3), "1f1b", {}),
    ((1, 2, 3), "fill_drain", {"checkpoint": "always"}),
    ((1, 3), "1f1b", {"all_ranks": [3, 1, 0]}),
    ((1, 2, 3), "interleaved_1f1b", {"world_size": 2, "checkpoint": "except_last"}),
    ((1, 2, 3), "interleaved_1f1b", {"world_size": 1}),
    ((1, 2, 3), "zb_h1", {}),
    ((1, 2, 3), "1f1b", {"out_of_order": True}),
]


def test_every_split_schedule_and_order_gives_the_same_bits(cluster, batch, wanted):
    here = trained_here(new(1), batch)
    assert_same(here, trained_here(new(2, 3), batch))
    assert torch.equal(here[0][0], wanted[0][0])
    torch.testing.assert_close(here, wanted, rtol=1e-12, atol=1e-13)
    for blocks, schedule, options in WAYS:
        assert_same(trained(cluster, cut(*blocks), batch, schedule, **options), wanted)


def test_uneven_microbatches_on_workers_and_here(cluster, batch):
    uneven = [each[:7] for each in batch]
    losses, _ = trained(cluster, cut(2), uneven, steps=1, chunks=3)
    here, _ = trained_here(new(1), uneven, steps=1, sizes=(3, 2, 2))
    torch.testing.assert_close(losses, here, rtol=1e-14, atol=0)


class Tied(nn.Module):
    """Whole numbers all the way: sums of gradients are exact in any order, so that parameters can be shared in any way."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)
        self.blocks = nn.ModuleList(nn.Identity() for _ in range(3))
        with torch.no_grad():
            self.linear.weight.copy_(torch.arange(-8, 8).view(4, 4))
            self.linear.bias.fill_(2)

    def forward(self, x):
        for block in self.blocks:
            x = block(self.dropout(self.linear(x)))
        return x


@pytest.mark.parametrize("config", MultiUseParameterConfig)
def test_shared_parameters(cluster, config):
    def gradients(*blocks):
        model = Tied()
        annotate_split_points(model, {f"blocks.{block}": SplitPoint.END for block in blocks})
        pipe = pipeline(model, lambda y, t: (y * t).sum(), multi_use_param_spec=config)
        driver = PipelineDriver1F1B(pipe, cluster, keyed_random=7, loss_reduction="sum", check=False)
        x = torch.arange(32.0).view(8, 4)
        loss = driver.run(CHUNKS, x, x)
        found = driver.gradients()
        return loss, *found.values()

    assert all(map(torch.equal, gradients(0), gradients(0, 1)))


def masks(cluster, pipe, **options):
    """What a dropout of ones gives in each micro-batch of a step."""
    driver = PipelineDriver1F1B(pipe, cluster, **options)
    return driver.run(CHUNKS, torch.ones(CHUNKS, 64)).chunk(CHUNKS)


def dropouts():
    return Pipe.from_sequential(nn.Sequential(nn.Dropout(), nn.Dropout(0.01)))


def differ(tensors):
    return not any(torch.equal(one, other) for one, other in itertools.combinations(tensors, 2))


def test_seeds_steps_microbatches_and_operations_draw_different_numbers(cluster):
    assert differ([*masks(cluster, dropouts(), keyed_random=1), *masks(cluster, dropouts(), keyed_random=2)])
    driver = PipelineDriver1F1B(dropouts(), cluster)
    assert differ([driver.run(1, torch.ones(1, 64)) for _ in range(3)])
    same = nn.Dropout()
    twice = Pipe.from_sequential([same, lambda x: torch.cat([x, same(torch.ones_like(x))], 1)])
    with keyed_random(1):
        assert differ(twice(torch.ones(1, 64)).chunk(2, 1))


def test_the_seed_is_that_of_torch(cluster):
    torch.manual_seed(5)
    one = masks(cluster, dropouts())
    torch.rand(3)  # what the script has drawn does not matter
    assert all(map(torch.equal, masks(cluster, dropouts()), one))
    assert all(map(torch.equal, masks(cluster, dropouts(), keyed_random=5), one))
    torch.manual_seed(6)
    assert not torch.equal(masks(cluster, dropouts())[0], one[0])


def test_steps_in_between_that_do_not_train(cluster, batch):
    def losses(evaluate):
        driver = PipelineDriver1F1B(cut(2), cluster, keyed_random=7)
        found, others = [], []
        for _ in range(2):
            found.append(driver.run(CHUNKS, *batch))
            if evaluate:
                with torch.no_grad():
                    others += [driver.run(CHUNKS, *batch) for _ in range(2)]
        state = driver.random_state
        return found, others, state

    (plain, _, state), (found, others, after) = losses(False), losses(True)
    assert found == plain
    assert differ([*found, *others])
    assert state == {"seed": 7, "steps": 2, "evaluations": 0}
    assert after == {**state, "evaluations": 4}


@pytest.mark.parametrize("by_checkpoint", [False, True])
def test_a_run_goes_on_elsewhere(cluster, batch, tmp_path, by_checkpoint):
    wanted, _ = trained(cluster, cut(2), batch, steps=3)
    first = PipelineDriver1F1B(cut(2), cluster, keyed_random=7)
    optimizer = first.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    assert first.run(CHUNKS, *batch) == wanted[0]
    update(optimizer)
    second = PipelineDriver(cut(1, 2, 3), cluster, schedule="fill_drain")
    other = second.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    if by_checkpoint:
        first.save(tmp_path, optimizer=optimizer)
        second.load(tmp_path, optimizer=other)
    else:
        second.load_state_dict(first.state_dict())
        second.random_state = first.random_state
    for loss in wanted[1:]:
        assert second.run(CHUNKS, *batch) == loss
        update(other)
    assert second.random_state == {"seed": 7, "steps": 3, "evaluations": 0}


def test_a_step_that_failed_draws_the_same_when_it_is_repeated(cluster, batch):
    driver = PipelineDriver1F1B(cut(2), cluster, keyed_random=7)
    driver.run(CHUNKS, *batch)
    wanted = driver.run(CHUNKS, *batch)
    driver.random_state = {"seed": 7, "steps": 1, "evaluations": 0}
    wrong = driver.run_async(CHUNKS, torch.zeros(8, 3, 5), batch[1])
    behind = driver.run_async(CHUNKS, *batch)
    for step in (wrong, behind):
        with pytest.raises(StepError):
            step.result()
    assert driver.random_state == {"seed": 7, "steps": 1, "evaluations": 0}
    steps = [driver.run_async(CHUNKS, *batch) for _ in range(2)]
    assert steps[0].result() == wanted
    assert steps[1].result() != wanted


def test_drivers_do_not_disturb_one_another(cluster, batch):
    one, other = (PipelineDriver1F1B(cut(2), cluster, keyed_random=seed) for seed in (7, 8))
    found = [(one.run(CHUNKS, *batch), other.run(CHUNKS, *batch)) for _ in range(2)]
    alone = PipelineDriver1F1B(cut(2), cluster, keyed_random=7)
    assert [alone.run(CHUNKS, *batch) for _ in range(2)] == [each for each, _ in found]


class OfPython(nn.Module):
    """A layer of the user's own, with generators of Python and numpy."""

    def forward(self, x):
        return x * random.random() + np.random.rand()


def test_layers_that_draw_from_python_and_numpy(cluster):
    layers = [nn.Linear(4, 4), OfPython(), OfPython(), nn.Dropout()]
    x = torch.randn(8, 4)
    wanted = None
    for stages in ([layers], [layers[:2], layers[2:]], [[each] for each in layers]):
        model = nn.Sequential(*itertools.chain(*stages))
        at = itertools.accumulate(len(stage) for stage in stages[:-1])
        annotate_split_points(model, {str(first): SplitPoint.BEGINNING for first in at})
        pipe = pipeline(model, num_stages=1) if len(stages) == 1 else pipeline(model)
        driver = PipelineDriver1F1B(pipe, cluster, keyed_random=7)
        found = driver.run(CHUNKS, x)
        clear_split_points(model)
        wanted = found if wanted is None else wanted
        assert torch.equal(found, wanted)


def noisy(output, target):
    return F.mse_loss(output + torch.rand_like(output), target, reduction="sum")


@pytest.mark.parametrize("single", [False, True])
def test_a_loss_that_draws(cluster, batch, single):
    def losses(*blocks):
        pipe = pipeline(marked(net(), *blocks), noisy)
        driver = PipelineDriverFillDrain(
            pipe, cluster, keyed_random=7, loss_reduction="sum", single_loss=single, check=False
        )
        return [driver.run(CHUNKS, *batch) for _ in range(2)]

    assert losses(1) == losses(1, 2, 3)
    assert len(set(losses(2))) == 2


def test_a_compiled_stage_draws_what_it_draws_without(cluster, batch):
    def found(schedule, at="2", **options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8), nn.Dropout())
        annotate_split_points(model, {at: SplitPoint.BEGINNING})
        return trained(cluster, pipeline(model, nn.MSELoss()), batch, schedule, **options)

    plain = found("1f1b")
    assert_same(plain, found("fill_drain", checkpoint="always", compile="eager"))
    assert_same(plain, found("zb_h1", at="1", compile="eager"))


def test_a_process_that_is_a_scripts_keeps_its_random_numbers(threads, batch):
    driver = PipelineDriver1F1B(cut(1, 2, 3), threads)
    before, pythons = torch.get_rng_state(), random.getstate()
    driver.run(CHUNKS, *batch)
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == pythons
    with keyed_random(3):
        torch.rand(2)
    assert torch.equal(torch.get_rng_state(), before)


def test_switched_off(cluster, batch):
    pipe = cut(2)
    driver = PipelineDriver1F1B(pipe, cluster, keyed_random=False)
    assert driver.random_state is None
    driver.random_state = None
    found = driver.run(CHUNKS, *batch)
    with pytest.raises(DriverError, match="made with keyed_random=False; make it without that"):
        driver.random_state = {"seed": 7, "steps": 1, "evaluations": 0}
    other = PipelineDriver1F1B(pipe, cluster, keyed_random=torch.initial_seed())
    assert other.run(CHUNKS, *batch) != found


@pytest.mark.parametrize("wrong", [None, {"seed": 1}, {"seed": 1, "steps": 2.0, "evaluations": 0}, 7])
def test_a_state_that_is_none(cluster, wrong):
    driver = PipelineDriver1F1B(dropouts(), cluster)
    with pytest.raises(DriverError, match="give a dict of whole numbers with seed, steps, evaluations"):
        driver.random_state = wrong
    driver.random_state = driver.random_state
    with pytest.raises(DriverError, match="give a seed"):
        PipelineDriver1F1B(dropouts(), cluster, keyed_random=1.5)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_of_a_gpu_draw_without_cudnn(kind, monkeypatch):
    """What can be seen of it on the CPU: cuDNN is off while the layer computes, and for its copy too; the numbers stay."""
    model = nn.ModuleDict({"drops": kind(4, 4, 2, dropout=0.5), "plain": kind(4, 4)})
    inner, seen = kind.forward, []

    def forward(layer, *given):
        seen.append(torch.backends.cudnn.enabled)
        return inner(layer, *given)

    monkeypatch.setattr(kind, "forward", forward)
    x = torch.randn(3, 4)
    wanted = copy.deepcopy(model).eval()["drops"](x)[0]
    draw_from_torch(model)
    copied = copy.deepcopy(model).eval()
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert torch.equal(model.eval()["drops"](x)[0], wanted)
    assert not torch.equal(copied["drops"](x)[0], wanted), "a copy has parameters of its own"
    model["plain"](x)
    assert seen == [True, False, False, True]
    assert torch.backends.cudnn.enabled
    with pytest.raises(RuntimeError):
        model["drops"](torch.randn(3, 5))
    assert torch.backends.cudnn.enabled
