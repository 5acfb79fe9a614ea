"""What the controller tells the script of its workers: their progress in compiling, their logs, and the errors that it raises
for them.
"""

import logging
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, TextIO

from pippy.drivers.base.errors import ClusterError, StepError
from pippy.drivers.protocol.commands import Failure, WorkerLogRecord
from pippy.drivers.protocol.state import OptimizerStep
from pippy.drivers.protocol.steps import RunTrial, Step
from pippy.ir.base.logs import is_muted, redraws

_LONGEST = 78


class CompileProgress:
    """Shows how many pieces of stages workers have compiled, while calls wait for them. It writes to a terminal only.

    >>> progress = CompileProgress(["worker0", "worker1"])
    >>> progress.line({0: (1, 3), 1: (0, 2)})
    'compiling: worker0 1/3, worker1 0/2'
    """

    def __init__(self, names: Sequence[str], stream: TextIO | None = None) -> None:
        self.names, self.stream = names, stream
        # of each worker that compiles: how many pieces are done, and how many there are
        self.now: dict[int, tuple[int, int]] = {}
        self.shown = False

    def show(self, worker: int, progress: tuple[int, int] | None) -> None:
        """Show what a worker has told: None if it does not compile."""
        if progress is not None:
            self.now[worker] = progress
        elif self.now.pop(worker, None) is None:
            return
        if self.now:
            self._write()
        else:
            self.end()

    def _write(self) -> None:
        stream = self.stream or sys.stderr
        if redraws(stream) and not is_muted():
            self.shown = True
            stream.write(f"\r{self.line(self.now)}\x1b[K")
            stream.flush()

    def line(self, now: dict[int, tuple[int, int]]) -> str:
        """What is shown."""
        each = ", ".join(f"{self.names[worker]} {done}/{of}" for worker, (done, of) in sorted(now.items()))
        return f"compiling: {each}"[:_LONGEST]

    def end(self) -> None:
        """The call waits no longer: clear the line."""
        if self.shown:
            self.shown = False
            stream = self.stream or sys.stderr
            stream.write("\r\x1b[K")
            stream.flush()


def log_for_worker(worker: str, pid: int, records: Iterable[WorkerLogRecord]) -> None:
    """Have loggers of this process handle records of a worker. The message begins with its name; ``record.worker`` has it.

    >>> handler = logging.NullHandler()
    >>> handler.handle = lambda record: print(record.name, record.levelname, record.getMessage(), record.worker)
    >>> logging.getLogger("pippy.example").addHandler(handler)
    >>> log_for_worker("worker1", 4711, [WorkerLogRecord("pippy.example", 30, "100 % of it", 0.0, "/a/file.py", 7, "function")])
    pippy.example WARNING worker1: 100 % of it worker1
    """
    for each in records:
        logger = logging.getLogger(each.logger)
        if not logger.isEnabledFor(each.level):
            continue
        message = f"{worker}: {each.message}"
        record = logger.makeRecord(each.logger, each.level, each.path, each.line, message, (), None, each.function)
        record.created, record.msecs = each.created, each.created % 1 * 1000
        record.worker = record.processName = worker
        record.process, record.thread, record.threadName = pid, 0, f"pippy {worker}"
        with suppress(Exception):  # a handler of the script that fails is no failure of the answer
            logger.handle(record)


def step_error(name: str, worker: int, number: int, body: Any, failure: Failure) -> StepError:
    """The error for a failure on a worker, at this body of the command with this number."""
    lines = []
    if failure.instruction:
        of = "" if failure.stage is None else _of_stage(failure, body)
        lines.append(f"worker {worker} ({name}) failed at {failure.instruction}{of}, {failure.where} of step {number}")
    else:
        lines.append(f"worker {worker} ({name}) failed at {failure.where}")
    lines.append(failure.message)
    if isinstance(body, OptimizerStep):
        lines.append(
            "parameters may have been updated on some workers and not on others; load a state dict before going on"
        )
    if failure.traceback:
        lines += ["", "The worker's traceback:", failure.traceback]
    error = StepError("\n".join(lines).rstrip())
    error.failure, error.worker = failure, worker
    return error


def _of_stage(failure: Failure, body: Any) -> str:
    step = body.step if isinstance(body, RunTrial) else body
    rows = step.rows_shown(failure.microbatch) if isinstance(step, Step) and failure.microbatch is not None else ""
    return f" (stage {failure.stage}, micro-batch {failure.microbatch}{f', {rows}' if rows else ''})"


def given_up_error(number: int, first: int, error: BaseException) -> Exception:
    """The error of a command that was given up, when the first of those that were has this error.

    >>> given_up_error(7, 7, StepError("why"))
    StepError('why')
    >>> given_up_error(8, 7, StepError("why"))
    StepError('step 8 was given up because step 7 failed:\\nwhy')
    >>> given_up_error(7, 7, KeyboardInterrupt())
    StepError('step 7 was given up because of a KeyboardInterrupt')
    """
    if isinstance(error, ClusterError) or (number == first and isinstance(error, Exception)):
        return error
    why = f"step {first} failed:\n{error}" if isinstance(error, Exception) else f"of a {type(error).__name__}"
    return StepError(f"step {number} was given up because {why}")


def late_text(number: int, limit: float | None, dump: str) -> str:
    """What is said of a step that takes too long, with what the workers do."""
    return f"step {number} took longer than {limit or 0.0:g} s (step_timeout) and was given up; at that time\n{dump}"


def stuck_text(doing: str, seconds: float) -> str:
    """How a worker is lost whose instruction does not end."""
    return (
        f"{seconds:g} s after it was told to give up what it did, it had not (cluster(timeout=) says how long it may take); it "
        f"says: {doing}"
    )
