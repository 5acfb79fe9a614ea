"""Messages, values and bytes of a step are counted, and what a step holds."""

import copy
import os
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from pippy import (
    Max,
    MultiUseParameterConfig,
    PipelineDriver,
    PipelineDriver1F1B,
    PipelineDriverFillDrain,
    pipe_split,
    pipeline,
)
from pippy.drivers.plan import make_schedule, simulate
from pippy.drivers.plan.language.instructions import Send
from pippy.drivers.plan.orders.registry import REGISTRY
from pippy.drivers.worker.step_context import StepDevice
from tests.comparisons import Beside, assert_gradients
from tests.drivers.models import Chain, TiedLanguage, cross_entropy, tokens

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


def test_a_step_is_one_message_to_every_worker(cluster):
    driver = PipelineDriver1F1B(pipeline(Chain(3), nn.MSELoss()), cluster)
    x, target = torch.randn(40, 8), torch.randn(40, 8)
    for chunks in (4, 40):
        driver.run(chunks, x, target)
        before = list(cluster.session.counts)
        for _ in range(3):
            driver.run(chunks, x, target)
        assert [after - was for after, was in zip(cluster.session.counts, before)] == [3, 3, 3, 0]


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("schedule", [name for name, entry in REGISTRY.items() if entry.training])
def test_workers_hold_as_many_activations_as_a_simulation_says(threads, schedule, workers):
    """Counted on the workers, forward by forward and backward by backward, for every schedule."""
    per_worker = REGISTRY[schedule].stages_per_worker
    pipe = pipeline(Chain(workers * per_worker), nn.MSELoss())
    driver = PipelineDriver(pipe, threads, schedule=schedule, world_size=workers)
    for chunks in (1, 2 * workers + 1):
        step = driver.run_async(chunks, torch.randn(chunks, 8), torch.randn(chunks, 8))
        step.result()
        made = make_schedule(schedule, workers=workers, chunks=chunks, stages_per_worker=per_worker)
        assert [step.peak_live[rank] for rank in driver.ranks] == list(simulate(made).peak_live)


def test_every_value_crosses_once_to_every_worker_that_needs_it(threads):
    """The skip of the model is used by the third stage, not by the second: two values of one size leave the first."""
    pipe = pipeline(TiedLanguage(), cross_entropy, multi_use_param_spec=MultiUseParameterConfig.TRANSMIT)
    driver = PipelineDriver1F1B(pipe, threads)
    x, target = tokens(6)
    driver.run(3, x, target)
    transports = [worker.context.transport for worker in threads.engine.workers]
    before = [{to: (sent.values, sent.bytes) for to, sent in each.sent.items()} for each in transports]
    driver.run(3, x, target)
    program = driver.program(3)
    sizes = {"weight": 13 * 8 * 8, "hidden": 2 * 5 * 8 * 8}  # of the tied weight; of two rows of anything else
    for worker, order in enumerate(program.orders):
        sends = [each for each in order if isinstance(each, Send)]
        assert len({(each.value, each.microbatch, each.to) for each in sends}) == len(sends)
        for to in {each.to for each in sends}:
            values, moved = transports[worker].sent[to].values, transports[worker].sent[to].bytes
            was_values, was_bytes = before[worker].get(to, (0, 0))
            mine = [each for each in sends if each.to == to]
            assert values - was_values == len(mine)
            assert moved - was_bytes == sum(sizes["weight" if "weight" in each.value else "hidden"] for each in mine)


def held(pid):
    """The threads, file descriptors and kilobytes of a process."""
    process = Path(f"/proc/{pid}")
    resident = next(line for line in (process / "status").read_text().splitlines() if line.startswith("VmRSS"))
    return len(list((process / "task").iterdir())), len(list((process / "fd").iterdir())), int(resident.split()[1])


def test_nothing_grows_over_three_hundred_steps(cluster):
    pipe = pipeline(TiedLanguage(), cross_entropy, multi_use_param_spec=MultiUseParameterConfig.REPLICATE)
    driver = PipelineDriver1F1B(pipe, cluster)
    optimizer = driver.instantiate_optimizer(torch.optim.Adam, lr=1e-3)
    pids = [os.getpid(), *(address.pid for address in cluster.session.workers)]

    def steps(count):
        for _ in range(count):
            optimizer.zero_grad()
            driver.run(4, *tokens(8))
            optimizer.step()

    steps(60)
    before = list(map(held, pids))
    steps(300)
    after = list(map(held, pids))
    for pid, (threads, files, memory), (threads_now, files_now, memory_now) in zip(pids, before, after):
        assert threads_now <= threads and files_now <= files, pid
        assert memory_now - memory < 4096, f"process {pid} grew by {memory_now - memory} kB"


