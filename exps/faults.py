"""What happens when things go wrong at random: is every fault noticed, how soon, and is anything left behind?

Command: ``python -m exps.faults --count 200 --seed 1``

Finding: ``--seed 2 --deadly 0.07`` and ``--seed 3 --deadly 0.03`` at once, on two cores at a load of 8 to 14, until 267
faults had happened; ``--seed 11 --deadly 0.07`` at a load of 8 to 15, until 314 had; ``--seed 22 --deadly 0.02 --kinds ctrl-c
"ctrl-c twice"``, until 94 had; 40 of Ctrl-C anywhere; and ``--count 208 --seed 5 --deadly 0.1`` with fewer kinds. One Ctrl-C
of the 267 did not end its controller within 60 s: it may have come while torch was imported, where it can be lost, or as a
wait began, where torch dropped it, and the wait did not end (tests/drivers/test_interrupts.py). In counts of memory Ctrl-C
left event descriptors open. Both are mended, and the 94 came after that; behind them a controller ended by another exception
than KeyboardInterrupt, which was not printed then, and is now. Then, on two cores with little else to do, ``--count 90 --seed
33 --deadly 0.05`` and ``--count 300 --seed 44 --deadly 0.05``: a controller that had met Ctrl-C six times, among other faults,
had one descriptor more at its end. tests/drivers/interrupted_everywhere.py, which tries Ctrl-C at each instruction behind
which Python looks for it, has found where one can be left: as a wait of the controller ends, or an event begins. Before these
were mended ``--count 40 --seed 1001 --deadly 0.05 --kinds ctrl-c "ctrl-c twice"`` and the next four seeds, at a load of 16 to
20, had 197 faults: one hang, as a Ctrl-C was lost, which `__del__` of an event could do, and one that came before this
experiment waited for it. After that, at the same load: 224 of ``--seed 2001`` and the next ones, and 169 of all kinds,
``--count 50 --seed 3001 --deadly 0.08`` and the next ones, of which none was wrong. No other fault caused a hang, each raised
the right error, nothing was left behind, and the next cluster was right.

Of the first 297 and the 94, how many and the slowest in seconds: exceptions and `sys.exit` 133 and 0.4, in an optimizer 28
and 57 (the first one on a worker imports much of torch, and waits for a core), while stages are loaded 20 and 0.7; Ctrl-C 66
and 0.1, two of them 46 and 0.1, anywhere 3 and 15; no memory 20, no descriptors 24, no shared memory 16, and 1.8, of which
0.4 are waited for; a lid 13 and 2.7 beyond the time of the stop; a killed worker 5 and 0.2, a killed fork server 4 and 0.6, a
killed controller 3 and 0.03; cut sockets 2 and 0.3; a stopped worker 4 and 4.3, a stopped fork server 4, which goes
unnoticed.

A controller, in a process of its own, trains a model on 2 to 4 workers by a schedule chosen at random. A fault is

- an exception or `sys.exit` in an instruction, in the optimizer or while stages are loaded;
- Ctrl-C, or two, in a step, in three that are under way, in a recording, a count of memory, `pipeline` or `state_dict`;
- a worker that has no memory, no file descriptor or no shared memory for a moment: a step succeeds or raises;
- a lid: all processes are stopped for up to 5 s, and go on as if nothing had been;
- SIGKILL or SIGSTOP of a worker or of the fork server at a random moment of a step; SIGKILL of the controller;
- a cut connection: all sockets of a worker to other workers, or one of them, are shut down in a step;
- Ctrl-C at any instant, of the start, of steps or of the end: the controller ends by a KeyboardInterrupt.

After each fault the controller must raise the right error. If the cluster survives, another step must give the plain model's
gradients and loss; if not, another cluster in the same process must. A controller that prints nothing for 60 s counts as
hung. A process that exists 5 s after the end of its controller counts as left behind, and so do descriptors, files and
shared memory. Clusters have ``timeout=3.0``, so a stopped worker is noticed after 4 s.
"""

import argparse
import copy
import faulthandler
import gc
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from pippy import Pipe
from pippy.drivers.clusters.cluster import Cluster
from pippy.drivers.clusters.torchrun import cluster
from pippy.drivers.driver import PipelineDriver
from pippy.drivers.errors import ClusterError, StepError, WorkerLostError
from tests.drivers import failing_model, scarce
from tests.drivers.interrupted_everywhere import descriptors

