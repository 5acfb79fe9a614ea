"""`driver.profile`: torch.profiler runs in all workers, and one file has what they did, on one clock."""

import gzip
import json
import os
import signal
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from itertools import product

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from pippy import PipelineDriver, PipelineDriver1F1B, local_cluster, pipe_split, pipeline
from pippy.drivers.base.errors import DriverError, StepError, WorkerLostError
from pippy.drivers.driver.profile import write_trace
from pippy.drivers.protocol.steps import AskTime, StartProfile, StopProfile
from pippy.drivers.session.driver_commands import DriverCommands
from pippy.ir.base.errors import PippyWarning
from tests.drivers.models import Chain

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")

CHUNKS = 4
OPERATIONS = "aten::sin", "aten::cos", "aten::tanh"  # one in each stage; its backward has others
CLOSE = 20.0  # microseconds by which clocks of one host may differ


class Waves(Chain):
    """Three stages, each with an operation of its own; the last one may fail."""

    fails = False

    def forward(self, x):
        x = torch.sin(self.layers[0](x))
        pipe_split()
        x = torch.cos(self.layers[1](x))
        pipe_split()
        x = torch.tanh(self.layers[2](x))
        return fail(x) if self.fails else x


@torch.fx.wrap
def fail(x):
    raise ArithmeticError("it fails")


def batch():
    return torch.randn(8, 8), torch.randn(8, 8)


@pytest.fixture
def driver(cluster):
    driver = PipelineDriver1F1B(pipeline(Waves(), nn.MSELoss()), cluster)
    driver.run(CHUNKS, *batch())
    yield driver
    if not cluster.closed:
        driver.close()


def events_of(path):
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    return json.loads(text)["traceEvents"]


def named(events):
    """The names of the processes, by their numbers."""
    return {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}


def rows(events):
    """The names of the processes, in their order."""
    return [name for _, name in sorted(named(events).items())]


def spans(events, category):
    """The slices of each process, by their names."""
    found = defaultdict(list)
    for each in events:
        if each.get("cat") == category and each["ph"] == "X":
            found[each["pid"], each["name"]].append((each["ts"], each["ts"] + each["dur"]))
    return found


def check_clocks(events, steps, close=CLOSE):
    """Raise unless each operation of a forward lies inside of its instruction, and no value arrives before it is sent."""
    instructions, operations = spans(events, "user_annotation"), spans(events, "cpu_op")
    pids = {name.partition(":")[0]: pid for pid, name in named(events).items()}
    for stage, name in enumerate(OPERATIONS):
        pid = pids[f"worker{stage}"]
        forwards = sorted(span for chunk in range(CHUNKS) for span in instructions[pid, f"F{stage}.{chunk}"])
        assert len(forwards) == CHUNKS * steps
        inside = [bisect_right(forwards, (start, float("inf"))) - 1 for start, _ in sorted(operations[pid, name])]
        assert inside == list(range(CHUNKS * steps))
        assert all(end <= forwards[at][1] for at, (_, end) in enumerate(sorted(operations[pid, name])))
    for stage, chunk in product(range(2), range(CHUNKS)):
        sent = instructions[pids[f"worker{stage}"], f"F{stage}.{chunk}"]
        came = instructions[pids[f"worker{stage + 1}"], f"F{stage + 1}.{chunk}"]
        assert all(-close <= late[0] - early[1] < 30e6 for early, late in zip(sorted(sent), sorted(came), strict=True))


def test_all_workers_are_in_one_file_on_one_clock(cluster, driver, tmp_path):
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    with driver.profile(tmp_path / "trace.json") as written:
        before = [*cluster.session.counts]
        for _ in range(3):
            driver.run(CHUNKS, *batch())
        assert [now - was for now, was in zip(cluster.session.counts, before)] == [3, 3, 3, 0]  # as without a profile
        optimizer.step()
        driver.zero_grad()
        before = [*cluster.session.counts]
    assert [now - was for now, was in zip(cluster.session.counts, before)] == [1, 1, 1, 0]
    events = events_of(tmp_path / "trace.json")
    assert written.bytes == (tmp_path / "trace.json").stat().st_size
    assert rows(events) == ["worker0: stage 0", "worker1: stage 1", "worker2: stage 2"]
    check_clocks(events, steps=3)
    ran = Counter(each["name"] for each in events if each.get("cat") == "user_annotation")
    assert (ran["Step"], ran["OptimizerStep"], ran["AskTime"], ran["StopProfile"]) == (9, 3, 0, 0)
    assert min(each["ts"] for each in events if "ts" in each) == 0
    before = [*cluster.session.counts]
    driver.run(CHUNKS, *batch())
    assert [now - was for now, was in zip(cluster.session.counts, before)] == [1, 1, 1, 0]


