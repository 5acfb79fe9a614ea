"""Does a run go on to the bit, whatever happens to its workers, and whenever?

Command: ``python -m exps.recoveries --count 500 --seed 1``

A run of 60 steps with dropout, AdamW and a scheduler is disturbed at random instants, also while it recovers:

- kill: SIGKILL for a worker, or for two;
- stop: SIGSTOP for a worker;
- exception: the next forward or backward of some stage raises.

The instants are in the run's own time: steps and parts of them, so that they do not depend on how fast the machine is. The
run makes a point every 4 steps, in the memory of neighbours or on the disk by turns, some of these beside the run, and calls
`driver.recover` when a step, an update or a point has failed. Every loss, the repeated ones included, must be that of the
undisturbed run, to the bit, and so must the parameters in the end. Runs differ in their schedules. ``--kinds`` takes some of
the kinds, ``--steps`` another length. ``--engine ray`` has the workers as actors of a Ray, with a spare, ``--engine joined``
as processes that join, each of which is followed by another when it has ended. With ``--fewer``, half of the recoveries go on
with another number of workers, and losses and parameters must be those of the undisturbed run to rounding.

Finding: none is wrong. 500 disturbances (147 kills, 166 stops, 187 exceptions) of 70 runs, 443 recoveries: every loss and every
parameter equal to the bit. In three parts, ``--count 170 --seed 1``, ``--count 170 --seed 2``, ``--count 160 --seed 3``, side
by side on two cores with much else to do; the slowest recovery took 38.2 s there, disturbed itself several times.

With ``--fewer``, none is wrong either: 150 disturbances (44 kills, 53 stops, 53 exceptions) of 27 runs, 111 recoveries, by
``--count 60 --seed 5 --steps 24`` and ``--count 90 --seed 6 --steps 24``.

On Ray, ``--engine ray --count 100 --seed 5``: 100 disturbances (32 kills, 38 stops, 30 exceptions) of 16 runs, 80 recoveries,
none wrong, the slowest in 34.9 s on a machine with four times as much to do as it has cores. That was without a spare; with
one, ``--count 20 --seed 9 --steps 24``: 20 disturbances (8 kills, 3 stops, 9 exceptions) of 3 runs, 18 recoveries, none wrong,
the slowest in 12.0 s, at the same load.

Of workers that join, ``--engine joined --count 100 --seed 7 --steps 24``: 100 disturbances (41 kills, 29 stops, 30 exceptions)
of 16 runs, 77 recoveries, none wrong. The slowest took 34.9 s, at a load of 5 to 9.

It prints how often each kind happened, in how many recoveries they ended, and the slowest recovery. A run that nothing
happened to is counted, too, and ten in a row are an error.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exps.joined import joined
from pippy.drivers.base.errors import CheckpointError, ClusterError, StepError, WorkerLostError
from pippy.drivers.engines.cluster import Cluster
from pippy.drivers.engines.open_cluster import cluster as cluster_on
from pippy.drivers.model.recovery.recovery import replace_lost_workers
from tests.drivers.model.recovery.runs import WIDTH, Run
from tests.drivers.processes import close_open_cluster

KINDS = ("kill", "stop", "exception")
ENGINES = ("local", "ray", "joined")
SCHEDULES = ("1f1b", "fill_drain", "zb_h1")
WORKERS, EVERY, ATTEMPTS = 3, 4, 20
CALM = 0.7  # in so many of the cases, the next disturbance waits until the run has recovered
TIMEOUT = 2.0  # seconds, in which a stopped worker is noticed
IDLE = 10  # so many runs in a row that nothing happens to are an error


class Raises(torch.autograd.Function):
    """Raises in the forward or the backward that finds a file, once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, path: str) -> torch.Tensor:
        """The input as it is."""
        ctx.path = path
        take(path)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient as it is."""
        take(ctx.path)
        return grad.clone(), None


def take(path: str) -> None:
    """Raise if this is the one that finds the file."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    raise ArithmeticError("a stage that fails")


class Trap(nn.Module):
    """Lets its input through, until a file is there."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input as it is."""
        return Raises.apply(x, self.path)