MARK = "PIPPY_FAULTS"  # in the environment of a controller and of all that it starts
PATIENCE, GRACE = 60.0, 5.0  # seconds; on a busy machine more
SCHEDULES = ["fill_drain", "1f1b", "interleaved_1f1b", "zb_h1", "looped_bfs"]
STAGES, ROWS, BATCH = 4, 8, 4
RAISES = {
    "forward": failing_model.FORWARD,
    "exit": failing_model.EXIT,
    "backward": failing_model.BACKWARD,  # in whole, or the half of the inputs
    "weight half": failing_model.BACKWARD,  # the first stage has nothing in the other half
    "send": failing_model.UNSENDABLE,
    "loss": failing_model.LOSS,
}
SHORTAGES = {
    "no memory": scarce.NO_MEMORY,
    "no descriptors": scarce.NO_DESCRIPTORS,
    "no shared memory": scarce.NO_SHARED_MEMORY,
}
GENTLE = [*RAISES, *SHORTAGES, "optimizer", "load", "ctrl-c", "ctrl-c twice", "lid"]  # the cluster survives them
DEADLY = [
    "kill worker",
    "stop worker",
    "kill fork server",
    "stop fork server",
    "cut",
    "kill controller",
    "ctrl-c anywhere",
]


@dataclass
class Report:
    """One fault: how soon it was noticed, and what was wrong about that."""

    kind: str
    seconds: float
    wrong: str = ""


class Refuses(torch.optim.SGD):
    """An optimizer that fails."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Fail."""
        raise ArithmeticError("an optimizer that fails")


class Unreadable(torch.nn.Linear):
    """Can be pickled, and not be unpickled."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ArithmeticError("a module that cannot be read")


class Training:
    """A driver, and the same model without a pipeline."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self.cluster, self.rng = cluster, rng
        self.chunks = rng.choice([4, 8])
        self.width = rng.choice([8, 200])  # small values travel in packets, large ones in rings
        self.plain = failing_model.Trapped(STAGES, self.width)
        self.schedule = rng.choice(SCHEDULES)
        workers = 4 if self.schedule == "zb_h1" else len(cluster)
        self.schedule = self.schedule if workers <= len(cluster) else "1f1b"
        pipe = failing_model.trapped_pipe(copy.deepcopy(self.plain))
        self.driver = PipelineDriver(pipe, cluster, schedule=self.schedule)

    def step(self) -> None:
        """A good step on both sides."""
        x, target = self.data(), self.data()
        loss = F.mse_loss(self.plain(x, failing_model.no_orders(ROWS)), target)
        mine = self.driver.run(self.chunks, x, failing_model.no_orders(ROWS), target)
        loss.backward()
        torch.testing.assert_close(mine, loss.detach(), rtol=1e-9, atol=0)

    def data(self) -> torch.Tensor:
        """An input, or a target."""
        return torch.randn(ROWS, self.width)

    def start(self) -> Any:
        """Send a step."""
        return self.driver.run_async(self.chunks, self.data(), failing_model.no_orders(ROWS), self.data())

    def run(self, given: torch.Tensor | None = None) -> None:
        """A step that nobody compares."""
        given = failing_model.no_orders(ROWS) if given is None else given
        self.driver.run(self.chunks, self.data(), given, self.data())

    def fail(self, kind: str) -> Any:
        """Start a step that fails, perhaps among others."""
        if kind == "optimizer":
            return self.driver.instantiate_optimizer(Refuses, lr=0.1).step()
        if kind == "load":
            bad = torch.nn.Sequential(torch.nn.Linear(8, 8), Unreadable(8, 8))
            return PipelineDriver(Pipe.from_sequential(bad), self.cluster)
        row, target = self.rng.randrange(ROWS), self.data()
        trap = 0 if kind == "weight half" else self.rng.randrange(STAGES - 1)
        if kind == "loss":
            target[row] = torch.nan
        given = failing_model.orders(ROWS, trap, RAISES[kind], row)
        if self._stays(kind, trap):
            return self.fail(kind)
        step = self.driver.run_async(self.chunks, self.data(), given, target)
        more = self.rng.randrange(3)
        for _ in range(more):
            self.start()
        return step.result()

    def _stays(self, kind: str, trap: int) -> bool:
        """Whether the value that cannot be sent stays on its worker."""
        return kind == "send" and self.driver.placed.ranks[trap] == self.driver.placed.ranks[trap + 1]

    def check(self) -> None:
        """The gradients are those of the good steps."""
        for name, gradient in self.driver.gradients().items():
            torch.testing.assert_close(gradient, self.plain.get_parameter(name).grad, rtol=1e-8, atol=1e-11)