@pytest.mark.parametrize("told", [True, False])
def test_clocks_of_other_hosts_are_brought_together(cluster, driver, tmp_path, monkeypatch, told):
    """Worker 1 is made to seem on a host whose clock is 50 s ahead. If that is not told, the check must fail."""
    call, ahead, patience = DriverCommands.call, 50, []

    def elsewhere(commands, bodies, limit=None):
        body = bodies.get(1)
        if isinstance(body, StartProfile | StopProfile):
            patience.append(cluster.session.timeout)
        answers = call(commands, bodies, limit)
        if isinstance(body, AskTime):
            clock, time = answers[1]
            answers[1] = "another" if told else clock, time + ahead
        elif isinstance(body, StopProfile):
            trace = json.loads(zlib.decompress(answers[1]))
            trace["baseTimeNanoseconds"] += ahead * 10**9
            answers[1] = zlib.compress(json.dumps(trace).encode())
        return answers

    monkeypatch.setattr(DriverCommands, "call", elsewhere)
    before = cluster.session.timeout
    with driver.profile(tmp_path / "trace.json"):
        driver.run(CHUNKS, *batch())
    assert cluster.session.timeout == before
    assert patience == [600.0, 600.0]
    if told:  # to half the time of a message there and back, where other processes may want the cores
        check_clocks(events_of(tmp_path / "trace.json"), steps=1, close=5e6)
    else:
        with pytest.raises(AssertionError):
            check_clocks(events_of(tmp_path / "trace.json"), steps=1)


