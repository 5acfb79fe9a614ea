"""Workers that compute in another order than the program's, and scripts that call in any order."""

import copy
import random
import time

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import nn

from pippy import MultiUseParameterConfig, Pipe, PipelineDriver, PipelineDriverFillDrain, pipeline
from pippy.drivers.base.errors import DriverError, StepError
from pippy.drivers.batch.specs import MicroBatches
from pippy.drivers.driver.drivers import PipelineDriver1F1B
from pippy.drivers.plan.language.instructions import Compute
from pippy.drivers.plan.orders.registry import REGISTRY
from pippy.drivers.wire.worker_transport import WorkerTransport
from pippy.drivers.worker import out_of_order as policy
from pippy.drivers.worker.halves.split_backward import WeightDeferral
from pippy.drivers.worker.out_of_order import OutOfOrderExecutor
from pippy.ir.base.trees import map_tensors
from tests.comparisons import assert_bits
from tests.drivers.failing_model import BACKWARD, FORWARD, LOSS, SLOW, UNSENDABLE, Training, slow_until_told
from tests.drivers.models import Chain
from tests.drivers.processes import within
from tests.drivers.test_driver import build
from tests.drivers.test_failures import Tied, loss_fn
from tests.drivers.thread_cluster import thread_cluster
from tests.zoo import exhibits

pytestmark = [
    pytest.mark.usefixtures("in_float64", "seeded"),
    pytest.mark.filterwarnings("ignore:a mark after the model's last operation"),
]


@pytest.fixture
def at_random(monkeypatch):
    """Every worker takes any of what it may take now, at first what is not the head, and notes whether it was not."""
    dice, overtook = random.Random(0), []

    def choose(executor, free):
        found = executor.queues.open()
        while True:
            missing = {at: executor._missing(at) for at in found}  # a snapshot: values may come at any moment
            if ready := [at for at in found if not missing[at]]:
                break
            executor.transport.wait_any([executor._wanted(receive) for at in found for receive in missing[at]])
        pick = dice.choice(ready) if any(overtook) else ready[-1]
        overtook.append(pick != found[0])
        return pick

    monkeypatch.setattr(OutOfOrderExecutor, "_next", choose)
    monkeypatch.setattr(WeightDeferral.__init__, "__defaults__", (0,))  # small layers put off their weights too
    return overtook


def outcome(pipe, cluster, given, chunks, **options):
    """The losses of two steps, the gradients and the buffers."""
    torch.manual_seed(3)  # the driver's seed
    driver = PipelineDriver(pipe, cluster, loss_reduction="sum", check=False, **options)
    losses = []
    for _ in range(2):
        torch.manual_seed(4)
        step = driver.run_async(chunks, *given)
        losses.append(step.result())
    program = driver.program(chunks)
    found = losses, driver.gradients(), driver.state_dict()
    limit = options.get("out_of_order", False)
    allowed = program.peak_live if limit in (True, False) else [limit] * program.workers
    assert all(step.peak_live[rank] <= peak for rank, peak in zip(driver.ranks, allowed))
    driver.close()
    return found


def compare(pipe, cluster, given, chunks, out_of_order=True, **options):
    plain = outcome(pipe, cluster, given, chunks, **options)
    mine = outcome(pipe, cluster, given, chunks, out_of_order=out_of_order, **options)
    assert all(map(torch.equal, mine[0], plain[0]))
    assert_bits(mine[1], plain[1])
    assert_bits(mine[2], plain[2])


SCHEDULES = ["fill_drain", "1f1b", "zb_h1", "interleaved_1f1b", "looped_bfs"]


@pytest.mark.parametrize("name", [each for each in exhibits if exhibits[each].loss_fn is not None])
def test_the_zoo_trains_to_the_same_bits_in_any_order(threads, at_random, name):
    number = list(exhibits).index(name)
    schedule = SCHEDULES[number % len(SCHEDULES)]
    model, pipe = build(name, list(MultiUseParameterConfig)[number % 2])
    chunks = 6
    microbatches = [map_tensors(torch.Tensor.detach, model.inputs()) for _ in range(chunks)]
    given = [*(MicroBatches(list(same)) for same in zip(*microbatches)), MicroBatches([model.target()] * chunks)]
    most = 1 if exhibits[name].draws else 2 if "interleaved" in schedule or "looped" in schedule else 4
    workers = min(most, pipe.num_stages)
    limit = True if number % 3 else 4 * chunks  # in their own memory some schedules leave no choice
    compare(pipe, threads, given, chunks, limit, schedule=schedule, world_size=workers)


@pytest.mark.parametrize("schedule", ["eager_1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe_v"])
def test_schedules_with_halves_train_to_the_same_bits(threads, at_random, schedule):
    pipe = pipeline(Chain(4 * REGISTRY[schedule].stages_per_worker), nn.MSELoss())
    given = torch.randn(24, 8), torch.randn(24, 8)
    compare(pipe, threads, given, 8, schedule=schedule)
    if schedule == "eager_1f1b":  # in its own memory it has a choice only when gradients come early
        compare(pipe, threads, given, 8, 8, schedule=schedule)
    assert any(at_random)


