"""Faults that end a process, or a connection, of a cluster."""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch

from exps.injected.kinds import BY_THE_WATCHER, UNNOTICED
from exps.injected.training import ROWS, STAGES, Report, Training
from pippy.drivers.base.errors import ClusterError, StepError, WorkerLostError
from tests.drivers import failing_model, scarce

LONGEST = 60.0  # seconds of steps, until what was to happen has not
UNNOTICED_FOR = 1.0  # seconds of steps around what is not to be noticed
_ORDERS = {"stuck": failing_model.ENDLESS, "hold lock": failing_model.BUSY_FOR_LONG}


def deadly(training: Training, kind: str) -> Report:
    """A fault at a random moment of a step: a signal for a process, a cut, or what the watcher of this process does."""
    sent: list[float] = []
    orders = None
    if kind == "cut":
        trap, row = training.rng.randrange(STAGES), training.rng.randrange(ROWS)
        orders = failing_model.orders(ROWS, trap, scarce.CUT_SOCKETS, row)
        sent.append(time.monotonic())
    elif kind in _ORDERS:
        orders = failing_model.orders(ROWS, training.rng.choice(training.traps_elsewhere()), _ORDERS[kind], 0)
        if kind == "stuck":  # Ctrl-C, and what follows has to wait for the stage
            _stick(training, orders)
            sent.append(time.monotonic())
    elif kind not in BY_THE_WATCHER:
        victim, number = _victim(training, kind), signal.SIGKILL if kind.startswith("kill") else signal.SIGSTOP

        def strike() -> None:
            sent.append(time.monotonic())
            os.kill(victim, number)

        threading.Timer(training.rng.uniform(0, 0.1), strike).start()
    until = time.monotonic() + (UNNOTICED_FOR if kind in UNNOTICED else LONGEST)
    wrong = ""
    try:
        while time.monotonic() < until:
            training.run(orders)
        wrong = "" if kind in UNNOTICED else "nothing was noticed"
    except WorkerLostError as error:
        wrong = f"a worker was lost: {error}" if kind in UNNOTICED else ""
    except (StepError, ClusterError) as error:
        wrong = f"{type(error).__name__}: {error}"
    ended = time.monotonic()
    if kind == "kill fork server" and not wrong:
        wrong = _recovers(training)
    seconds = 0.0 if not sent or kind in UNNOTICED else ended - sent[0]
    return Report(kind, seconds, wrong, ended)


def _recovers(training: Training) -> str:
    """What is wrong with the steps after another fork server has started other workers."""
    try:
        training.driver.recover()
        training.plain.zero_grad()
        training.step()
        training.check()
    except (AssertionError, StepError, ClusterError) as error:
        return f"after recover(): {type(error).__name__}: {error}"
    return ""


def _stick(training: Training, orders: torch.Tensor) -> None:
    """Give up steps with Ctrl-C, one of which has a stage that never ends."""
    timer = threading.Timer(0.3 + training.rng.uniform(0, 0.1), os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with suppress(KeyboardInterrupt):
        training.run(orders)


def _victim(training: Training, kind: str) -> int:
    workers = [worker.pid for worker in training.cluster.session.workers if worker.pid != os.getpid()]
    if kind.endswith("fork server"):
        return fork_server(workers[0])
    return training.rng.choice(workers)


def fork_server(worker: int) -> int:
    """The process that a worker was forked from."""
    return int(Path(f"/proc/{worker}/stat").read_text().rsplit(")", 1)[1].split()[1])
