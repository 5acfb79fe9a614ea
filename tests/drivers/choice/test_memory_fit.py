"""Schedules that fit into memory, and the estimates of stages by which they are chosen."""

import re
from ast import literal_eval

import pytest
import torch
from torch import nn

from pippy import PipelineDriver, PipelineDriver1F1B, pipeline
from pippy.balance.balancer import Balancer
from pippy.drivers.base.errors import DriverError
from pippy.drivers.batch.divide_call import divide_call
from pippy.drivers.choice.given_limits import BEGIN, call_to_fit
from pippy.drivers.plan import Costs
from pippy.drivers.plan.choice import search
from pippy.drivers.plan.choice.problem import MemoryLimit, byte_count, limits_of
from pippy.drivers.plan.cost.held_bytes import peak_bytes
from pippy.drivers.plan.language.errors import ArgumentError
from pippy.ir.pipe import Pipe, compiled_of
from tests.drivers.models import Chain

MEASURED = 6


@pytest.fixture(autouse=True)
def few_schedules(monkeypatch):
    """And no search for an order: it takes seconds."""
    monkeypatch.setattr(search, "SEARCHED", 0)
    monkeypatch.setattr(search, "schedules", lambda: ["fill_drain", "1f1b", "zb_h1"])


@pytest.fixture
def pipe(in_float64):
    torch.manual_seed(0)
    return pipeline(Chain(2), nn.MSELoss())


@pytest.fixture
def x(in_float64):
    torch.manual_seed(1)
    return torch.randn(16, 8)


def auto(pipe, cluster, memory, **options):
    return PipelineDriver(pipe, cluster, **{"schedule": "auto", "memory": memory, "world_size": 2, **options})


def least(pipe, cluster, chunks, *args, **options):
    """The least memory with which a driver runs, as its refusal advises it, with the refusal."""
    driver = auto(pipe, cluster, 1, **options)
    before = list(cluster.session.counts)
    with pytest.raises(DriverError, match="memory=1 is too little: the nearest, ") as refused:
        driver.run(chunks, *args)
    assert list(cluster.session.counts) == before
    driver.close()
    (advised,) = re.findall(r"What would fit: memory='(\w[\w.]*)'", str(refused.value))
    return byte_count(advised)


def test_all_steps_fit_and_give_the_numbers_of_the_plain_model(threads, pipe, x):
    pipe, x = pipeline(Chain(3), nn.MSELoss()), torch.cat([x] * 4)
    with_room = auto(pipe, threads, "1GiB", world_size=3)
    loss, gradients = with_room.run(8, x, x), with_room.gradients()
    assert not with_room.program(8).checkpointed
    with_room.close()
    driver = auto(pipe, threads, {0: 1, 1: "1GiB", 2: 2**30}, world_size=3)
    with pytest.raises(DriverError, match=r"with forwards of stage 0 computed again, holds .* on worker 0") as refused:
        driver.run(8, x, x)
    driver.close()
    (advised,) = re.findall(r"What would fit: memory=(\[.*?\])", str(refused.value))
    limits = limits_of(literal_eval(advised), 3)
    driver = auto(pipe, threads, literal_eval(advised), world_size=3)
    again = 0
    for _ in range(MEASURED + 2):
        driver.zero_grad()
        assert torch.equal(driver.run(8, x, x), loss)
        assert all(torch.equal(gradients[name], gradient) for name, gradient in driver.gradients().items())
        measurements = driver._auto._measured[8]
        program = driver.program(8)
        held = peak_bytes(program, measurements.problem.micro_batch(8).sizes)
        assert all(map(int.__le__, held, limits))
        again += bool(program.checkpointed)
    assert again
    choice = driver.choice
    assert choice.measured and choice.problem.limits == (MemoryLimit(limits),)
    assert driver.program(8).computations == choice.program.computations
    assert "<- chosen" in str(choice) and "of " in str(choice)


