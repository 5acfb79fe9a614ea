"""What driver.record gives: measured steps, by the user's names."""

import random
import resource
from collections import Counter
from itertools import pairwise
from mmap import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pippy import MultiUseParameterConfig, Pipe, PipelineDriver, PipelineDriver1F1B, pipe_split, pipeline
from pippy.drivers.base.errors import DriverError, StepError
from pippy.drivers.plan import add_communication, make_schedule, render_svg, simulate
from pippy.drivers.plan.language.instructions import Compute, Receive, Send
from pippy.drivers.plan.passes.rewrites import in_halves
from pippy.drivers.report.activity import Cause
from pippy.drivers.report.model_names import model_names
from pippy.drivers.report.record import Recording
from pippy.drivers.report.step_data import measured_costs
from pippy.drivers.worker.measure.recorder import ProcessMemory
from pippy.ir.pipe import compiled_of
from tests.drivers.models import Chain, TiedLanguage, cross_entropy
from tests.drivers.synthetic_steps import stepped


def record(driver, steps, *arguments, limit=100):
    driver.run(*arguments)
    driver.zero_grad()
    with driver.record(limit=limit) as recording:
        for _ in range(steps):
            driver.run(*arguments)
            driver.zero_grad()
    driver.run(*arguments)
    return recording


def assert_without_gaps(step):
    """Each moment of each worker has one cause, so the times add up to the step."""
    for activities in step.activities:
        assert activities[0].start == 0
        assert activities[-1].end == pytest.approx(step.makespan)
        assert all(one.end == other.start for one, other in pairwise(activities))
        assert all(each.duration > 0 for each in activities)
    for spent in step.spent():
        assert sum(spent.values()) == pytest.approx(step.makespan)


def test_a_recorded_step_has_all_computations_in_the_order_of_the_program(cluster):
    driver = PipelineDriver1F1B(pipeline(Chain(3), nn.MSELoss()), cluster)
    recording = record(driver, 3, 4, torch.randn(8, 8), torch.randn(8, 8), limit=2)
    assert len(recording.steps) == 2
    assert recording.dropped == 1
    step = recording.steps[-1]
    assert [[span.compute for span in spans] for spans in step.timeline.spans] == [
        list(computes) for computes in driver.program(4).computations
    ]
    assert {name: len(times) for name, times in step.durations().items()} == {
        f"{op}{stage}": 4 for op in "FB" for stage in range(3)
    }
    assert "<svg" in render_svg(step.timeline)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_all_time_of_a_real_step_has_its_cause(cluster, schedule):
    stages = 6 if schedule == "zb_v" else 3
    driver = PipelineDriver(pipeline(Chain(stages), nn.MSELoss()), cluster, schedule=schedule, world_size=3)
    for step in record(driver, 2, 4, torch.randn(8, 8), torch.randn(8, 8)).steps:
        assert_without_gaps(step)
        for worker, activities in enumerate(step.activities):
            order = step.program.orders[worker]
            instructions = list(dict.fromkeys(each.at for each in activities if each.at is not None))
            assert instructions == sorted(instructions)
            computing = [order[each.at] for each in activities if each.cause == Cause.COMPUTING]
            assert computing == list(step.program.computations[worker])
            assert all(
                isinstance(
                    order[each.at], {Cause.SENDING: Send, Cause.TRANSFER: Receive, Cause.WAITING: Receive}[cause]
                )
                for each in activities
                if (cause := each.cause) in (Cause.SENDING, Cause.TRANSFER, Cause.WAITING)
            )


def test_the_clocks_of_the_workers_agree(cluster):
    """What a stage needs was made before it began, by whichever worker."""
    driver = PipelineDriver1F1B(pipeline(Chain(3), nn.MSELoss()), cluster)
    with driver.record() as recording:
        driver.run(4, torch.randn(8, 8), torch.randn(8, 8))
    step = recording.steps[0]
    times = {str(span.compute): span for spans in step.timeline.spans for span in spans}
    assert 0 < min(span.start for span in times.values()) < step.makespan
    for microbatch in range(4):
        for stage in range(2):
            assert times[f"F{stage}.{microbatch}"].end <= times[f"F{stage + 1}.{microbatch}"].start
            assert times[f"B{stage + 1}.{microbatch}"].end <= times[f"B{stage}.{microbatch}"].start
    assert all(isinstance(span.compute, Compute) for span in times.values())
    assert step.clock_errors == (0.0, 0.0, 0.0)
    assert step.posted <= min(each.began for each in step.noted) <= max(each.ended for each in step.noted)
    assert max(each.ended for each in step.noted) <= step.answered