def model(path: str) -> nn.Sequential:
    """A stage for each worker."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh(), Trap(path)) for _ in range(WORKERS)]
    return nn.Sequential(*layers[:-1], nn.Sequential(nn.Linear(WIDTH, 1), Trap(path)))


@dataclass
class Findings:
    """What happened, and what was wrong."""

    happened: Counter[str] = field(default_factory=Counter)
    recoveries: int = 0
    runs: int = 0
    idle: int = 0
    slowest: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} of {kind}" for kind, count in sorted(self.happened.items()))
        text = f"{sum(self.happened.values())} disturbances ({kinds or 'of no kind'}) of {self.runs} runs"
        text += f" ({self.idle} of them not disturbed)" * bool(self.idle)
        text += f", {self.recoveries} recoveries, the slowest {self.slowest:.1f} s; {len(self.wrong)} wrong"
        return "\n".join([text, *self.wrong[:20]])


class Disturbing:
    """A thread that disturbs a cluster at random instants of a run, until the block ends.

    An instant is so many steps after the last disturbance, and a part of a step; or, now and then, a part of a recovery. So
    it does not matter how fast the machine is. The run tells by `made` and `recovered` how far it is.
    """

    def __init__(
        self, cluster: Cluster, path: str, kinds: Sequence[str], rng: random.Random, steps: int, count: int
    ) -> None:
        self.cluster, self.path, self.kinds, self.rng = cluster, path, kinds, rng
        self.happened: Counter[str] = Counter()
        self.left, self.gap = count, steps / (count + 1)
        self._made = 0
        self._step, self._recovery = 0.0, 0.5  # seconds
        self._since = time.monotonic()
        self._ended = False
        self._changed = threading.Condition()

    def __enter__(self) -> "Disturbing":
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()
        with suppress(FileNotFoundError):
            os.unlink(self.path)  # nothing has run since
            self.happened["exception"] -= 1
        self.happened = +self.happened

    def made(self) -> None:
        """The run has made a step."""
        with self._changed:
            self._made += 1
            self._step, self._since = time.monotonic() - self._since, time.monotonic()
            self._changed.notify()

    def recovered(self, seconds: float) -> None:
        """The run has recovered."""
        self._recovery, self._since = seconds, time.monotonic()

    def _run(self) -> None:
        while self.left > 0 and self._waited():
            kind = self.rng.choice(self.kinds)
            with suppress(ProcessLookupError, FileExistsError):  # it was lost and not replaced, or is to raise already
                self._disturb(kind)
                self.happened[kind] += 1
                self.left -= 1

    def _waited(self) -> bool:
        """Wait for the next instant. Whether the run goes on."""
        calm = not self.happened or self.rng.random() < CALM
        least = self._made + (self.rng.uniform(0, 1.5 * self.gap) if calm else 0)
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._made >= least)
            pause = self.rng.uniform(0, 1.5 * (self._step if calm else self._recovery))
            return not self._changed.wait_for(lambda: self._ended, pause)

    def _disturb(self, kind: str) -> None:
        if kind == "exception":
            Path(self.path).touch(exist_ok=False)
            return
        count = 2 if kind == "kill" and self.rng.random() < 0.1 else 1
        present = self.cluster.session.log.present
        for worker in self.rng.sample(present, min(count, len(present))):
            with os.fdopen(os.pidfd_open(self.cluster.session.workers[worker].pid), "rb", 0) as process:
                signal.pidfd_send_signal(process.fileno(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


def point(run: Run, folder: str, step: int) -> None:
    """Make a point: in memory, and every other one on the disk; of these, every other one is written beside the run."""
    if step % (2 * EVERY):
        run.protect(step)
    else:
        run.save(folder, step, keep=2, wait=bool(step % (4 * EVERY)))


@dataclass
class Fewer:
    """With how many workers recoveries go on: as many as before, or now and then others, if ``rng`` is given."""

    rng: random.Random | None = None

    def arguments(self) -> dict[str, int]:
        """Those of the next recovery."""
        others = self.rng is not None and self.rng.random() < 0.5
        return {"workers": self.rng.randint(1, WORKERS)} if others and self.rng is not None else {}

    def same(self, found: Any, expected: Any) -> bool:
        """Whether a number or a tensor is as it should be."""
        found, expected = torch.as_tensor(found), torch.as_tensor(expected)
        return bool(torch.equal(found, expected) if self.rng is None else torch.allclose(found, expected, rtol=1e-9))


def recovered(run: Run, findings: Findings, fewer: Fewer) -> int:
    """Recover, though others are disturbed meanwhile. Gives the step to go on with."""
    for attempt in range(ATTEMPTS):
        try:
            values = run.driver.recover(**fewer.arguments())
            findings.recoveries += 1
            return int(values.get("step", 0))
        except (ClusterError, StepError):
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError


def disturbed(
    run: Run,
    steps: int,
    expected: dict[int, float],
    findings: Findings,
    folder: str,
    disturbing: Disturbing,
    fewer: Fewer,
) -> None:
    """A run that recovers from everything, to its end."""
    step = 0
    while step < steps:
        try:
            if step % EVERY == 0:
                point(run, folder, step)
            run.step(step)
            if not fewer.same(run.losses[step], expected[step]):
                found = f"step {step} has {run.losses[step]!r}, and not {expected[step]!r}"
                findings.wrong.append(f"run {findings.runs}, {run.driver.schedule}: {found}")
            step += 1
            disturbing.made()
        except (ClusterError, StepError, CheckpointError) as error:
            if isinstance(error, CheckpointError) and error.__cause__ is None:
                raise
            start = time.monotonic()
            step = recovered(run, findings, fewer)
            seconds = time.monotonic() - start
            findings.slowest = max(findings.slowest, seconds)
            disturbing.recovered(seconds)


@contextmanager
def opened(engine: str) -> Iterator[Cluster]:
    """A cluster on this engine."""
    if engine == "joined":
        with joined(WORKERS, spares=1, again=True, timeout=TIMEOUT) as (cluster, _):
            yield cluster
        return
    spares = 1 if engine == "ray" else 0
    with cluster_on(WORKERS, engine=engine, threads=1, timeout=TIMEOUT, spares=spares) as cluster:  # type: ignore[arg-type]
        yield cluster


def campaign(
    count: int,
    seed: int,
    kinds: Sequence[str] = KINDS,
    steps: int = 60,
    share: int = 8,
    engine: str = "local",
    fewer: bool = False,
) -> Findings:
    """Disturb runs until so much has happened, ``share`` times in each run."""
    rng, findings, idle = random.Random(seed), Findings(), 0
    going_on = Fewer(random.Random(seed) if fewer else None)
    torch.set_default_dtype(torch.float64)
    close_open_cluster()
    with opened(engine) as cluster, tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/raise"
        plain = Run(cluster, made=model(path))
        plain.steps(0, steps)
        state = plain.driver.state_dict()
        while sum(findings.happened.values()) < count:
            run = begun(cluster, rng.choice(SCHEDULES), path)
            left = min(share, count - sum(findings.happened.values()))
            with Disturbing(cluster, path, kinds, rng, steps, left) as disturbing:
                disturbed(run, steps, plain.losses, findings, f"{folder}/{findings.runs}", disturbing, going_on)
            findings.wrong += differing(run, state, findings, going_on)
            findings.happened += disturbing.happened
            findings.runs += 1
            idle = 0 if disturbing.happened else idle + 1
            findings.idle += idle > 0
            print(findings, file=sys.stderr, flush=True)
            if idle == IDLE:
                raise RuntimeError(
                    f"{idle} runs in a row were not disturbed, though {left} disturbances were asked of each"
                )
    return findings


def begun(cluster: Cluster, schedule: str, path: str) -> Run:
    """A run on all workers: one that the run before did not use may have been lost, and nobody has noticed it."""
    for _ in range(ATTEMPTS):
        with suppress(WorkerLostError):
            replace_lost_workers(cluster, wanted=lambda lost: lost | cluster.gone)
            return Run(cluster, schedule=schedule, made=model(path))
    raise AssertionError


def differing(run: Run, expected: dict[str, Any], findings: Findings, fewer: Fewer) -> list[str]:
    """The parameters and buffers that are not what they should be."""
    for _ in range(ATTEMPTS):
        try:
            found = run.driver.state_dict()
            with suppress(ClusterError):  # a worker is lost meanwhile; the driver is closed
                run.driver.close()
            replace_lost_workers(run.cluster)
            return [
                f"run {findings.runs}, {run.driver.schedule}: {name}"
                for name, value in found.items()
                if not fewer.same(value, expected[name])
            ]
        except ClusterError:  # it was disturbed as the run ended
            first = recovered(run, findings, fewer)
            run.steps(first, max(run.losses) + 1)
    raise AssertionError


def main() -> None:
    """Disturb, and print the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0])
    parser.add_argument("--fewer", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # that two neighbours were lost
    findings = campaign(given.count, given.seed, given.kinds, given.steps, engine=given.engine, fewer=given.fewer)
    print(findings)
    sys.exit(bool(findings.wrong))


if __name__ == "__main__":
    main()