def test_drivers_that_are_gone_leave_nothing_on_the_workers(cluster):
    pids = [address.pid for address in cluster.session.workers]
    pipe = pipeline(Chain(4, width=128), nn.MSELoss())

    def drivers(count):
        for number in range(count):
            driver = PipelineDriver1F1B(pipe, cluster)
            driver.run(2, torch.randn(4, 128), torch.randn(4, 128))
            if number % 2:
                driver.close()
            del driver

    drivers(20)  # what Python and torch make for the first of them stays
    before = list(map(held, pids))
    drivers(20)
    for (_, files, memory), (_, files_now, memory_now) in zip(before, map(held, pids)):
        assert files_now <= files
        assert memory_now - memory < 2048, "a driver holds a stage of 128 kB for each worker"


class Example(nn.Module):
    """What PiPPy is accepted with: four stages, a parameter that two of them share, a skip past one."""

    def __init__(self, width=512):
        super().__init__()
        self.shared = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.other = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        x = torch.mm(x, self.shared)
        skip = x
        x = torch.relu(x)
        pipe_split()
        x = torch.mm(x, self.shared)
        x = self.linear(x)
        pipe_split()
        x = torch.relu(x) + skip
        x = torch.mm(x, self.other)
        pipe_split()
        return torch.relu(self.linear(x))


@pytest.mark.parametrize(
    ("kind", "config"), list(zip([PipelineDriver1F1B, PipelineDriverFillDrain], MultiUseParameterConfig, strict=True))
)
def test_the_acceptance_case_of_pippy(cluster, config, kind):
    """Five micro-batches of 503 rows, then one, then a hundred, on one driver; forward alone, and with the backward."""
    model, x = Example(), torch.randn(503, 512)
    plain = copy.deepcopy(model)
    expected = plain(x)
    forward = kind(pipeline(copy.deepcopy(model), multi_use_param_spec=config), cluster)
    for chunks in (5, 1, 100):
        torch.testing.assert_close(forward.run(chunks, x), expected, rtol=1e-10, atol=1e-12)
    forward.close()
    target = torch.randn(503, 512)
    driver = kind(pipeline(model, nn.MSELoss(reduction="sum"), multi_use_param_spec=config), cluster)
    loss = F.mse_loss(expected, target, reduction="sum")
    loss.backward()
    for chunks in (5, 1, 100):
        driver.zero_grad()
        torch.testing.assert_close(driver.run(chunks, x, target), loss.detach(), rtol=1e-10, atol=0)
        assert_gradients(driver, plain, rtol=1e-8, atol=1e-8)


class Watched(torch.autograd.Function):
    """The identity, whose backward calls what the test wants it to."""

    called = staticmethod(lambda: None)

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        Watched.called()
        return gradient


class TiedEnds(nn.Module):
    """The first and the last stage have the same weight."""

    def __init__(self):
        super().__init__()
        self.first = self.last = nn.Linear(4, 4)

    def forward(self, x):
        x = Watched.apply(self.first(x))
        pipe_split()
        return self.last(torch.relu(x))


def test_the_sums_of_replicated_gradients_begin_while_others_drain(threads, monkeypatch):
    """The first worker's last backward does not end before the last worker's part has come."""
    both = Beside(threads, TiedEnds(), pipe={"multi_use_param_spec": MultiUseParameterConfig.REPLICATE})
    transport, arrived, backwards = threads.engine.workers[0].context.transport, [], []

    def wait_for_the_part():
        backwards.append(1)
        if len(backwards) == 6:  # the last micro-batch of the second step
            deadline = time.monotonic() + 20
            while not transport.ready((threads.session.log.number, 0, 1)):
                assert time.monotonic() < deadline, "the part is sent after the drain"
            arrived.append(1)

    x, target = torch.randn(6, 4), torch.randn(6, 4)
    both.run(3, x, target)
    both.zero_grad()  # now it is known that an update takes one step
    monkeypatch.setattr(Watched, "called", staticmethod(wait_for_the_part))
    backwards.extend([1] * 3)
    both.step(3, x, target)
    assert arrived


# What a step holds: storages that are alive are counted whenever a stage makes one more.


made: dict[str, list[StorageWeakRef]] = {}
most: dict[str, int] = {}


@torch.fx.wrap
def noted(name, value):
    """The value; its storage is counted among those of this name."""
    made.setdefault(name, []).append(StorageWeakRef(value.untyped_storage()))
    most[name] = max(most.get(name, 0), sum(not each.expired() for each in made[name]))
    return value


class NotedGradient(torch.autograd.Function):
    """The value as it is; its gradient is counted."""

    @staticmethod
    def forward(ctx, name, value):
        ctx.name = name
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        return None, noted(ctx.name, gradient.clone())