def test_bytes_are_counted_by_value_and_edge(cluster):
    driver = PipelineDriver1F1B(pipeline(Chain(3), nn.MSELoss()), cluster)
    (step,) = record(driver, 1, 4, torch.randn(8, 8), torch.randn(8, 8)).steps
    found = {(each.source, each.to): (each.times, each.bytes) for each in step.traffic()}
    assert found == dict.fromkeys([(0, 1), (1, 2), (1, 0), (2, 1)], (4, 8 * 8 * 4))


def test_adding_up_the_gradients_of_copies_is_a_cause_of_its_own(cluster):
    config = MultiUseParameterConfig.REPLICATE
    pipe = pipeline(TiedLanguage(), cross_entropy, multi_use_param_spec=config)
    driver = PipelineDriver1F1B(pipe, cluster)
    (step,) = record(driver, 1, 2, *torch.randint(13, (2, 4, 5))).steps
    holders = [any(each.kind.adds_up for each in order) for order in driver.program(2).orders]
    assert ["adding up" in spent for spent in step.spent()] == holders and True in holders
    assert_without_gaps(step)


def test_steps_without_gradients_are_recorded_too(cluster):
    driver = PipelineDriver1F1B(pipeline(Chain(3), nn.MSELoss()), cluster)
    with torch.no_grad():
        (step,) = record(driver, 1, 4, torch.randn(8, 8), torch.randn(8, 8)).steps
    assert set(step.durations()) == {"F0", "F1", "F2"}
    assert_without_gaps(step)
    assert step.findings()


def test_a_step_that_fails_leaves_no_record_and_the_next_is_whole(cluster):
    driver = PipelineDriver1F1B(pipeline(Chain(3), nn.MSELoss()), cluster)
    with driver.record() as recording:
        with pytest.raises(StepError):
            driver.run(4, torch.randn(8, 9), torch.randn(8, 8))
        driver.run(4, torch.randn(8, 8), torch.randn(8, 8))
    (step,) = recording.steps
    assert_without_gaps(step)
    assert min(each.ends[0] for each in step.records) > 0


def test_other_steps_are_not_recorded(threads):
    """Neither their workers nor their messages have anything to do with it."""
    driver = PipelineDriver1F1B(pipeline(Chain(3), nn.MSELoss()), threads)
    results = {}
    step = driver.run_async(2, torch.randn(8, 8), torch.randn(8, 8))
    step._note = results.update
    step.result()
    assert [each.record for each in results.values()] == [None, None, None]
    states = [worker.drivers[driver.number] for worker in threads.engine.workers[:3]]
    assert not any("recorder" in vars(executor) for each in states for executor in each.programs.values())


@pytest.mark.parametrize("limit", [0, -1, None, True, 2.5])
def test_a_limit_that_keeps_nothing_is_refused(limit):
    with pytest.raises(DriverError, match="how many of the latest steps"):
        Recording(limit)


