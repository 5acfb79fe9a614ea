"""Runs a worker's part of a program, and lets a later computation overtake the next one while the worker would only wait.

The *head* is the next computation of the program. When its values have not come, a later computation whose values are here
may run first, if `ComputationQueues` allows it. The numbers stay the same to the bit, the memory limit holds, and no worker
waits forever; queues.py says why.

To overtake can also cost time. A computation that has begun must end, even if the head's value comes a moment later, and
other workers wait for the head's results. So the worker asks two questions of a computation that could overtake:

    may it?  a backward overtakes a forward   only if more is alive here than `Overtaking.depth`: a backward makes it less
             any other                        yes, once its duration is known
    when?    a long wait is expected          at once: the wait is expected, from earlier steps, to be longer than EXPECTED
                                              of the computation's duration
             a short one                      after the worker has waited for WAITED of the computation's duration

A value that this worker hands on to another one is received, and handed on, as soon as the worker finds it here.
"""

import time
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch

from pippy.drivers.lowering.flow import taken
from pippy.drivers.plan.language.edges import Pass, produced_by
from pippy.drivers.plan.language.instructions import Compute, Op, Receive, Send
from pippy.drivers.protocol.programs import OutOfOrderLimits
from pippy.drivers.wire.gpu.copies import DeviceCopies
from pippy.drivers.wire.received_values import ValueKey
from pippy.drivers.wire.transport import Transport
from pippy.drivers.worker.bind import BoundProgram
from pippy.drivers.worker.executor import Executor
from pippy.drivers.worker.measure.calls import BoundCall
from pippy.drivers.worker.queues import ComputationQueues
from pippy.drivers.worker.step_context import StepContext
from pippy.ir.base.names import LOSS

EXPECTED = 0.15  # overtake at once if the expected wait is longer than this share of the computation's duration
WAITED = 0.25  # else overtake when the worker has waited for this share of it
_NOTICED = 2e-4  # a value that came within so many seconds does not count as waited for


