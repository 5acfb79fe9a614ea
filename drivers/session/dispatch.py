"""Numbers the commands of a cluster, sends them to the workers, and waits for the answers.

When a worker answers that it failed, the others may wait for values that will never come. So the command, and all that
were posted after it, are given up on all workers. The caller that waits gets an error at once. The next command is sent
when every worker has given up the old ones.

    posted ──▶ outstanding ──all answered──▶ done
                    │ a failure, Ctrl-C, a time limit
                    ▼
    given up: `wait` raises an error; the calls that are not answered stay in ``unanswered`` until the next command
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from pippy.drivers.base.errors import ClusterError, StepError
from pippy.drivers.base.interrupts import uninterrupted
from pippy.drivers.protocol.checkpoints import TakeState
from pippy.drivers.protocol.commands import Answer, Command, CommandElsewhere, Failure, ZeroGrad
from pippy.drivers.protocol.held_states import PutBackState
from pippy.drivers.protocol.kept_states import TakeKept
from pippy.drivers.protocol.optimizers import LoadOptimizerState, OptimizerStep
from pippy.drivers.protocol.parameters import Initialize, Store
from pippy.drivers.protocol.peers import NeedsPeers
from pippy.drivers.protocol.stages import ForgetPeers
from pippy.drivers.protocol.steps import Step
from pippy.drivers.protocol.urgent import AskWays, Dump, GiveUp
from pippy.drivers.session.control import Address, Control, PendingCall, outcome
from pippy.ir.base.surroundings import Surroundings

_CHANGES = OptimizerStep, Store, LoadOptimizerState, TakeState, TakeKept, Initialize, PutBackState


def _nothing() -> None:
    pass


def accept_all(answers: Mapping[int, Any]) -> None:
    """Any answers will do."""


@dataclass(eq=False)
class PendingCommand:
    """A command that was posted: the body that each worker was sent, the calls that carry them, and the answers.

    ``accept`` is called with the values of the answers, and may raise: the command is given up then, as if a worker had
    failed. ``undo`` is called if it is given up, and ``limit`` is how many seconds it may take, from ``since`` on. ``thread``
    has sent it, for ``driver``.
    """

    number: int
    bodies: Mapping[int, Any]
    driver: int = -1
    undo: Callable[[], None] = _nothing
    limit: float | None = None
    accept: Callable[[Mapping[int, Any]], None] = accept_all
    calls: dict[int, PendingCall] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)
    error: Exception | None = None
    done: bool = False
    since: float = field(default_factory=time.monotonic)
    thread: int = field(default_factory=threading.get_ident)

    def unanswered(self) -> list[PendingCall]:
        """The calls that are not answered."""
        return [call for worker, call in self.calls.items() if worker not in self.answers]

    def values(self) -> dict[int, Any]:
        """What the workers answered with, in the order in which they were told."""
        return {worker: self.answers[worker].value for worker in self.calls if worker in self.answers}

    def left(self) -> float | None:
        """How many seconds it may still take."""
        return None if self.limit is None else max(0.0, self.since + self.limit - time.monotonic())


class Dispatch:
    """The commands of one cluster. ``end`` ends its processes: an instruction that has begun cannot be stopped otherwise.

    Any thread may call this. Three locks, always taken in this order:

    - ``sending``: a thread has it from its decision what to send until that is sent. It first waits for what others have under
      way for other drivers (``wait_for_others``), because what fails takes all with it that was sent after it;
    - ``_gathering``: one thread takes in answers, those that others wait for, too;
    - ``lock``: what is under way, and what drivers know of it, changes.

    A thread waits for workers with ``lock`` only until they have given up, which takes no answer of another thread.
    """

    def __init__(self, control: Control, end: Callable[[], Any] = _nothing) -> None:
        self.control, self.end = control, end
        self.sending, self._gathering, self.lock = threading.RLock(), threading.RLock(), threading.RLock()
        self.number = self.settled = 0
        self.outstanding: deque[PendingCommand] = deque()
        self.unanswered: list[PendingCall] = []  # calls of commands that were given up
        self.dropped: dict[int, deque[int]] = {}  # drivers that are gone, and that a worker is yet to drop
        self.half_changed_drivers: set[int] = set()  # drivers that were changing what workers hold when one was lost
        self.untold: GiveUp | None = None  # what was given up when a worker was lost, and the others were not told of

    def post(
        self,
        driver: int,
        bodies: Mapping[int, Any],
        zero_grad: ZeroGrad = False,
        undo: Callable[[], None] = _nothing,
        limit: float | None = None,
        surroundings: Surroundings | None = None,
        accept: Callable[[Mapping[int, Any]], None] = accept_all,
    ) -> PendingCommand:
        """Send each worker its part of a command, under one number. ``surroundings`` are given if they changed."""
        posted = PendingCommand(0, bodies, driver, undo, limit, accept)
        try:
            with self.sending:
                while not self._posted(posted, zero_grad, surroundings):
                    self.wait_given_up(limit)
        except BaseException as error:  # some workers may have the command, and wait for the others
            if posted.number:
                self.give_up(error)
            raise
        return posted

    def _posted(self, posted: PendingCommand, zero_grad: ZeroGrad, surroundings: Surroundings | None) -> bool:
        """Send a command, unless workers are yet to give up what they were told to: they would give up this one instead."""
        with uninterrupted(), self.lock:
            if self.unanswered:
                return False
            posted.number = self.number = self.number + 1
            posted.since = time.monotonic()
            self.outstanding.append(posted)
            for worker, body in posted.bodies.items():
                if isinstance(body, NeedsPeers):
                    self.control.connect(worker, body.peers(worker))
            for worker, body in posted.bodies.items():
                dropped = tuple(self._take_dropped(worker))
                parts = self.number, self.settled, posted.driver, body, zero_grad, dropped
                command = Command(*parts) if surroundings is None else CommandElsewhere(*parts, surroundings)
                posted.calls[worker] = self.control.post(worker, command)
        return True

    def wait_for_others(self, driver: int) -> None:
        """Wait until nothing is under way that another thread has sent for another driver; its errors are raised there."""
        thread = threading.get_ident()
        with self.lock:
            others = [each for each in self.outstanding if each.thread != thread and each.driver != driver]
        if others:
            self._wait_done(others[-1])

    def drop(self, driver: int, workers: tuple[int, ...]) -> None:
        """Have workers drop what belongs to a driver: the next command says so. Any thread may call this."""
        for worker in workers:
            self.dropped.setdefault(worker, deque()).append(driver)

    def _take_dropped(self, worker: int) -> Iterator[int]:
        """The drivers that a worker is to drop."""
        queue = self.dropped.get(worker)
        while queue:
            yield queue.popleft()

    def wait(self, posted: PendingCommand) -> dict[int, Any]:
        """The values that the workers answered with. Commands that were posted before are waited for too."""
        self._wait_done(posted)
        if posted.error is not None:
            raise posted.error
        return posted.values()

    def _wait_done(self, posted: PendingCommand) -> None:
        try:
            while not posted.done:
                with self._gathering:
                    with self.lock:
                        oldest = None if posted.done else self.outstanding[0]
                    if oldest is not None:
                        self._finish(oldest)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) or not posted.done:  # while another thread takes in answers
                self.give_up(error)
            raise

    def call(
        self,
        driver: int,
        bodies: Mapping[int, Any],
        zero_grad: ZeroGrad = False,
        undo: Callable[[], None] = _nothing,
        surroundings: Surroundings | None = None,
        limit: float | None = None,
    ) -> dict[int, Any]:
        """Post a command, and wait for it, ``limit`` seconds at most. Steps that are under way are waited for first: it is to
        find them done."""
        posted = None
        try:
            with self.sending:
                self.wait_all()
                posted = self.post(driver, bodies, zero_grad, undo, limit, surroundings)
            return self.wait(posted)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) or (posted is not None and not posted.done):  # between the two
                self.give_up(error)
            raise

    def wait_all(self) -> None:
        """Wait for all that was sent; raises if the last of it failed."""
        with self.lock:
            last = self.outstanding[-1] if self.outstanding else None
        if last is not None:
            self.wait(last)

    def dump(self, timeout: float = 1.0) -> str:
        """What every worker does or waits for, and which workers do not answer in time."""
        names = [worker.name for worker in self.control.workers]
        try:
            said = self._ask(Dump(), timeout)
        except ClusterError as error:
            return str(error)
        silent = f"no answer within {timeout:g} s: it is stopped, or its process does not let Python run"
        return "\n".join(f"{name!r}: {said.get(i, silent)}" for i, name in enumerate(names))

    def ways(self, timeout: float = 1.0) -> dict[tuple[int, int], str]:
        """From which worker to which values stay on devices, and from which to which they do not, with the reason."""
        try:
            said = self._ask(AskWays(), timeout)
        except ClusterError:
            return {}
        return {(one, other): why for one, ways in said.items() for other, why in ways.items()}

    def _ask(self, message: Any, timeout: float) -> dict[int, Any]:
        """What the workers that answer in time say at once."""
        calls = [self.control.urgent(worker, message) for worker in range(len(self.control.workers))]
        return {call.worker: call.answer for call in self.control.completed(calls, timeout)}

    def _finish(self, posted: PendingCommand) -> None:
        """Wait for the oldest command."""
        try:
            failed = self._gather(posted)
            late = failed is None and posted.unanswered()
        except BaseException as error:
            self.give_up(error)
            raise
        with self.lock:
            if posted.done:  # another thread has given it up
                return
            if late:
                self._too_late(posted)
            elif failed is not None:
                self.give_up(step_error(self.control.workers[failed[0]].name, failed[0], posted, failed[1]))
            elif self._accepted(posted):
                self._settle(posted)

    def _settle(self, posted: PendingCommand) -> None:
        with uninterrupted():
            self.outstanding.popleft()
            posted.done, self.settled = True, posted.number
            for following in list(self.outstanding)[:1]:
                following.since = max(following.since, time.monotonic())

    def _accepted(self, posted: PendingCommand) -> bool:
        """Whether the controller can use the answers. If not, the command has failed, and nothing of it counts."""
        try:
            posted.accept(posted.values())
        except Exception as error:
            self.give_up(error)
            return False
        except BaseException as error:
            self.give_up(error)
            raise
        return True

    def _gather(self, posted: PendingCommand) -> tuple[int, Failure] | None:
        """Take in answers until all are there, or one is a failure, or the time is up."""
        for call in self.control.completed(posted.unanswered(), posted.left()):
            posted.answers[call.worker] = answer = _answer(call)
            if answer.failure is not None:
                if answer.failure.peer is not None:
                    how = f"worker {self.control.workers[call.worker].name!r} found the connection to it closed"
                    raise self.control.mark_lost(answer.failure.peer, how)
                return call.worker, answer.failure
        return None

    def has_sent_since(self, number: int) -> bool:
        """Whether a later command of this thread than the one with this number is under way."""
        with self.lock:
            return any(each.number > number and each.thread == threading.get_ident() for each in self.outstanding)

    def give_up(self, error: BaseException) -> None:
        """Give up all that is under way, because of an error. The workers are told, unless the cluster is broken."""
        with uninterrupted(), self.lock:
            if not self.control.broken:
                try:
                    self._tell_workers()
                except ClusterError as lost:
                    error = lost
            if self.control.broken:
                self.unanswered.clear()
                if self.outstanding:
                    self.untold = GiveUp(self.outstanding[0].number, self.number)
                    self.half_changed_drivers.update(
                        each.driver for each in self.outstanding if _changes_what_is_held(each)
                    )
            for posted in reversed(self.outstanding):
                posted.undo()
            for posted in self.outstanding:
                posted.error, posted.done = _for_step(posted, self.outstanding[0], error), True
            self.outstanding.clear()
            self.settled = self.number

    def _tell_workers(self) -> None:
        if not self.outstanding:
            return
        message = GiveUp(self.outstanding[0].number, self.number)
        self.unanswered += [call for posted in self.outstanding for call in posted.unanswered()]
        self.unanswered += [self.control.urgent(worker, message) for worker in range(len(self.control.workers))]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other thread sends anything, or takes in answers. In a cluster that has lost a worker, all their waits end."""
        with self.sending, self._gathering, self.lock:
            yield

    def mend(self, replaced: Mapping[int, Address], limit: float | None) -> None:
        """Go on with other processes in the places of lost workers: the others give up what they do, and forget those.

        If they do not in ``limit`` seconds, the processes are ended.
        """
        others = [worker for worker in range(len(self.control.workers)) if worker not in replaced]
        self.number += 1
        self.settled = self.number
        self.control.mend(replaced)
        calls = [] if self.untold is None else [self.control.urgent(worker, self.untold) for worker in others]
        command = Command(self.number, self.number - 1, -1, ForgetPeers(tuple(replaced)))
        calls += [self.control.post(worker, command) for worker in others]
        for call in self.control.completed(calls, limit):
            calls.remove(call)
            failure = getattr(call.answer, "failure", None)
            if failure is not None:
                raise ClusterError(f"worker {call.worker} could not forget lost workers: {failure.message}")
        if calls:
            raise self._end_processes(sorted({call.worker for call in calls}), limit or 0.0)
        self.untold = None

    def wait_given_up(self, limit: float | None) -> None:
        """Wait until the workers have given up what they were told to. After Ctrl-C the next command goes on waiting."""
        if self.unanswered and (stuck := self._stuck(limit)):
            raise self._end_processes(stuck, limit or 0.0)

    def _stuck(self, limit: float | None) -> list[int]:
        """The workers that have not given up after so many seconds."""
        for call in self.control.completed(list(self.unanswered), limit):
            with self.lock:
                if call in self.unanswered:
                    self.unanswered.remove(call)
        return sorted({call.worker for call in self.unanswered})

    def _too_late(self, posted: PendingCommand) -> None:
        """A step has taken longer than it may."""
        text = (
            f"step {posted.number} took longer than {posted.limit:g} s (step_timeout) and was given up; at that time\n"
        )
        text += self.dump()
        error = StepError(text)
        self.give_up(error)
        try:
            stuck = self._stuck(self.control.timeout)
        except ClusterError as lost:  # a worker is lost: that is why it took so long
            posted.error = lost
            return
        if stuck:
            posted.error = StepError(f"{text}\n\n{self._end_processes(stuck, self.control.timeout)}")

    def _end_processes(self, stuck: Iterable[int], seconds: float) -> ClusterError:
        """End all processes, because some workers are stuck. Returns the error that says so."""
        names = ", ".join(f"{self.control.workers[worker].name!r}" for worker in stuck)
        error = ClusterError(
            f"worker {names} was still at its instruction {seconds:g} s after the step was given up; the processes of this "
            "cluster were ended, open another"
        )
        self.control.broken = str(error)
        self.unanswered.clear()
        self.end()
        return error