def test_a_peak_of_memory_is_of_what_happens_after_it_begins():
    memory = ProcessMemory()
    memory.restart()
    if memory.of != "resident":
        pytest.skip("this system keeps one peak for the life of a process")
    before = memory.most
    with mmap(
        -1, 64 << 20
    ) as pages:  # the system's own pages: an allocator may have some left, or keep them afterwards
        pages[:: resource.getpagesize()] = b"1" * ((64 << 20) // resource.getpagesize())
        assert memory.most - before > 60 << 20
    assert memory.most - before > 60 << 20
    memory.restart()
    assert memory.most - before < 4 << 20


# Steps out of thin air


def programs():
    named = st.sampled_from(["1f1b", "fill_drain", "zb_h1", "interleaved_1f1b", "zb_v"])
    return st.builds(
        lambda name, workers, rounds: add_communication(make_schedule(name, workers=workers, chunks=workers * rounds)),
        named,
        st.integers(2, 4),
        st.integers(1, 3),
    )


times = st.floats(0, 1)
randoms = st.integers(0, 1 << 32).map(random.Random)


@settings(max_examples=40, deadline=None)
@given(programs(), randoms, times, times, times, st.none() | times)
def test_causes_add_up_whatever_takes_how_long(program, dice, flight, starting, ending, adding):
    durations = {each: dice.random() for order in program.orders for each in order}
    step = stepped(program, durations.__getitem__, flight, starting, ending, adding)
    assert_without_gaps(step)
    for worker, spent in enumerate(step.spent()):
        assert spent["computing"] == pytest.approx(sum(durations[each] for each in program.computations[worker]))
        sends = Counter()
        for each in program.orders[worker]:
            if isinstance(each, Send):
                sends[f"sending to worker {each.to}"] += durations[each]
        assert {name: each for name, each in spent.items() if name.startswith("sending")} == pytest.approx(sends)
        assert spent.get("starting", 0.0) == pytest.approx(starting)
        assert spent.get("adding up", 0.0) == pytest.approx(adding or 0.0)


@settings(max_examples=40, deadline=None)
@given(programs(), randoms)
def test_with_nothing_but_computations_a_step_idles_as_a_simulation_says(program, dice):
    """The simulator is the second way to compute: fill, drain, and the waits for each worker are its own."""
    costs = {(op, stage): dice.random() for op in "FBIW" for stage in range(program.stages)}
    step = stepped(program, lambda each: costs[each.op, each.stage] if isinstance(each, Compute) else 0.0)
    parts = [[costs[op, stage] for stage in range(program.stages)] for op in "FIWB"]
    expected = simulate(program, parts[0], parts[1], parts[2], backward=parts[3])
    assert step.makespan == pytest.approx(float(expected.makespan))
    assert float(step.predicted.makespan) == pytest.approx(float(expected.makespan))
    for spent, idle in zip(step.spent(), expected.idle_parts):
        assert spent.get("fill", 0.0) == pytest.approx(float(idle.fill))
        assert spent.get("drain", 0.0) == pytest.approx(float(idle.drain))
        waits = {name: each for name, each in spent.items() if name.startswith("waiting")}
        waited = {
            f"waiting for worker {each}": float(seconds) for each, seconds in idle.waiting.items() if seconds > 1e-12
        }
        assert {name: each for name, each in waits.items() if each > 1e-12} == pytest.approx(waited)


def test_a_value_on_its_way_is_not_waited_for():
    """Worker 1 has nothing to do for a second, and then the value takes half a second more."""
    program = add_communication(make_schedule("forward_only", workers=2, chunks=2))
    step = stepped(program, lambda each: {"F0": 2.0, "F1": 1.0}.get(str(each)[:2], 0.0), flight=0.5)
    assert step.spent()[1] == pytest.approx(
        {"computing": 2.0, "fill": 2.0, "waiting for worker 0": 0.5, "transfer from worker 0": 1.0}
    )


@settings(max_examples=40, deadline=None)
@given(
    programs(),
    randoms,
    st.lists(st.floats(-1e4, 1e4), min_size=4, max_size=4),
    st.lists(st.sampled_from(["host a", "host b", "host c"]), min_size=4, max_size=4),
    st.floats(1e-3, 1.0),
)
def test_clocks_of_several_hosts_are_brought_together(program, dice, offsets, hosts, flight):
    """Every time is right to within the error that is stated, and nothing arrives before it is sent."""
    clocks = hosts[: program.workers]
    by_host = dict(zip(["host a", "host b", "host c"], offsets))
    ahead = [by_host[each] for each in clocks]
    durations = {each: 0.1 * dice.random() for order in program.orders for each in order}
    step = stepped(program, durations.__getitem__, flight, ahead=ahead, clocks=clocks)
    truth = stepped(program, durations.__getitem__, flight)
    for worker, (mine, theirs) in enumerate(zip(step.records, truth.records)):
        wrong = (mine.ended - step.records[0].ended) - (theirs.ended - truth.records[0].ended)
        assert abs(wrong) <= step.clock_errors[worker] + 1e-6
        if clocks[worker] == clocks[0]:
            assert step.clock_errors[worker] == 0
    began = {
        (each.value, each.microbatch, each.to): start
        for order, record in zip(step.program.orders, step.records)
        for each, (start, _) in zip(order, record.spans())
        if isinstance(each, Send)
    }
    for worker, (order, record) in enumerate(zip(step.program.orders, step.records)):
        for each, (_, end) in zip(order, record.spans()):
            if isinstance(each, Receive):
                assert end >= began[each.value, each.microbatch, worker] - 1e-6


def test_without_correction_the_clocks_would_be_wrong():
    """What the test above would miss if it could not fail: a shifted clock moves the raw times, and not the corrected."""
    step, truth = (stepped(ahead=[0, each, 0], clocks=["a", "b", "a"], flight=0.1) for each in (50.0, 0.0))
    assert step.noted[1].ended - truth.noted[1].ended == pytest.approx(50)
    assert step.records[1].ended == pytest.approx(truth.records[1].ended)
    assert 0 < step.clock_errors[1] <= 0.1 + 1e-9


# The costs that are read off recorded steps are those that the steps were made with.


SECONDS = {"F": (1.0, 2.0, 3.0), "B": (4.0, 5.0, 9.0), "I": (1.5, 2.5, 3.5), "W": (0.5, 0.25, 0.75)}
FLIGHT = 0.125


def cost(instruction):
    return SECONDS[str(instruction.op)][instruction.stage] if isinstance(instruction, Compute) else 0.0


def test_the_costs_are_the_medians_of_whole_backwards_and_halves():
    plain = make_schedule("1f1b", workers=3, chunks=5)
    steps = [stepped(add_communication(each), cost, flight=FLIGHT) for each in (plain, plain, in_halves(plain))]
    costs = measured_costs(steps)
    for measured, made in (
        (costs.forward, "F"),
        (costs.backward, "B"),
        (costs.backward_input, "I"),
        (costs.backward_weight, "W"),
    ):
        assert measured == pytest.approx(SECONDS[made])
    assert set(costs.latency) == {edge.value for edge in steps[0].program.flow}
    # a value that its receiver did not wait for costs it nothing, so a latency may be less than the flight
    assert all(-1e-9 <= latency <= FLIGHT + 1e-9 for latency in costs.latency.values())
    assert max(costs.latency.values()) == pytest.approx(FLIGHT)


# The names that a report calls stages and values by.


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, cut):
        super().__init__()
        self.blocks, self.head, self.cut = nn.ModuleList(Block() for _ in range(6)), nn.Linear(4, 2), cut

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            if number == self.cut:
                pipe_split()
            x = block(x)
        return self.head(x)