def test_options_are_those_of_the_profiler(driver, tmp_path):
    with driver.profile(tmp_path / "trace.json.gz", activities=[ProfilerActivity.CPU], record_shapes=True):
        driver.run(CHUNKS, *batch())
    events = events_of(tmp_path / "trace.json.gz")
    sines = [each for each in events if (each["pid"], each["name"]) == (min(named(events)), "aten::sin")]
    assert [each["args"]["Input Dims"] for each in sines] == [[[8 // CHUNKS, 8]]] * CHUNKS
    with driver.profile(tmp_path / "trace.json"):
        driver.run(CHUNKS, *batch())
    assert "Input Dims" not in (tmp_path / "trace.json").read_text()


def test_replicas_have_rows_with_the_sums_of_their_gradients(cluster, tmp_path):
    driver = PipelineDriver1F1B(pipeline(Chain(2), nn.MSELoss()), cluster, replicas=2)
    driver.run(CHUNKS, *batch())
    with driver.profile(tmp_path / "trace.json"):
        driver.run(CHUNKS, *batch())
        driver.reduce_gradients()
    events = events_of(tmp_path / "trace.json")
    assert rows(events) == [f"worker{at}: replica {at // 2}, stage {at % 2}" for at in range(4)]
    ran = Counter(" ".join(each["name"].split()[:2]) for each in events if each.get("cat") == "user_annotation")
    assert ran["send sum"] == ran["receive sum"] == ran["send gradients"] == ran["receive gradients"] > 0, ran


def test_stages_of_one_worker_share_a_row_and_halves_have_their_names(cluster, tmp_path):
    driver = PipelineDriver(pipeline(Chain(4), nn.MSELoss()), cluster, schedule="zb_v", world_size=2)
    with driver.profile(tmp_path / "trace.json"):
        driver.run(CHUNKS, *batch())
    events = events_of(tmp_path / "trace.json")
    assert rows(events) == ["worker0: stages 0, 3", "worker1: stages 1, 2"]
    computed = {name for pid, name in spans(events, "user_annotation") if pid == min(named(events))}
    assert {f"{op}{stage}.{chunk}" for op in "FIW" for stage in (0, 3) for chunk in range(CHUNKS)} <= computed


def test_a_step_that_fails_is_in_the_file(cluster, tmp_path):
    model = Waves()
    model.fails = True
    driver = PipelineDriver1F1B(pipeline(model, nn.MSELoss()), cluster, check=False)
    with pytest.raises(StepError, match="it fails") as caught, driver.profile(tmp_path / "trace.json"):
        driver.run(CHUNKS, *batch())
    assert not hasattr(caught.value, "__notes__")
    names = [each["name"] for each in events_of(tmp_path / "trace.json")]
    assert "F2.0" in names
    assert "F2.1" not in names


def test_where_a_worker_is_lost_the_error_says_that_there_is_no_file(alone, tmp_path):
    (tmp_path / "trace.json").write_text("of before")
    with local_cluster(2, threads=1) as cluster:
        driver = PipelineDriver1F1B(pipeline(Chain(2), nn.MSELoss()), cluster)
        driver.run(CHUNKS, *batch())
        with pytest.raises(WorkerLostError) as caught, driver.profile(tmp_path / "trace.json"):
            os.kill(cluster.session.workers[1].pid, signal.SIGKILL)
            driver.run(CHUNKS, *batch())
        assert "trace.json was not written: a worker was lost while the profile ran" in caught.value.__notes__[0]
        driver.recover()
        warned = pytest.warns(PippyWarning, match="trace.json was not written: a worker was lost while the profile ran")
        with warned, driver.profile(tmp_path / "trace.json"):
            os.kill(cluster.session.workers[1].pid, signal.SIGKILL)
            with pytest.raises(WorkerLostError):
                driver.run(CHUNKS, *batch())
            driver.recover()
            driver.run(CHUNKS, *batch())
        assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("trace.json", "of before")]
        with driver.profile(tmp_path / "trace.json"):
            driver.run(CHUNKS, *batch())
        assert rows(events_of(tmp_path / "trace.json")) == ["worker0: stage 0", "worker1: stage 1"]


def test_what_cannot_be_profiled_is_refused_before_anything_is_sent(cluster, driver, threads, tmp_path):
    def refused(message, path=tmp_path / "trace.json", on=driver, **options):
        before = [*cluster.session.counts]
        with pytest.raises(DriverError, match=message), on.profile(path, **options):
            pass
        assert cluster.session.counts == before

    refused("trace.txt'.: give a path that ends with .json, or with .json.gz", tmp_path / "trace.txt")
    refused("profile.7.: give a path", 7)
    refused("no folder .*nowhere; make it first", tmp_path / "nowhere" / "trace.json")
    (tmp_path / "folder.json").mkdir()
    refused("is a folder", tmp_path / "folder.json")
    refused("activities='CPU': give members of torch.profiler.ProfilerActivity", activities="CPU")
    refused(r"activities=\(\): give members", activities=())
    refused("with_stack='yes': give True or False", with_stack="yes")
    refused("threads of one process", on=PipelineDriver1F1B(pipeline(Waves(), nn.MSELoss()), threads))
    other = PipelineDriver1F1B(pipeline(Chain(2), nn.MSELoss()), cluster)
    with driver.profile(tmp_path / "first.json"):
        refused("write a profile to .*first.json already", on=other)
        refused("write a profile to .*first.json already")
        other.run(CHUNKS, *batch())
    names = {each["name"] for each in events_of(tmp_path / "first.json")}
    assert {"F0.0", "F1.3"} <= names  # what the other driver did on these workers is there, too
    other.close()
    with profile(activities=[ProfilerActivity.CPU]), driver.profile(tmp_path / "trace.json"):
        pass  # the profiler of the script is in another process


def test_a_profile_that_cannot_start_ends_where_it_has_started(cluster, driver, tmp_path, monkeypatch):
    call = DriverCommands.call

    def fails(commands, bodies, limit=None):
        answers = call(commands, bodies, limit)
        if isinstance(bodies.get(0), StartProfile):
            raise StepError("no profiler there")
        return answers

    with monkeypatch.context() as patched:
        patched.setattr(DriverCommands, "call", fails)
        with pytest.raises(StepError, match="no profiler"), driver.profile(tmp_path / "trace.json"):
            pass
    assert driver.commands.call(dict.fromkeys(driver.ranks, StopProfile())) == {0: None, 1: None, 2: None}
    with driver.profile(tmp_path / "trace.json"):
        driver.run(CHUNKS, *batch())
    check_clocks(events_of(tmp_path / "trace.json"), steps=1)


def test_the_streams_of_a_gpu_are_threads_of_a_process_of_its_own(tmp_path):
    thread, stream = {"pid": 4711, "tid": 4712}, {"pid": 0, "tid": 7}
    kineto = [
        {"ph": "M", "name": "process_name", **stream, "ts": 0.0, "args": {"name": "python"}},
        {"ph": "M", "name": "process_labels", **stream, "ts": 0.0, "args": {"labels": "GPU 0"}},
        {"ph": "M", "name": "process_labels", "pid": 1, "tid": 0, "ts": 0.0, "args": {"labels": "GPU 1"}},
        {"ph": "M", "name": "thread_name", **stream, "ts": 0.0, "args": {"name": "stream 7 7"}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::sin", **thread, "ts": 11.0, "dur": 3.0, "args": {}},
        {"ph": "X", "cat": "kernel", "name": "sin_kernel", **stream, "ts": 20.0, "dur": 3.0, "args": {}},
        {"ph": "s", "id": 3, "cat": "ac2g", "name": "ac2g", **thread, "ts": 11.0},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": 0.0, "dur": 9.0},
    ]
    trace = zlib.compress(json.dumps({"baseTimeNanoseconds": 5_000, "traceEvents": kineto}).encode())
    write_trace(tmp_path / "trace.json", {2: "worker2: stage 2"}, {2: trace}, {2: 0.0})
    events = events_of(tmp_path / "trace.json")
    cpu, gpu = named(events)
    assert rows(events) == ["worker2: stage 2"] * 2
    seen = [(each["name"], each["pid"], each["tid"], each["ts"]) for each in events if each["ph"] != "M"]
    assert seen == [("aten::sin", cpu, 4712, 0), ("sin_kernel", gpu, 7, 9), ("ac2g", cpu, 4712, 0)]
    labels = [(each["pid"], each["args"]["labels"]) for each in events if each["name"] == "process_labels"]
    assert labels == [(gpu, "GPU 0")]
    assert [each["id"] for each in events if each["ph"] == "s"] == ["2/3"]


def test_a_driver_that_is_closed_inside_ends_the_profile(cluster, driver, tmp_path):
    with pytest.raises(DriverError, match="closed"), driver.profile(tmp_path / "trace.json"):
        driver.close()
    assert not list(tmp_path.iterdir())
    assert cluster.profiled is None
