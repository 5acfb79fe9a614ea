"""Numbers the commands of a cluster, sends them to the workers, and waits for the answers.

When a worker's answer is a failure, the others may wait for values that will never come: the command and all that were
posted after it are given up everywhere. Who waited is told at once; the next command waits until every worker has let go.

    posted ──▶ outstanding ──all answered──▶ done
                    │ a failure, Ctrl-C, a time limit
                    ▼
    given up: an error for whoever asks; what the workers still owe is in ``leaving`` until the next command
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pippy.drivers.control.messages import Answer, Command, Dump, Failure, GiveUp, OptimizerStep
from pippy.drivers.errors import ClusterError, StepError
from pippy.drivers.interrupts import uninterrupted

if TYPE_CHECKING:
    from pippy.drivers.control.control import Control, Pending


def _nothing() -> None:
    pass


@dataclass(eq=False)
class Posted:
    """A command on its way: what each worker was told, and what came back.

    ``undo`` is called if it is given up, and ``limit`` is how many seconds it may take, from ``since`` on.
    """

    number: int
    bodies: Mapping[int, Any]
    undo: Callable[[], None] = _nothing
    limit: float | None = None
    pending: dict[int, "Pending"] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)
    error: Exception | None = None
    done: bool = False
    since: float = field(default_factory=time.monotonic)

    def waited(self) -> list["Pending"]:
        """The calls that are not answered."""
        return [pending for worker, pending in self.pending.items() if worker not in self.answers]

    def left(self) -> float | None:
        """How many seconds it may still take."""
        return None if self.limit is None else max(0.0, self.since + self.limit - time.monotonic())


class Dispatch:
    """The commands of one cluster. ``end`` kills its processes, where nothing else stops them."""

    def __init__(self, control: "Control", end: Callable[[], Any] = _nothing) -> None:
        self.control, self.end = control, end
        self.number = self.settled = 0
        self.outstanding: deque[Posted] = deque()
        self.leaving: list[Pending] = []
        self.forgotten: dict[int, deque[int]] = {}  # drivers that are gone, by worker

    def post(
        self,
        driver: int,
        bodies: Mapping[int, Any],
        zero_grad: bool = False,
        undo: Callable[[], None] = _nothing,
        limit: float | None = None,
    ) -> Posted:
        """Send each worker its part of a command, under one number."""
        self.let_go(limit)
        posted = Posted(self.number + 1, bodies, undo, limit)
        try:
            with uninterrupted():
                self.number += 1
                self.outstanding.append(posted)
                for worker, body in bodies.items():
                    dropped = tuple(self._dropped(worker))
                    command = Command(self.number, self.settled, driver, body, zero_grad, dropped)
                    posted.pending[worker] = self.control.post(worker, command)
        except BaseException as error:  # some workers may have been told, and wait for the others
            self.stop(error)
            raise
        return posted

    def forget(self, driver: int, workers: tuple[int, ...]) -> None:
        """Have workers drop a driver, along with what they are told next. Any thread may call this."""
        for worker in workers:
            self.forgotten.setdefault(worker, deque()).append(driver)

    def _dropped(self, worker: int) -> Iterator[int]:
        """The drivers that a worker is to drop."""
        queue = self.forgotten.get(worker)
        while queue:
            yield queue.popleft()

    def wait(self, posted: Posted) -> dict[int, Any]:
        """The values that the workers answered with. Commands that were posted before are waited for too."""
        while not posted.done:
            self._finish(self.outstanding[0])
        if posted.error is not None:
            raise posted.error
        return {worker: answer.value for worker, answer in posted.answers.items()}

    def call(
        self, driver: int, bodies: Mapping[int, Any], zero_grad: bool = False, undo: Callable[[], None] = _nothing
    ) -> dict[int, Any]:
        """Post a command, and wait for it. Steps that are under way are waited for first: it is to see what they did."""
        try:
            if self.outstanding:
                self.wait(self.outstanding[-1])
            return self.wait(self.post(driver, bodies, zero_grad, undo))
        except KeyboardInterrupt as interrupt:  # between the two
            self.stop(interrupt)
            raise

    def dump(self, timeout: float = 1.0) -> str:
        """What every worker does or waits for; those that do not answer in time are said so."""
        names = [worker.name for worker in self.control.workers]
        said: dict[int, str] = {}
        try:
            pendings = [self.control.urgent(worker, Dump()) for worker in range(len(names))]
            for pending in self.control.completed(pendings, timeout):
                said[pending.worker] = str(pending.answer)
        except ClusterError as error:
            return str(error)
        silent = f"no answer within {timeout:g} s: it is stopped, or its process does not let Python run"
        return "\n".join(f"{name!r}: {said.get(i, silent)}" for i, name in enumerate(names))

    def _finish(self, posted: Posted) -> None:
        """Wait for the oldest command."""
        try:
            failed = self._gather(posted)
            late = failed is None and posted.waited()
        except BaseException as error:
            self.stop(error)
            raise
        if late:
            self._too_late(posted)
        elif failed is not None:
            self.stop(step_error(self.control.workers[failed[0]].name, failed[0], posted, failed[1]))
        else:
            with uninterrupted():
                self.outstanding.popleft()
                posted.done, self.settled = True, posted.number
                for following in list(self.outstanding)[:1]:
                    following.since = max(following.since, time.monotonic())

    def _gather(self, posted: Posted) -> tuple[int, Failure] | None:
        """Take in answers until all are there, or one is a failure, or the time is up."""
        for pending in self.control.completed(posted.waited(), posted.left()):
            posted.answers[pending.worker] = answer = _answer(pending)
            if answer.failure is not None:
                if answer.failure.peer is not None:
                    how = f"worker {pending.worker} found the connection to it closed"
                    raise self.control.lost(answer.failure.peer, how)
                return pending.worker, answer.failure
        return None

    def stop(self, error: BaseException) -> None:
        """Give up all that is under way, because of an error. A cluster that is broken has nothing to be told."""
        with uninterrupted():
            if not self.control.broken:
                try:
                    self._tell()
                except ClusterError as lost:
                    error = lost
            if self.control.broken:
                self.leaving.clear()
            for posted in reversed(self.outstanding):
                posted.undo()
            for posted in self.outstanding:
                posted.error, posted.done = _for_step(posted, self.outstanding[0], error), True
            self.outstanding.clear()
            self.settled = self.number

    def _tell(self) -> None:
        if not self.outstanding:
            return
        give_up = GiveUp(self.outstanding[0].number, self.number)
        self.leaving += [pending for posted in self.outstanding for pending in posted.waited()]
        self.leaving += [self.control.urgent(worker, give_up) for worker in range(len(self.control.workers))]

    def let_go(self, limit: float | None) -> None:
        """Wait until the workers have let go of what was given up. Ctrl-C may interrupt it; the next command goes on."""
        if self.leaving and (stuck := self._still_at_it(limit)):
            raise self._hopeless(stuck, limit or 0.0)

    def _still_at_it(self, limit: float | None) -> list[int]:
        """The workers that have not let go after so many seconds."""
        for pending in self.control.completed(list(self.leaving), limit):
            self.leaving.remove(pending)
        return sorted({pending.worker for pending in self.leaving})

    def _too_late(self, posted: Posted) -> None:
        """A step has taken longer than it may."""
        text = (
            f"step {posted.number} took longer than {posted.limit:g} s (step_timeout) and was given up; at that time\n"
        )
        text += self.dump()
        error = StepError(text)
        self.stop(error)
        try:
            stuck = self._still_at_it(self.control.timeout)
        except ClusterError as lost:  # that is why it took so long
            posted.error = lost
            return
        if stuck:
            posted.error = StepError(f"{text}\n\n{self._hopeless(stuck, self.control.timeout)}")

    def _hopeless(self, stuck: Iterable[int], seconds: float) -> ClusterError:
        """An instruction that has begun cannot be stopped; a process can."""
        names = ", ".join(f"{self.control.workers[worker].name!r}" for worker in stuck)
        error = ClusterError(
            f"worker {names} was still at its instruction {seconds:g} s after the step was given up; the processes of this "
            "cluster were ended, open another"
        )
        self.control.broken = str(error)
        self.leaving.clear()
        self.end()
        return error


def _answer(pending: "Pending") -> Answer:
    """What a worker answered; that it could not read the message, or this process its answer, is a failure too."""
    try:
        answer: Answer = pending.answer
    except Exception as error:
        return Answer(failure=Failure(f"{type(error).__name__}: {error}", "", where="the exchange of messages"))
    return answer


def _for_step(posted: Posted, first: Posted, error: BaseException) -> Exception:
    if posted is first and isinstance(error, Exception):
        return error
    if isinstance(error, ClusterError):
        return error
    why = f"step {first.number} failed:\n{error}" if isinstance(error, Exception) else f"of a {type(error).__name__}"
    return StepError(f"step {posted.number} was given up because {why}")


def step_error(name: str, worker: int, posted: Posted, failure: Failure) -> StepError:
    """What the controller raises for a failure on a worker."""
    lines = []
    if failure.instruction:
        of = "" if failure.stage is None else f" (stage {failure.stage}, micro-batch {failure.microbatch})"
        lines.append(
            f"worker {worker} ({name}) failed at {failure.instruction}{of}, {failure.where} of step {posted.number}"
        )
    else:
        lines.append(f"worker {worker} ({name}) failed at {failure.where}")
    lines.append(failure.message)
    if isinstance(posted.bodies.get(worker), OptimizerStep):
        lines.append(
            "parameters may have been updated on some workers and not on others; load a state dict before going on"
        )
    if failure.traceback:
        lines += ["", "The worker's traceback:", failure.traceback]
    error = StepError("\n".join(lines).rstrip())
    error.failure, error.worker = failure, worker
    return error