def gentle(training: Training, kind: str) -> Report:
    """A fault that the cluster survives."""
    training.step()
    unknown = {"ctrl-c": ctrl_c, "ctrl-c twice": ctrl_c, "lid": lid} | dict.fromkeys(SHORTAGES, shortage)
    seconds, wrong = unknown[kind](training, kind) if kind in unknown else raised(training, kind)
    try:
        if kind in unknown:  # nobody can say which of the steps had been done
            training.driver.zero_grad()
            training.plain.zero_grad()
            training.step()
        training.check()
        training.step()
        training.check()
    except AssertionError as error:
        wrong = wrong or f"{training.schedule}: wrong numbers after it: {error}"
    return Report(kind, seconds, wrong)


def raised(training: Training, kind: str) -> tuple[float, str]:
    """How long it took, and what was wrong."""
    start = time.monotonic()
    try:
        training.fail(kind)
    except StepError as error:
        missing = "" if error.worker is not None and "The worker's traceback" in str(error) else str(error)
        return time.monotonic() - start, missing
    return time.monotonic() - start, f"{training.schedule}: no error"


def shortage(training: Training, kind: str) -> tuple[float, str]:
    """Steps with too little of something on a worker, for a moment. Each succeeds, or says what is missing."""
    start, wrong = time.monotonic(), ""
    given = failing_model.orders(ROWS, training.rng.randrange(STAGES), SHORTAGES[kind], training.rng.randrange(ROWS))
    for orders in (given, None, None):
        try:
            training.run(orders)
        except StepError as error:
            if not any(word in str(error) for word in scarce.SAID):
                wrong = str(error)
    time.sleep(2 * scarce.SECONDS)
    return time.monotonic() - start, wrong


def lid(training: Training, kind: str) -> tuple[float, str]:
    """All processes are stopped, and go on. The controller cannot stop itself alone, so another process does it."""
    pids = [os.getpid(), fork_server(training), *(worker.pid for worker in training.cluster.control.workers)]
    code = "import os, signal, sys, time; pids = list(map(int, sys.argv[3:])); time.sleep(float(sys.argv[1])); "
    code += "[os.kill(pid, signal.SIGSTOP) for pid in pids]; time.sleep(float(sys.argv[2])); "
    code += "[os.kill(pid, signal.SIGCONT) for pid in pids]"
    times = training.rng.uniform(0, 0.2), training.rng.uniform(0.1, 5.0)
    arguments = [sys.executable, "-c", code, *map(str, (*times, *pids))]
    stopping = subprocess.Popen(arguments, env={name: os.environ[name] for name in os.environ if name != MARK})
    start = time.monotonic()
    try:
        while stopping.poll() is None:
            training.run()
        training.run()
    except Exception as error:
        stopping.wait()
        return time.monotonic() - start, f"{type(error).__name__}: {error}"
    return max(0.0, time.monotonic() - start - sum(times)), ""


def fork_server(training: Training) -> int:
    """The process that the workers were forked from."""
    pid = training.cluster.control.workers[0].pid
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def ctrl_c(training: Training, kind: str) -> tuple[float, str]:
    """Do something until Ctrl-C interrupts it; then do it again, until another Ctrl-C, if there are to be two."""
    sent: list[float] = []
    twice, again = kind == "ctrl-c twice", threading.Event()
    first, second = training.rng.uniform(0, 0.1), training.rng.uniform(0, 0.01)
    do = training.rng.choice(occupations(training))
    do()

    def interrupt() -> None:
        for _ in range(1 + twice):
            if sent:
                again.wait()
                time.sleep(second)
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(first, interrupt)
    timer.daemon = True
    try:
        timer.start()
        while True:
            do()
    except KeyboardInterrupt:
        took = time.monotonic() - sent[0]
    except Exception as error:
        return 0.0, f"{type(error).__name__}: {error}"
    if twice:
        try:
            again.set()
            while True:
                do()
        except KeyboardInterrupt:
            took = max(took, time.monotonic() - sent[1])
        except Exception as error:
            return took, f"{type(error).__name__}: {error}"
    return took, ""