def _changes_what_is_held(posted: PendingCommand) -> bool:
    """Whether some workers may have done it, and others not, in a way that giving it up does not undo."""
    return any(isinstance(body, _CHANGES) for body in posted.bodies.values())


def _answer(call: PendingCall) -> Answer:
    """What a worker answered. It is a failure, too, if the worker could not read the message, or we cannot read its answer."""
    answer, error = outcome(lambda: call.answer)
    if error is not None:
        return Answer(failure=Failure(f"{type(error).__name__}: {error}", "", where="the exchange of messages"))
    return cast(Answer, answer)


def _for_step(posted: PendingCommand, first: PendingCommand, error: BaseException) -> Exception:
    if posted is first and isinstance(error, Exception):
        return error
    if isinstance(error, ClusterError):
        return error
    why = f"step {first.number} failed:\n{error}" if isinstance(error, Exception) else f"of a {type(error).__name__}"
    return StepError(f"step {posted.number} was given up because {why}")


def _of_stage(failure: Failure, body: Any) -> str:
    rows = (
        body.inputs.rows_shown(failure.microbatch) if isinstance(body, Step) and failure.microbatch is not None else ""
    )
    return f" (stage {failure.stage}, micro-batch {failure.microbatch}{f', {rows}' if rows else ''})"


def step_error(name: str, worker: int, posted: PendingCommand, failure: Failure) -> StepError:
    """What the controller raises for a failure on a worker."""
    lines = []
    if failure.instruction:
        of = "" if failure.stage is None else _of_stage(failure, posted.bodies.get(worker))
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