@torch.fx.wrap
def with_noted_gradient(name, value):
    return NotedGradient.apply(name, value)


class Three(Chain):
    def forward(self, x):
        x = noted("first", self.layers[0](x))
        pipe_split()
        x = noted("second", self.layers[1](x))
        pipe_split()
        return noted("output", with_noted_gradient("gradient", self.layers[2](x)))


def loss_fn(output, target):
    return F.mse_loss(with_noted_gradient("gradient of the output", output), target)


def most_held(run):
    """The most storages of each name that were alive at a time while something ran."""
    made.clear()
    most.clear()
    run()
    return dict(most)


DRIVERS = {
    "1f1b": (PipelineDriver1F1B, {}),
    "one worker": (PipelineDriver1F1B, {"world_size": 1}),
    "zb_h1": (PipelineDriver, {"schedule": "zb_h1"}),
    "out of order": (PipelineDriver, {"schedule": "1f1b", "out_of_order": True}),
}


@pytest.mark.parametrize("kind", DRIVERS)
def test_what_a_step_holds_does_not_grow_with_the_micro_batches(threads, kind):
    """The input of the loss and its gradient were held to the end of the step, and with them the inputs of the last stage."""
    driver_class, options = DRIVERS[kind]
    x, target = torch.randn(64, 8), torch.randn(64, 8)
    driver = driver_class(pipeline(Three(), loss_fn), threads, loss_reduction="mean", check=False, **options)
    few, many = (most_held(lambda chunks=chunks: driver.run(chunks, x, target)) for chunks in (8, 32))
    assert few == many and max(many.values()) <= 3
    with torch.no_grad():
        assert set(most_held(lambda: driver.run(32, x, target)).values()) == {1}
        asked = most_held(lambda: driver.run(32, x, target, outputs=True))
    assert asked == {"first": 1, "second": 1, "output": 32}, "outputs wait for the answer, and nothing else does"


def test_a_step_that_is_done_holds_its_result_alone(threads):
    driver = PipelineDriver1F1B(pipeline(Three()), threads)
    x = torch.randn(8, 8)
    storage = StorageWeakRef(x.untyped_storage())
    with driver.record() as recording:
        step = driver.run_async(4, x)
    del x
    first = step.result()
    driver.run(4, torch.randn(8, 8))  # a thread that answers this one has let go of what it did before
    assert storage.expired(), "the inputs"
    assert step.result() is first and len(recording.steps) == 1 and step.peak_live


class LossInTheMiddle(Chain):
    """The last stage makes an output that the loss does not depend on."""

    def forward(self, x, target):
        x = self.layers[0](x)
        pipe_split()
        x = self.layers[1](x)
        loss = F.mse_loss(x, target)
        pipe_split()
        return {"loss": loss, "largest": noted("beside", torch.tanh(self.layers[2](x))).amax()}


def test_a_stage_without_a_backward_keeps_nothing_for_one(threads):
    x, target = torch.randn(64, 8), torch.randn(64, 8)
    for schedule in ("1f1b", "zb_h1"):
        options = {"schedule": schedule, "loss_reduction": "mean", "output_spec": Max()}
        driver = PipelineDriver(pipeline(LossInTheMiddle()), threads, **options)
        driver.run(32, x, target)  # the first step looks at an output twice
        assert most_held(lambda driver=driver: driver.run(32, x, target)) == {"beside": 1}


@pytest.mark.parametrize(("workers", "most"), [(1, 4), (3, 8)])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_inputs_are_on_the_device_from_their_forward_on(threads, monkeypatch, checkpoint, workers, most):
    """Those of all micro-batches were put there when a training step began, and waited for their turn."""
    there = {}

    def moved(place, tensor):
        if id(tensor) in there and there[id(tensor)]() is tensor:
            return tensor
        copy = noted("inputs", tensor.clone())
        there[id(copy)] = weakref.ref(copy)
        return copy

    monkeypatch.setattr(StepDevice, "takes_inputs_up", True)
    monkeypatch.setattr(StepDevice, "here", moved)
    x, target = torch.randn(64, 8), torch.randn(64, 8)
    model = Three()
    driver = PipelineDriver1F1B(
        pipeline(model, loss_fn), threads, world_size=workers, loss_reduction="mean", checkpoint=checkpoint
    )
    for trains in (True, False):
        with torch.set_grad_enabled(trains):
            assert 1 <= most_held(lambda: driver.run(32, x, target))["inputs"] <= (most if trains else 2 * workers)
    torch.testing.assert_close(driver.run(32, x, target), loss_fn(model(x), target).detach())
