"""Faults that a cluster survives: the step or the call raises, or is just late, and what follows is right."""

import copy
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import torch

from exps.injected.kinds import SHORTAGES
from exps.injected.left import MARK, marked
from exps.injected.training import ROWS, STAGES, Report, Training
from pippy import Pipe
from pippy.drivers.base.errors import StepError, WorkerLostError
from pippy.drivers.driver.drivers import PipelineDriver
from tests.drivers import failing_model, scarce


def gentle(training: Training, kind: str) -> Report:
    """A fault that the cluster survives."""
    training.step()
    start = time.monotonic()
    unknown = {"ctrl-c": ctrl_c, "ctrl-c twice": ctrl_c, "lid": lid} | dict.fromkeys(SHORTAGES, shortage)
    try:
        seconds, wrong = unknown[kind](training, kind) if kind in unknown else raised(training, kind)
    except WorkerLostError as error:
        if kind != "no memory" or "MemoryError" not in str(error):
            raise
        return Report(kind, time.monotonic() - start, ends=True)  # RPC itself could not take a message up
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
    trap = training.rng.choice(training.traps_elsewhere())
    given = failing_model.orders(ROWS, trap, SHORTAGES[kind], training.rng.randrange(ROWS))
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
    pids = marked(os.environ[MARK])
    code = "import os, signal, sys, time; pids = list(map(int, sys.argv[3:])); time.sleep(float(sys.argv[1])); "
    code += "[os.kill(pid, signal.SIGSTOP) for pid in pids]; time.sleep(float(sys.argv[2])); "
    code += "[os.kill(pid, signal.SIGCONT) for pid in pids]"
    times = training.rng.uniform(0, 0.2), training.rng.uniform(0.1, 5.0)
    arguments = [sys.executable, "-S", "-c", code, *map(str, (*times, *pids))]
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