@pytest.mark.filterwarnings("ignore:the first step was not checked")  # there is room for a step, and no more
def test_what_is_advised_works(threads, x):
    pipe = pipeline(Chain(3), nn.MSELoss())
    limit = least(pipe, threads, 4, x, x)
    driver = auto(pipe, threads, limit)
    assert torch.isfinite(driver.run(4, x, x))
    driver.close()
    driver = auto(pipe, threads, limit * 99 // 100 - 20)
    with pytest.raises(DriverError, match=r"What would fit: .*, or (\d+) micro-batches, or 3 workers") as refused:
        driver.run(4, x, x)
    chunks = int(re.findall(r"(\d+) micro-batches, or 3", str(refused.value))[0])
    assert torch.isfinite(driver.run(chunks, x, x))
    driver.close()
    more = auto(pipe, threads, limit * 99 // 100 - 20, world_size=3)
    assert torch.isfinite(more.run(4, x, x))


def test_the_number_of_micro_batches_is_chosen_where_it_is_left_out(threads, pipe, x):
    limit = least(pipe, threads, None, x, x) * 5 // 4
    driver = auto(pipe, threads, limit)
    counts, losses = [], []
    for _ in range(2 * MEASURED + 2):
        losses.append(driver.run(None, x, x))
        counts.append(driver._auto._latest.choice.chunks if driver.choice else driver._auto._latest.problem.chunks[0])
    assert len(set(counts[:MEASURED])) == 1 and len(set(counts)) in (1, 2, 3)
    assert driver.choice.measured and driver.choice.chunks == counts[-1]
    assert max(driver.choice.chosen.peak_bytes) <= limit
    torch.testing.assert_close(losses[-1], losses[0], rtol=1e-12, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(driver.run(None, x, x), losses[0], rtol=1e-12, atol=0)
    assert torch.isfinite(driver.run(None, x[:5], x[:5]))  # another number of rows


def test_larger_shapes_are_counted_anew_and_smaller_ones_not(threads, pipe, x):
    limit = least(pipe, threads, 4, x, x)
    driver = auto(pipe, threads, limit)
    for _ in range(MEASURED + 1):
        driver.run(4, x[:8], x[:8])
    small = driver.choice
    driver.run(4, x[:6], x[:6])
    assert driver.choice is small
    driver.run(4, x, x)
    large = driver.choice
    assert large is not small and large.measured and max(large.chosen.peak_bytes) <= limit
    assert sum(map(len, large.checkpoint.values())) >= sum(map(len, small.checkpoint.values()))
    more = torch.cat([x] * 4)
    with pytest.raises(DriverError, match="is too little"):
        driver.run(4, more, more)
    assert torch.isfinite(driver.run(4, x, x)) and driver.choice is large


def test_a_mode_that_is_given_stays(threads, pipe, x):
    driver = auto(pipe, threads, "1GiB", checkpoint={1: "always"})
    for _ in range(MEASURED + 1):
        driver.run(4, x, x)
        assert driver.program(4).checkpointed == {(1, microbatch) for microbatch in range(4)}
    driver.close()
    for given, again in (({}, True), ({"checkpoint": "never"}, False)):
        driver = auto(pipe, threads, 1, **given)
        with pytest.raises(DriverError) as refused:
            driver.run(4, x, x)
        assert ("computed again" in str(refused.value)) == again
        driver.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory": "12"}, "memory='12': it has no unit"),
        ({"memory": ["1GiB"]}, r"memory=\['1GiB'\] has 1 sizes for 2 workers"),
        (
            {"memory": "1GiB", "memory_limit": 7},
            "memory= already includes the activations that memory_limit= limits; leave memory_limit out",
        ),
        ({"memory": "1GiB", "out_of_order": True}, "leave one of them out"),
        (
            {"memory_limit": "1GiB", "out_of_order": True},
            "memory_limit='1GiB' and out_of_order=True .* leave one of them out",
        ),
        ({"memory_limit": "12 Gi"}, "memory_limit='12 Gi': give bytes"),
        ({"memory_limit": [1, 2, 3]}, r"memory_limit=\[1, 2, 3\] has 3 sizes for 2 workers"),
        ({"memory": "1GiB", "schedule": "1f1b"}, "memory='1GiB' limits the choice of schedule='auto'"),
        ({"memory_limit": 7, "schedule": "1f1b"}, "memory_limit=7 limits the choice of schedule='auto'"),
        ({"max_live": 1, "world_size": 1}, "max_live=1 leaves worker 0 no room"),
        ({"max_live": [1, 2, 3]}, r"max_live=\[1, 2, 3\] has 3 limits for 2 workers; give one, or one each"),
        ({"max_live": 0}, "max_live=0: give how many stage-micro-batches"),
        ({"costs": Costs()}, "costs=.*schedule='auto' takes memory, max_live, memory_limit and placement"),
        ({"single_loss": True}, "single_loss=True needs all forwards before the loss"),
    ],
)
def test_bad_limits_are_refused_before_anything_is_sent(threads, pipe, options, words):
    before = list(threads.session.counts)
    with pytest.raises((DriverError, ArgumentError), match=words):
        PipelineDriver(pipe, threads, **{"schedule": "auto", "world_size": 2, **options})
    assert threads.session.counts == before


def test_the_number_of_micro_batches_is_left_out_where_nothing_chooses_it(threads, pipe, x):
    for driver in (PipelineDriver1F1B(pipe, threads), PipelineDriver(pipe, threads, schedule="auto")):
        with pytest.raises(DriverError, match=r"chunks=None: give .* schedule='auto' with memory= chooses it"):
            driver.run(None, x, x)
        driver.close()
    driver = auto(pipe, threads, "1GiB")
    with pytest.raises(DriverError, match="it depends on the shapes of a call; run a step first"):
        driver.program(4)
    driver.run(4, x, x)
    assert driver.program(4).chunks == 4


def test_what_workers_are_measured_to_hold_is_within_the_limit(threads):
    """Also after an optimizer was made, whose state was not counted before: then what does not fit is refused."""
    torch.manual_seed(0)
    layers = [layer for _ in range(2) for layer in (nn.Linear(64, 64), nn.Tanh())]
    pipe = pipeline(nn.Sequential(*layers), nn.MSELoss(), num_stages=2, split="parameters")
    x = torch.randn(512, 64)
    limit = least(pipe, threads, 8, x, x)
    driver = auto(pipe, threads, limit)
    driver.run(8, x, x)
    with driver.record(memory=True) as recording:
        for _ in range(MEASURED):
            driver.run(8, x, x)
    for step in recording.steps:
        assert all(max(each.held[0]) <= limit * 1.05 for each in step.noted)
    driver.instantiate_optimizer(torch.optim.AdamW)
    with pytest.raises(DriverError, match=r"holds .* optimizer.*What would fit: memory="):
        driver.run(8, x, x)


class OfNumbers(nn.Module):
    """Fake tensors do not know how many elements it takes: that depends on numbers."""

    def forward(self, x):
        return x[x < torch.inf].view(x.shape)


@pytest.mark.parametrize("option", ["memory", "memory_limit"])
def test_a_model_that_cannot_be_counted_is_refused_and_what_is_advised_works(threads, x, option):
    pipe = pipeline(nn.Sequential(nn.Linear(8, 8), OfNumbers(), nn.Linear(8, 8)), nn.MSELoss(), split=["1"])
    driver = PipelineDriver(pipe, threads, schedule="auto", **{option: "1GiB"})
    before = list(threads.session.counts)
    for chunks in (4, None):
        with pytest.raises(
            DriverError,
            match=rf"(?s)cannot run with them:.*submod_1.*leave {option}= out and give the number of micro-batches: then "
            r"schedule='auto' chooses by time alone. max_live= limits .*driver.record\(memory=True\) measures",
        ):
            driver.run(chunks, x, x)
    assert threads.session.counts == before
    driver.close()
    for advised in ({}, {"max_live": 2}):
        driver = PipelineDriver(pipe, threads, schedule="auto", loss_reduction="mean", **advised)
        with driver.record(memory=True) as recording:
            for _ in range(MEASURED + 1):
                driver.run(4, x, x)
        assert all(max(each.held[0]) > 0 for step in recording.steps for each in step.noted)
        assert driver.choice.measured and driver.choice.chosen.peak_bytes is None
        assert not advised or max(driver.choice.program.peak_live) == 2
        driver.close()


class Twice(nn.Module):
    def forward(self, x):
        return (x.abs() * 2).square()


def test_a_limit_is_for_the_stages_as_graphs_where_these_run(threads):
    """Autograd saves what `abs` and `square` take. Graphs keep the first of these alone."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), Twice(), nn.Linear(64, 64)) for _ in range(2)]
    pipe, x = pipeline(nn.Sequential(*layers), nn.MSELoss(), split=["1"]), torch.randn(1024, 64)
    found = {}
    for compile in (False, "graphs"):
        found[compile] = least(pipe, threads, 8, x, x, checkpoint="never", compile=compile)
        driver = PipelineDriver(pipe, threads, schedule="1f1b", world_size=2, compile=compile)
        peak = max(driver.memory(8, x, x).peaks)
        assert peak <= found[compile] < 1.01 * peak
        driver.close()
    assert found["graphs"] < 0.95 * found[False]


# The costs that are guessed before a step is measured.


LOSS = nn.MSELoss()


class Ticks:
    """A clock for which a forward takes as many milliseconds as its layer says, and a backward three times as many."""

    now = 0

    @classmethod
    def read(cls):
        return cls.now * 1_000_000

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, cost):
            Ticks.now += cost
            ctx.cost = cost
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            Ticks.now += 3 * ctx.cost
            return gradient * 2, None


class Slow(nn.Linear):
    def __init__(self, cost):
        super().__init__(4, 4)
        self.cost = cost

    def forward(self, x):
        return Ticks.Layer.apply(super().forward(x), self.cost)


def costs_of(pipe, rows, chunks):
    x = torch.zeros(rows, 4)
    compiled = compiled_of(pipe)

    def divided(count):
        return divide_call(compiled, count, (x, x), {})

    call = call_to_fit(pipe, ((x, x), {}), divided, torch.device("cpu"), [])
    return call.estimate(chunks).costs


def balanced(split, loss_fn=LOSS, **how):
    x, model = torch.zeros(8, 4), nn.Sequential(Slow(10), Slow(20), Slow(40))
    example = (x, x) if loss_fn is not None else (x,)
    cut = Balancer(split, 2, loss_fn=loss_fn, example_args=example, clock=Ticks.read, **how)
    return Pipe.from_tracing(model, loss_fn=loss_fn, example_args=example, cut=cut, tracer=Leaves(), **how)


class Leaves(torch.fx.Tracer):
    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, Slow)


def test_measured_times_of_the_balancer_are_taken_by_the_size_of_the_micro_batch():
    pipe = balanced("time")
    assert [stage.layers for stage in pipe.balance.stages] == [2, 1]
    assert pipe.balance.seconds() == [pytest.approx((0.03, 0.09)), pytest.approx((0.04, 0.12))]
    costs = costs_of(pipe, rows=64, chunks=2)  # 32 rows, four times as many as the example has
    assert costs.forward == pytest.approx([0.12 + BEGIN, 0.16 + BEGIN])
    assert costs.backward_input == costs.backward_weight == pytest.approx([0.18 + BEGIN, 0.24 + BEGIN])


def test_without_measured_times_flops_are_taken():
    by_hand = pipeline(nn.Sequential(Slow(1), Slow(1)), nn.MSELoss(), split=[1, 1], tracer=Leaves())
    for pipe in (balanced("size"), by_hand):
        assert all(seconds < 0.001 for seconds in costs_of(pipe, rows=64, chunks=2).forward)
    assert balanced("time", None, output_loss_value_spec=False).balance.seconds() is None  # no backward was measured