def test_a_stage_is_called_by_the_outermost_modules_that_are_all_in_it():
    names = model_names(compiled_of(pipeline(Model(4), nn.MSELoss())))
    assert names.stages == ("blocks.0 to blocks.3", "blocks.4, blocks.5, head")
    assert names.values["add_3"] == "blocks.3"


class Between(Block):
    def forward(self, x):
        up = self.up(x)
        pipe_split()
        return x + self.down(torch.relu(up))


def test_a_module_that_is_cut_is_named_by_its_parts():
    model = nn.Sequential(Between(), Block())
    names = model_names(compiled_of(pipeline(model, nn.MSELoss())))
    assert names.stages == ("0.up", "0, 0.down, 1")
    assert names.value("_0_up") == "_0_up (0.up)"
    assert names.value("_0_up_grad_from_submod_1") == "gradient of _0_up (0.up)"


def test_layers_of_a_sequential_are_called_by_their_numbers():
    pipe = Pipe.from_sequential(nn.Sequential(*(nn.Linear(2, 2) for _ in range(2))))
    assert model_names(compiled_of(pipe)).stage(1) == "stage 1 (module 1)"


def test_what_a_report_of_a_recording_needs(threads, tmp_path):
    driver, x = PipelineDriver1F1B(pipeline(Chain(2), nn.MSELoss()), threads), torch.randn(6, 8)
    words = r"run steps inside `with driver.record\(\) as recording:`"
    for limit in (0, 2):
        with pytest.raises(DriverError, match="1 or more" if not limit else words), driver.record(limit) as recording:
            recording.report(tmp_path / "page.html")
    with driver.record() as recording:
        driver.run(2, x, x)
    with pytest.raises(DriverError, match="give 0 to 0, or none"):
        recording.report(tmp_path / "page.html", step=1)
    for step_number in (0, None):
        recording.report(tmp_path / f"{step_number}.html", step=step_number)
        assert (tmp_path / f"{step_number}.html").exists()
