"""``background`` of ``compile=``: steps run as graphs meanwhile, compiled code begins between steps, and nothing is left."""

import contextlib
import copy
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

from pippy import PipelineDriver, pipe_split, pipeline
from pippy.drivers.base.errors import StepError
from pippy.drivers.engines.local.local_cluster import local_cluster
from tests.drivers.compiling import CannotBeSent, Fails, GivesForward, Waits, held, hold_up, runs
from tests.drivers.models import Chain
from tests.drivers.processes import allowing_for, children, watched
from tests.drivers.test_driver import assert_bits
from tests.drivers.thread_cluster import one_draws_at_a_time
from tests.drivers.worker.test_compile import check

pytestmark = pytest.mark.usefixtures("seeded")
COMPILING = "graphs for 1 form of inputs, compiling in the background"


class Drops(nn.Module):
    """Two stages with dropout. The test can hold up a step in the first one."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = nn.functional.dropout(hold_up(self.first(x)), 0.5, self.training)
        pipe_split()
        return nn.functional.dropout(self.last(y), 0.5, self.training)


@pytest.fixture
def waits(tmp_path):
    runs.clear()
    return Waits(tmp_path)


@contextlib.contextmanager
def compiling(pipe, cluster, backend, **options):
    """A driver that compiles in the background."""
    given = {"backend": backend, "background": True}
    driver = PipelineDriver(pipe, cluster, world_size=2, compile=given, check=False, **options)
    try:
        yield driver
    finally:
        driver.close()


def wait_for(is_so):
    end = time.monotonic() + allowing_for(30)
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def wait_until_compiled(driver):
    wait_for(lambda: "background" not in str(driver.compiled))


def processes(cluster):
    """The processes that compile for the workers, which are threads."""
    states = [state for worker in cluster.engine.workers for state in worker.drivers.values()]
    found = [each.graphs.compiler.process.process for each in states if each.graphs is not None]
    return [each for each in found if each is not None]


def step(driver, x, target):
    """The loss, the gradients, and how many compiled codes were run."""
    runs.clear()
    driver.zero_grad()
    loss = driver.run(4, x, target)
    return loss, driver.gradients(), len(runs)


@one_draws_at_a_time()
def test_steps_go_on_while_pieces_compile_and_run_them_from_a_later_step_on(threads, waits):
    """All are done in the middle of a step, which runs none of them. The numbers are the same to the bit throughout."""
    pipe = pipeline(Drops().double(), nn.MSELoss())
    x, target = torch.randn(8, 8).double(), torch.randn(8, 8).double()
    plain = PipelineDriver(pipe, threads, schedule="zb_h1", world_size=2, keyed_random=7)
    steps = [step(plain, x, target) for _ in range(6)]
    plain.close()
    with compiling(pipe, threads, waits, schedule="zb_h1", keyed_random=7) as driver:
        found = [step(driver, x, target) for _ in range(2)]
        assert set(driver.compiled.values()) == {COMPILING}
        waits.wait_until_begun()
        found.append(step(driver, x, target))
        driver.zero_grad()
        held.reached.clear()
        held.go_on.clear()
        under_way = driver.run_async(4, x, target)
        assert held.reached.wait(60)
        waits.go_on()
        session = threads.session
        wait_for(lambda: all(session.answer(session.ping(worker)) is None for worker in range(2)))
        assert not runs and len(processes(threads)) == 2
        held.go_on.set()
        found.append((under_way.result(), driver.gradients(), len(runs)))
        found += [step(driver, x, target) for _ in range(2)]
        assert set(driver.compiled.values()) == {"compiled graphs for 1 form of inputs"}
        assert processes(threads) == []
    for (loss, gradients, _), (expected, theirs, _) in zip(found, steps, strict=True):
        assert torch.equal(loss, expected)
        assert_bits(gradients, theirs)
    # Both stages have F, I and W (the first I has nothing to compute), the loss F and I, in each of four micro-batches.
    assert [count for *_, count in found] == [0, 0, 0, 0, 4 * 7, 4 * 7]


def test_a_failing_step_two_drivers_and_a_shorter_micro_batch(threads, waits, tmp_path):
    (tmp_path / "other").mkdir()
    other_waits = Waits(tmp_path / "other")
    model, other = Chain(2), Chain(2)
    plain, other_plain = copy.deepcopy(model), copy.deepcopy(other)
    x, target = torch.randn(10, 8), torch.randn(10, 8)
    with (
        compiling(pipeline(model, nn.MSELoss()), threads, waits) as driver,
        compiling(pipeline(other, nn.MSELoss()), threads, other_waits) as second,
    ):
        check(driver, plain, x, target)
        check(second, other_plain, x, target)
        with pytest.raises(StepError):
            driver.run(4, torch.randn(10, 9), target)
        assert len(processes(threads)) == 4
        waits.go_on()
        wait_until_compiled(driver)
        check(driver, plain, x, target)
        assert "graphs for 2 forms of inputs, compiling in the background" in second.compiled.values()
        check(second, other_plain, x, target)
        assert len(processes(threads)) == 2
        other_waits.go_on()
        wait_until_compiled(second)
        check(second, other_plain, x, target)
        with torch.no_grad():  # another form, and so another process
            torch.testing.assert_close(driver.run(4, x, target), nn.functional.mse_loss(plain(x), target))
        wait_until_compiled(driver)


def test_a_backend_may_give_a_method(threads):
    model = Chain(2)
    plain, x, target = copy.deepcopy(model), torch.randn(8, 8), torch.randn(8, 8)
    with compiling(pipeline(model, nn.MSELoss()), threads, GivesForward()) as driver:
        check(driver, plain, x, target)
        wait_until_compiled(driver)
        check(driver, plain, x, target)
        assert set(driver.compiled.values()) == {"compiled graphs for 1 form of inputs"}


def test_ctrl_c_ends_a_step_and_no_compiling(threads, waits):
    model = Drops().eval()
    plain, x, target = copy.deepcopy(model), torch.randn(8, 8), torch.randn(8, 8)
    with compiling(pipeline(model, nn.MSELoss()), threads, waits) as driver:
        check(driver, plain, x, target)
        found = processes(threads)
        assert {os.getpgid(each.pid) for each in found} == {each.pid for each in found}, (
            "a terminal sends it to the group of the script"
        )
        held.reached.clear()
        held.go_on.clear()
        main = threading.main_thread().ident

        def press():
            held.reached.wait(60)
            signal.pthread_kill(main, signal.SIGINT)

        pressing = threading.Thread(target=press)
        pressing.start()
        with pytest.raises(KeyboardInterrupt):
            driver.run(4, x, target)
        pressing.join()
        held.go_on.set()
        check(driver, plain, x, target)
        assert processes(threads) == found and set(driver.compiled.values()) == {COMPILING}
        waits.go_on()
        wait_until_compiled(driver)
        check(driver, plain, x, target)


def test_the_schedule_is_chosen_by_the_times_of_compiled_pieces(threads, waits):
    model = Chain(2)
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    with compiling(pipeline(model, nn.MSELoss()), threads, waits, schedule="auto") as driver:
        for _ in range(6):
            driver.run(4, x, target)
        assert driver.choice is None
        waits.go_on()
        for _ in range(100):
            wait_until_compiled(driver)
            driver.run(4, x, target)
            if driver.choice is not None:
                break
        assert driver.choice is not None


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        (Fails(), "RuntimeError: no luck"),
        (
            CannotBeSent(),
            "the process that compiled it cannot send what the backend has given: TypeError: cannot pickle",
        ),
        (None, "the process that compiles pieces has died, with status -9"),
    ],
    ids=["fails", "cannot be sent", "dies"],
)
def test_what_is_not_compiled_stays_a_graph_and_says_why(threads, waits, backend, why):
    model = Chain(2)
    plain, x, target = copy.deepcopy(model), torch.randn(8, 8), torch.randn(8, 8)
    with compiling(pipeline(model, nn.MSELoss()), threads, backend or waits) as driver:
        check(driver, plain, x, target)
        if backend is None:
            for each in processes(threads):
                os.killpg(each.pid, signal.SIGKILL)
        wait_until_compiled(driver)
        for said in driver.compiled.values():
            assert said.startswith(f"compiled graphs for 1 form of inputs; as graphs that are not compiled: {why}")
        check(driver, plain, x, target)


def test_nothing_is_left_of_drivers_workers_and_clusters_that_end_while_they_compile(alone, waits):
    """A recovery loads the stages anew, which are compiled again."""
    model = Chain(2)
    plain, x, target = copy.deepcopy(model), torch.randn(8, 8), torch.randn(8, 8)
    pipe = pipeline(model, nn.MSELoss())
    with local_cluster(2, threads=1) as cluster:
        first, last = (each.pid for each in cluster.session.workers)
        with compiling(pipe, cluster, waits) as driver:
            check(driver, plain, x, target)
            found = [*children(first), *children(last)]
            assert len(found) == 2
            waits.wait_until_begun()
            with watched(*found):
                driver.close()
        with compiling(pipe, cluster, waits) as driver:
            check(driver, plain, x, target)
            with watched(*children(last), *children(first)):
                os.kill(last, signal.SIGKILL)
                with pytest.raises(Exception, match="lost"):
                    driver.run(4, x, target)
                driver.recover()
            check(driver, plain, x, target)
            found = [child for each in cluster.session.workers for child in children(each.pid)]
            assert len(found) == 2
            with watched(*found):
                cluster.close()


def test_a_compiler_that_is_ended_leaves_no_file_half_written(tmp_path):
    """Inductor loads such a file whenever it meets the same code, and fails."""
    path = tmp_path / "made.so"
    compiler = "import sys, time; open(sys.argv[2], 'w').write('half'); print(flush=True); time.sleep(60)"
    server = (
        "import subprocess, sys; from pippy.drivers.worker.compiled.compile_server import end_all; "
        f"made = subprocess.Popen([sys.executable, '-S', '-c', {compiler!r}, '-o', 'made.so'], stdout=subprocess.PIPE); "
        "made.stdout.readline(); print(made.pid, flush=True); sys.stdin.readline(); end_all()"
    )
    given = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": tmp_path, "process_group": 0}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-P", "-c", server], env=environment, **given) as ended:
        pid = int(ended.stdout.readline())
        assert path.read_text() == "half"
        with watched(pid):
            ended.communicate("\n")
    assert ended.returncode == -signal.SIGKILL and not path.exists()