def test_a_single_loss_is_that_of_all_micro_batches(threads, at_random):
    given = torch.randn(12, 8), torch.randn(12, 8)
    pipe = pipeline(Chain(4), lambda output, target: (output - target).std())
    losses = []
    for out_of_order in (False, True):
        driver = PipelineDriverFillDrain(pipe, threads, single_loss=True, out_of_order=out_of_order)
        losses.append((driver.run(6, *given), driver.gradients()))
        driver.close()
    assert torch.equal(losses[0][0], losses[1][0])
    assert_bits(losses[1][1], losses[0][1])


class Slow(nn.Module):
    """A layer whose forward and backward take a while."""

    def __init__(self, seconds):
        super().__init__()
        self.layer, self.seconds = nn.Linear(8, 8), seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return Slowly.apply(self.layer(x), self.seconds)


class Slowly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


def test_workers_behind_a_slow_stage_use_their_waits(cluster):
    """By the slow stage, forwards come slowly; the backwards of the last stage need not wait for the last of them."""
    pipe = Pipe.from_sequential(nn.Sequential(Slow(0.002), Slow(0.012), Slow(0.002), Slow(0.002)), nn.MSELoss())
    given = torch.randn(6, 8), torch.randn(6, 8)
    found = {}
    for out_of_order in (False, True):
        driver = PipelineDriver(pipe, cluster, schedule="fill_drain", out_of_order=out_of_order)
        driver.run(6, *given)
        with driver.record() as recording:
            driver.run(6, *given)
        step = recording.steps[-1]
        program = driver.program(6)
        ran = [[order[at] for at in by_end(record)] for order, record in zip(program.orders, step.records)]
        found[out_of_order] = ran, driver.gradients(), step.makespan
        assert step.activities and step.svg() and step.findings()
        driver.close()
    assert found[False][0] == [list(order) for order in program.orders]
    computed = [str(each) for each in found[True][0][-1] if isinstance(each, Compute)]
    assert computed.index("B3.0") < computed.index("F3.5"), computed
    for mine, order in zip(found[True][0], program.orders):
        assert sorted(map(str, mine)) == sorted(map(str, order)), "each instruction once, in the record too"
    gradients = found[True][1], found[False][1]
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def by_end(record):
    return sorted(range(len(record.ends)), key=record.ends.__getitem__)


@pytest.mark.parametrize("patience", [0.0, 0.25, 100.0])
def test_values_that_come_while_a_worker_looks(threads, monkeypatch, patience):
    """A value that was not there came before its worker looked again, to say what it waits for: the worker failed."""
    seen, inner = set(), WorkerTransport.ready

    def ready(transport, key):
        looked = (transport.index, key) in seen
        seen.add((transport.index, key))
        return looked and inner(transport, key)

    monkeypatch.setattr(WorkerTransport, "ready", ready)
    monkeypatch.setattr(policy, "WAITED", patience)
    driver = PipelineDriver(pipeline(Chain(4), nn.MSELoss()), threads, schedule="fill_drain", out_of_order=True)
    for _ in range(3):
        driver.run(8, torch.randn(8, 8), torch.randn(8, 8))


@pytest.mark.parametrize(
    ("schedule", "how"),
    [("1f1b", FORWARD), ("1f1b", UNSENDABLE), ("fill_drain", LOSS), ("zb_h1", BACKWARD), ("zb_h1", UNSENDABLE)],
)
def test_a_step_that_fails_is_told_of_and_forgotten(cluster, schedule, how):
    training = Training(cluster, schedule, out_of_order=True)
    training.step()
    with pytest.raises(StepError) as caught:
        training.fail(how)
    wrong = {
        FORWARD: "worker 1 .*failed at F1.1 ",
        BACKWARD: "worker 1 .*failed at [BI]1.1 ",
        UNSENDABLE: "worker 1 .*failed at send .*1 to 2",
        LOSS: "worker 3 .*failed at F3.1 ",
    }[how]
    caught.match(wrong)
    training.check()


def test_a_step_that_takes_too_long_says_what_each_waits_for(cluster):
    training = Training(cluster, out_of_order=True)
    training.step()
    training.driver.steps.settings.timeout = 0.4
    with (
        slow_until_told(cluster, "F1.1", "from worker 1"),
        within(1.5),
        pytest.raises(StepError, match="took longer") as caught,
    ):
        training.fail(SLOW)
    text = str(caught.value)
    assert "F1.1" in text and "from worker 1" in text, text
    training.driver.steps.settings.timeout = None
    training.check()


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "yes", None])
def test_what_is_no_limit_is_refused(cluster, wrong):
    with pytest.raises(DriverError, match=r"out_of_order=.*give True"):
        PipelineDriver(pipeline(Chain(4), nn.MSELoss()), cluster, out_of_order=wrong)