class OutOfOrderExecutor(Executor):
    """One program on one worker. Its computations may overtake one another."""

    def __init__(
        self,
        bound: BoundProgram,
        transport: Transport,
        device: torch.device,
        copies: DeviceCopies | None,
        limits: OutOfOrderLimits,
    ) -> None:
        super().__init__(bound, transport, device, copies)
        self.limits, self.step, program = limits, 0, bound.program
        backward = [key.stage for key in program.work if key.phase == "B"]
        gathers = [key.stage for key, work in program.work.items() if bound.gathers and LOSS in [w.call for w in work]]
        self.queues = ComputationQueues(
            program.order, backward, self._taken, self._made, limits.limit, gathers[0] if gathers else None
        )
        self._kinds = [f"{each.op}{each.stage}" if isinstance(each, Compute) else "" for each in program.order]
        self._keys = {at: self._key(at) for at, each in enumerate(program.order) if isinstance(each, Receive)}
        self._handed_on = [
            at for at in self._keys if any(isinstance(program.order[each], Send) for each in self.queues.followers[at])
        ]
        self._to_hand_on: list[int] = []  # those of them that have not come in this step
        self._running: tuple[Sequence[BoundCall], StepContext]
        self.durations: dict[str, float] = {}  # of each kind of computation, in the latest steps
        self.expected: dict[
            int, float
        ] = {}  # when the values of a computation come, in seconds from the begin of a step

    def _go_through(self, code: Sequence[BoundCall], step: StepContext) -> None:
        queues, self.step, self._running = self.queues, step.number, (code, step)
        queues.begin()
        self._to_hand_on = list(self._handed_on)
        self.begun, self.late = time.monotonic(), 0.0
        while queues.left:
            free = time.monotonic()
            at = self._next(free)
            for receive in queues.awaited(at):
                self._do(receive)
            begin = time.monotonic()
            self._note_arrival(at, begin, waited=begin - free > _NOTICED)
            self._do(at)
            self._note_duration(at, time.monotonic() - begin)
        while rest := queues.rest():
            self._do(rest[0])

    def _do(self, at: int) -> None:
        """Run an instruction, then the sends and frees that waited only for it."""
        (code, step), self.at = self._running, at
        handle, operands = code[at]
        handle(step, *operands)
        for follower in self.queues.done(at):
            self._do(follower)

    def _next(self, free: float) -> int:
        """The computation to run now: the head, or one that overtakes it. Waits while there is none."""
        self._hand_on()
        head = self.queues.head()
        if not self._missing(head):  # most often
            return head
        others = [at for at in self.queues.open()[1:] if self._may_overtake(head, at)]
        while (others or self._to_hand_on) and (missing := self._missing(head)):
            lacking = {at: self._missing(at) for at in others}  # a snapshot: values may come at any moment
            ready = next((at for at in others if not lacking[at]), None)
            patience = None if ready is None else self._patience(head, ready, free)
            if ready is not None and patience is not None and patience <= 0:
                return ready
            self.at = missing[0]
            receives = chain(missing, *lacking.values(), self._to_hand_on)
            self.transport.wait_any(list(map(self._wanted, receives)), patience)
            self._hand_on()
        return head

    def _hand_on(self) -> None:
        """Receive what has come of the values that go on to other workers, and send it there."""
        for at in [
            at for at in self._to_hand_on if self.queues.is_done(at) or self.transport.ready(self._wanted(at)[0])
        ]:
            self._to_hand_on.remove(at)
            if not self.queues.is_done(at):
                self._do(at)

    def _may_overtake(self, head: int, at: int) -> bool:
        first, other = self.program.order[head], self.program.order[at]
        assert isinstance(first, Compute) and isinstance(other, Compute)
        shrinks = first.op == Op.FORWARD and other.op in (Op.BACKWARD, Op.BACKWARD_INPUT)
        return (not shrinks or self.queues.live > self.limits.depth) and self._kinds[at] in self.durations

    def _patience(self, head: int, at: int, free: float) -> float:
        """How many more seconds to wait for the head before this computation overtakes it."""
        duration, now = self.durations[self._kinds[at]], time.monotonic()
        coming = self.begun + self.expected.get(head, 0.0) + self.late
        return 0.0 if coming - now > EXPECTED * duration else free + WAITED * duration - now

    def _note_arrival(self, at: int, now: float, waited: bool) -> None:
        """Remember when the values came. If the worker did not wait, they came at some time before."""
        seen = now - self.begun
        known = self.expected.setdefault(at, seen)
        if waited:
            self.late = seen - known
            self.expected[at] = (seen + known) / 2
        else:
            self.expected[at] = min(seen, known)

    def _note_duration(self, at: int, seconds: float) -> None:
        kind = self._kinds[at]
        self.durations[kind] = (seconds + self.durations.get(kind, seconds)) / 2

    def _missing(self, at: int) -> list[int]:
        """The receives of a computation whose values have not come."""
        ready = self.transport.ready
        return [receive for receive in self.queues.awaited(at) if not ready(self._wanted(receive)[0])]

    def _key(self, receive: int) -> tuple[tuple[int, int], int]:
        """The value number, micro-batch and source of a receive."""
        instruction = self.program.order[receive]
        assert isinstance(instruction, Receive)
        number = self.program.value_numbers[instruction.value]
        return (number, instruction.microbatch), self.program.ranks[instruction.source]

    def _wanted(self, receive: int) -> tuple[ValueKey, int]:
        """The same for the current step, as the transport is asked for it."""
        key, source = self._keys[receive]
        return (self.step, *key), source

    def _taken(self, compute: Compute) -> Iterable[str]:
        return chain.from_iterable(taken(work) for work in self._work(compute))

    def _made(self, compute: Compute) -> Iterable[str]:
        return (name for work in self._work(compute) for name in work.gives if name)

    def _work(self, compute: Compute) -> Iterable[Any]:
        done = produced_by(compute)
        return self.program.work.get(done, ()) if isinstance(done, Pass) else ()