def occupations(training: Training) -> list[Callable[[], object]]:
    """What a script may be at when Ctrl-C comes."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(STAGES)))
    counted = PipelineDriver(Pipe.from_sequential(layers), training.cluster, schedule="fill_drain")

    def three_steps() -> None:
        under_way = [training.start() for _ in range(3)]
        for step in under_way:
            step.result()

    def recorded_step() -> None:
        with training.driver.record():
            training.run()

    return [
        training.run,
        three_steps,
        recorded_step,
        training.driver.state_dict,
        lambda: counted.memory(2, torch.zeros(4, 8)),
        lambda: failing_model.trapped_pipe(copy.deepcopy(training.plain)),
    ]


def deadly(training: Training, kind: str) -> Report:
    """A signal for a process of the cluster, at a random moment of a step."""
    training.step()
    number = signal.SIGKILL if kind.startswith("kill") else signal.SIGSTOP
    victim = training.rng.choice(training.cluster.control.workers).pid
    if kind.endswith("fork server"):
        victim = fork_server(training)
    sent: list[float] = []

    def strike() -> None:
        sent.append(time.monotonic())
        os.kill(victim, number)

    orders = None
    if kind == "cut":
        orders = failing_model.orders(
            ROWS, training.rng.randrange(STAGES), scarce.CUT_SOCKETS, training.rng.randrange(ROWS)
        )
        sent.append(time.monotonic())
    else:
        threading.Timer(training.rng.uniform(0, 0.1), strike).start()
    try:
        while kind != "stop fork server" or not sent or time.monotonic() < sent[0] + 0.5:
            training.run(orders)
    except WorkerLostError:
        return Report(kind, time.monotonic() - sent[0], "a worker was lost" if kind == "stop fork server" else "")
    except (StepError, ClusterError) as error:
        return Report(kind, time.monotonic() - sent[0], f"{type(error).__name__}: {error}")
    return Report(kind, 0.0)


def play(seed: int, kinds: list[str]) -> None:
    """Run the controller: it prints a line for every fault."""
    faulthandler.register(signal.SIGUSR1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    if kinds == ["ctrl-c anywhere"]:
        print("ready", flush=True)  # an import of torch may lose an interrupt
        while True:  # a cluster is opened and closed again, so that Ctrl-C may meet any of it
            with cluster(2, threads=1, timeout=3.0) as opened:
                Training(opened, rng).step()
    before = descriptors()
    with cluster(rng.choice([2, 3, 4]), threads=1, timeout=3.0) as opened:
        for kind in kinds:
            training = Training(opened, rng)
            if kind == "kill controller":
                training.step()
                say(Report(kind, 0.0))
                while True:
                    training.step()
            say(deadly(training, kind) if kind in DEADLY else gentle(training, kind))
            if kind in GENTLE:
                training.driver.close()
            del training
    gc.collect()
    after = descriptors()
    if len(after) > len(before):
        new = {number: what for number, what in after.items() if before.get(number) != what}
        say(Report(kinds[-1], 0.0, f"descriptors: {len(before)} before, {len(after)} after, among them {new}"))
    with cluster(2, threads=1, timeout=3.0) as opened:  # the next cluster is right
        training = Training(opened, rng)
        training.step()
        training.check()


def say(report: Report) -> None:
    """Print a line for the parent process."""
    print(json.dumps(asdict(report)), flush=True)


def marked(mark: str) -> list[int]:
    """The processes that a controller started, and itself."""
    found = []
    for path in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if f"{MARK}={mark}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return found


def busy() -> float:
    """How many processes want each core, and at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def outlast(mark: str) -> tuple[float, list[int]]:
    """How long the processes of a controller go on after its end, and those that do so for longer than they may."""
    start = time.monotonic()
    while (left := marked(mark)) and time.monotonic() < start + GRACE * busy():
        time.sleep(0.01)
    seconds = time.monotonic() - start
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return seconds, left