def test_a_limit_below_what_the_schedule_holds_is_refused(cluster):
    driver = PipelineDriver(pipeline(Chain(4), nn.MSELoss()), cluster, out_of_order=3)
    before = list(cluster.session.counts)
    given = torch.randn(8, 8), torch.randn(8, 8)
    with pytest.raises(DriverError, match=r"worker 0 holds up to 4 .* give at least 4, or True"):
        driver.run(8, *given)
    assert cluster.session.counts == before, "nothing was sent"
    driver.run(3, *given)  # three micro-batches are never more than three
    with torch.no_grad():
        driver.run(8, *given)


def test_a_limit_is_kept_by_whatever_order(at_random):
    with thread_cluster(4) as threads:
        driver = PipelineDriver(pipeline(Chain(4), nn.MSELoss()), threads, out_of_order=6)
        step = driver.run_async(16, torch.randn(16, 8), torch.randn(16, 8))
        step.result()
        assert all(peak <= 6 for peak in step.peak_live.values())
        assert max(step.peak_live.values()) > 4, "forwards ran ahead"
        driver.close()


# Any order of the calls of a training script gives what plain PyTorch gives.


class Calls(RuleBasedStateMachine):
    """The driver and the plain model take the same calls, and are looked at now and then."""

    @initialize(config=st.sampled_from(MultiUseParameterConfig), workers=st.integers(2, 3), momentum=st.booleans())
    def begin(self, config, workers, momentum):
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)
        self.opened = thread_cluster(workers)
        model = Tied().eval()
        self.plain = copy.deepcopy(model)
        pipe = pipeline(model, loss_fn, multi_use_param_spec=config)
        self.driver = PipelineDriver1F1B(pipe, self.opened.__enter__())
        options = {"lr": 0.05, "momentum": 0.9 if momentum else 0.0}
        self.mine = self.driver.instantiate_optimizer(torch.optim.SGD, **options)
        self.theirs = torch.optim.SGD(self.plain.parameters(), **options)
        self.x, self.target = torch.randn(5, 8), torch.randn(5, 8)
        self.running = []

    def teardown(self):
        if hasattr(self, "opened"):
            self.opened.__exit__(None, None, None)
        torch.set_default_dtype(torch.float32)  # only now: a step may be under way in this process

    def plain_run(self):
        loss = loss_fn(self.plain(self.x), self.target)
        loss.backward()
        return loss.detach()

    def close(self, mine, theirs):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-11)

    @rule(chunks=st.integers(1, 3))
    def run(self, chunks):
        self.close(self.driver.run(chunks, self.x, self.target), self.plain_run())

    @rule(chunks=st.integers(1, 3))
    def dispatch(self, chunks):
        self.running.append((self.driver.run_async(chunks, self.x, self.target), self.plain_run()))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def take(self, data):
        running, loss = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.close(running.result(), loss)

    @rule()
    def fail(self):
        """A run that fails; those before it are waited for first, as it would take them with it."""
        while self.running:
            running, loss = self.running.pop()
            self.close(running.result(), loss)
        try:
            self.driver.run(2, self.x + 100, self.target)
        except StepError:
            return
        raise AssertionError("it should have failed")

    @rule()
    def evaluate(self):
        with torch.no_grad():
            self.close(self.driver.run(2, self.x, self.target), loss_fn(self.plain(self.x), self.target))

    @rule()
    def step(self):
        self.mine.step()
        self.theirs.step()

    @rule(by_driver=st.booleans())
    def zero_grad(self, by_driver):
        (self.driver if by_driver else self.mine).zero_grad()
        self.theirs.zero_grad()

    @rule()
    def clip(self):
        norm = nn.utils.clip_grad_norm_(self.plain.parameters(), 0.3)
        self.close(self.driver.clip_grad_norm_(0.3), norm.to(torch.float64))

    @rule(name=st.sampled_from(["weight", "layer.weight", "layer.bias"]))
    def look(self, name):
        mine, theirs = self.driver.get_grad(name), self.plain.get_parameter(name).grad
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            self.close(mine, theirs)

    @rule(rate=st.sampled_from([0.01, 0.1]))
    def change_rate(self, rate):
        for each in (self.mine, self.theirs):
            each.param_groups[0]["lr"] = rate

    @rule()
    def compare(self):
        for name, tensor in self.driver.state_dict().items():
            self.close(tensor, self.plain.state_dict()[name])

    @rule()
    def load(self):
        state = {name: torch.randn_like(tensor) for name, tensor in self.plain.state_dict().items()}
        self.driver.load_state_dict(state)
        self.plain.load_state_dict(state)

    @rule()
    def save_and_load_the_optimizer(self):
        self.mine.load_state_dict(self.mine.state_dict())
        self.theirs.load_state_dict(self.theirs.state_dict())


TestTraining = Calls.TestCase
TestTraining.settings = settings(max_examples=12, stateful_step_count=20, deadline=None, derandomize=True)