def lines(process: "subprocess.Popen[str]") -> Iterator[str]:
    """The lines that a process writes. Raises TimeoutError if it writes nothing for too long."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(PATIENCE * busy()):
                raise TimeoutError
            line = process.stdout.readline()  # one is written at a time
            if not line:
                return
            yield line


def watch(seed: int, kinds: list[str]) -> Iterator[Report]:
    """Run a controller with some faults, and check what it leaves behind."""
    mark = f"{os.getpid()}-{seed}"
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile("w+") as errors:
        shared = set(os.listdir("/dev/shm"))
        process = subprocess.Popen(
            [sys.executable, "-m", "exps.faults", "--play", str(seed), *kinds],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | {MARK: mark, "TMPDIR": directory},
            text=True,
        )
        told = 0
        told_lines = lines(process)
        try:
            if kinds == ["ctrl-c anywhere"]:
                next(told_lines)
                yield interrupted(process, random.Random(seed))
                told = 1
            for line in told_lines:
                report = Report(**json.loads(line))
                told += 1
                if report.kind == "kill controller":
                    time.sleep(random.Random(seed).uniform(0, 0.1))
                    process.kill()
                    process.wait()
                    report.seconds = outlast(mark)[0]
                yield report
            process.wait(PATIENCE * busy())
        except (TimeoutError, subprocess.TimeoutExpired):
            process.send_signal(signal.SIGUSR1)
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)  # it writes what its threads are at
            yield Report(kinds[min(told, len(kinds) - 1)], PATIENCE, f"hang; seed {seed}, after {kinds[:told]}")
        process.kill()
        process.communicate()
        if told < len(kinds):
            yield Report(kinds[told], 0.0, f"the controller ended with status {process.returncode}; seed {seed}")
            errors.seek(0)
            print(errors.read()[-20_000:], file=sys.stderr, flush=True)
        _, left = outlast(mark)
        if left:
            yield Report(kinds[-1], 0.0, f"orphans: {left}")
        files = [name for name in os.listdir(directory) if not name.startswith("torchinductor")]  # torch's own cache
        files += [name for name in set(os.listdir("/dev/shm")) - shared if "pippy" in name]
        if files:
            yield Report(kinds[-1], 0.0, f"files: {files}")


def interrupted(process: "subprocess.Popen[str]", rng: random.Random) -> Report:
    """Ctrl-C for a controller that does everything, at any instant."""
    time.sleep(rng.uniform(0.0, 3.0))
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    status = process.wait(PATIENCE * busy())
    wrong = "" if status in (1, 130, -signal.SIGINT) else f"ended with status {status}"
    return Report("ctrl-c anywhere", time.monotonic() - start, wrong)


def rounds(count: int, seed: int, share: float, kinds: list[str]) -> Iterator[tuple[int, list[str]]]:
    """Groups of faults, one for each controller. A deadly fault is the last of its group."""
    rng = random.Random(seed)
    number = 0
    while count > 0:
        deadly_ = [rng.choice(DEADLY)]
        size = 1 if deadly_ == ["ctrl-c anywhere"] else min(count, 1 + round((1 - share) / share))
        yield seed * 10_000 + number, [rng.choice(kinds) for _ in range(size - 1)] + deadly_
        count, number = count - size, number + 1


def table(reports: Iterable[Report]) -> str:
    """A line for each kind."""
    rows = list(reports)
    text = [f"{'kind':<16}{'count':>6}{'slowest, s':>12}{'wrong':>7}"]
    for kind in [*GENTLE, *DEADLY]:
        own = [row for row in rows if row.kind == kind]
        if own:
            wrong = sum(bool(row.wrong) for row in own)
            text.append(f"{kind:<16}{len(own):>6}{max(row.seconds for row in own):>12.2f}{wrong:>7}")
    text += [f"{row.kind}: {row.wrong[:600]}" for row in rows if row.wrong]
    return "\n".join(text)


def main() -> None:
    """Inject faults, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--deadly", type=float, default=0.2, help="the share of faults that end a process")
    parser.add_argument(
        "--kinds", nargs="+", choices=GENTLE, default=GENTLE, help="of the faults that a cluster survives"
    )
    parser.add_argument("--play", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.play:
        play(int(given.play[0]), given.play[1:])
        return
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell lets what it runs in the background ignore Ctrl-C
    reports = []
    for seed, kinds in rounds(given.count, given.seed, given.deadly, given.kinds):
        for report in watch(seed, kinds):
            reports.append(report)
            print(report, file=sys.stderr, flush=True)
    print(table(reports))
    sys.exit(any(report.wrong for report in reports))


if __name__ == "__main__":
    main()
