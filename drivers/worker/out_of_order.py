"""Runs a worker's part of a program, and lets a later computation overtake the next one while the worker would only wait.

The *head* is the next computation of the program. When its values have not come, a later computation whose values are here
may run first, if `ComputationQueues` allows it. The numbers stay the same to the bit, the memory limit holds, and no worker
waits forever; the reasons stand below.

To overtake can also cost time. A computation that has begun must end, even if the head's value comes a moment later, and
other workers wait for the head's results. So the worker asks two questions of a computation that could overtake:

    may it?  a backward overtakes a forward   only if more is alive here than `Overtaking.depth`: a backward makes it less
             any other                        yes, once its duration is known
    when?    a long wait is expected          at once: the wait is expected, from earlier steps, to be longer than EXPECTED
                                              of the computation's duration
             a short one                      after the worker has waited for WAITED of the computation's duration

A value that this worker hands on to another one is received, and handed on, as soon as the worker finds it here.

What a worker may do next when it need not run its instructions in order. Pure data: no tensors, no clock.

The computations of a worker are dealt to queues. Each queue keeps the program's order:

    forwards, of all stages together     F0.0  F0.1  F1.0  R0.0    random numbers are drawn, and buffers change, in this order;
                                                                   what is computed again is among them, so that the limit
                                                                   never holds the head back
    backwards of one stage: B or I       I0.0  I0.1                gradients are added up in this order
    weight halves of one stage: W        W0.0  W0.1                a B and a W of one stage also keep their order, because both
                                                                   add to the same gradients

Only the front of a queue, its first computation that is not done, can be next. What it needs on this worker must be done,
and a forward must not exceed the limit of live stage-micro-batches. The *head* is the first computation of the whole program
that is not done. It is always the front of its queue.

Why no worker waits forever:

1. The limit never holds the head back. Forwards and R keep their order, so if the head is one of them, no later one was done,
   and no more is alive than the program itself has alive at this place. The limit is at least the program's own peak.
2. Everything that the head needs on its own worker comes before it in the program, so it is done.
3. So a worker that waits takes its head as soon as the head's values come. Of all computations that are not done, on all
   workers, take the one that comes first when the program runs in order. It is the head of its worker. Everything that it
   needs is done, and was sent when it was made, and handed on as soon as a worker that hands it on was idle or between two
   computations. So this computation can run: some worker always goes on.
"""

import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch

from pippy.drivers.lowering.flow import taken
from pippy.drivers.plan.language.edges import Pass, produced_by
from pippy.drivers.plan.language.instructions import (
    Compute,
    Instruction,
    MicrobatchValue,
    Op,
    Payload,
    Receive,
    Send,
    SendExchanged,
)
from pippy.drivers.plan.language.program import computations_of, live_changes, peak_live
from pippy.drivers.protocol.programs import OutOfOrderLimits
from pippy.drivers.wire.gpu.copies import DeviceCopies
from pippy.drivers.wire.received_values import ValueKey
from pippy.drivers.wire.transport import Transport
from pippy.drivers.worker.executor import BoundProgram, Executor
from pippy.drivers.worker.measure.calls import BoundCall
from pippy.drivers.worker.step_context import StepContext
from pippy.ir.base.names import LOSS

Takes = Callable[[Compute], Iterable[str]]  # the names of the values that a computation takes
Gives = Callable[[Compute], Iterable[str]]  # and of those that it makes


class ComputationQueues:
    """One worker's instructions, by their number in ``order``, and which of them are done in the current step.

    ``backward`` are the stages that have a backward. ``limit`` is how many stage-micro-batches may be alive; if it is left
    out, it is the program's own peak. ``gathers`` is a stage whose forwards must all be done before its first backward.

    >>> from pippy.drivers.plan.language.instructions import parse_instruction
    >>> order = [parse_instruction(text) for text in ("F0.0", "F0.1", "receive g.0 from 1", "B0.0", "F0.2")]
    >>> needs_g = lambda each: ["g"] if each.op == "B" else []
    >>> queues = ComputationQueues(order, {0}, takes=needs_g, gives=lambda each: [], limit=3)
    >>> queues.done(0), queues.done(1)
    ([], [])
    >>> [(str(order[at]), queues.awaited(at)) for at in queues.open()]  # B0.0 is the head; F0.2 may overtake it
    [('B0.0', [2]), ('F0.2', [])]
    """

    def __init__(
        self,
        order: Sequence[Instruction],
        backward: Iterable[int],
        takes: Takes,
        gives: Gives,
        limit: int | None = None,
        gathers: int | None = None,
    ) -> None:
        self.order, self.backward = order, frozenset(backward)
        computed = computations_of(order)
        self.peak = peak_live(computed, self.backward)
        self.limit = self.peak if limit is None else max(limit, self.peak)
        self.needs: list[list[int]] = [[] for _ in order]  # the instructions that have to be done first
        self.followers: list[list[int]] = [[] for _ in order]  # sends, additions and frees that need this one
        self._queues = list(self._dealt())
        self._find_needs(takes, gives, gathers)
        self._arrivals = [[need for need in needs if order[need].kind.receives_from] for needs in self.needs]
        self._computations = [at for at, each in enumerate(order) if isinstance(each, Compute)]
        changes = iter(live_changes(computed, self.backward))
        self._changes = [next(changes) if isinstance(each, Compute) else 0 for each in order]  # to `live`
        self._built_on = [[need for need in needs if not order[need].kind.receives_from] for needs in self.needs]
        self.begin()

    def begin(self) -> None:
        """Begin a step: nothing is done."""
        self._done = bytearray(len(self.order))
        self._missing = list(map(len, self.needs))
        self._fronts = [0] * len(self._queues)
        self.live = self._before_head = 0
        self.left = sum(map(len, self._queues))

    def open(self) -> list[int]:
        """The computations that can be done now if their values are here, in the program's order: the head first."""
        found: list[int] = []
        for queue, front in zip(self._queues, self._fronts):
            if front < len(queue) and self._permitted(queue[front]):
                insort(found, queue[front])
        return found

    def head(self) -> int:
        """The first computation that is not done."""
        while self._done[self._computations[self._before_head]]:
            self._before_head += 1
        return self._computations[self._before_head]

    def awaited(self, at: int) -> list[int]:
        """The receives that a computation needs and that are not done."""
        return [receive for receive in self._arrivals[at] if not self._done[receive]]

    def is_done(self, at: int) -> bool:
        """Whether an instruction is done."""
        return bool(self._done[at])

    def done(self, at: int) -> list[int]:
        """Note that an instruction is done. Returns the sends, additions and frees that can be done at once."""
        self._done[at] = True
        queue = self._queue_of.get(at)
        if queue is not None:
            self._fronts[queue] += 1
            self.left -= 1
            self.live += self._changes[at]
        ready = []
        for follower in self.followers[at]:
            self._missing[follower] -= 1
            if not self._missing[follower]:
                ready.append(follower)
        return ready

    def rest(self) -> list[int]:
        """The instructions that are not done, in order. After the last computation, no computation needs them."""
        return [at for at, done in enumerate(self._done) if not done]

    def _permitted(self, at: int) -> bool:
        compute = self.order[at]
        assert isinstance(compute, Compute)
        if compute.kind.live > 0 and self.live >= self.limit:
            return False
        return all(self._done[need] for need in self._built_on[at])

    def _dealt(self) -> Iterable[list[int]]:
        """The computations of each queue."""
        queues: dict[tuple[Op, int], list[int]] = {}
        for at, each in enumerate(self.order):
            if isinstance(each, Compute):
                key = {
                    Op.FORWARD: (Op.FORWARD, -1),
                    Op.RECOMPUTE: (Op.FORWARD, -1),
                    Op.BACKWARD_WEIGHT: (Op.BACKWARD_WEIGHT, each.stage),
                }.get(each.op, (Op.BACKWARD, each.stage))
                queues.setdefault(key, []).append(at)
        self._queue_of = {at: number for number, queue in enumerate(queues.values()) for at in queue}
        return queues.values()

    def _find_needs(self, takes: Takes, gives: Gives, gathers: int | None) -> None:
        makers: dict[tuple[str, int], int] = {}  # of values
        users: dict[tuple[str, int], list[int]] = {}
        passes: dict[tuple[Op, int, int], int] = {}
        adding: dict[int, int] = {}  # by stage, the latest computation that adds to its weights' gradients
        for at, each in enumerate(self.order):
            match each:
                case Compute(op, stage, microbatch):
                    self._need(at, self._earlier_halves(each, passes))
                    if op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
                        self._need(at, [adding[stage]] if stage in adding else [])
                        adding[stage] = at
                    if op != Op.BACKWARD_WEIGHT:  # W takes what I kept
                        for key in [(name, microbatch) for name in takes(each)]:
                            users.setdefault(key, []).append(at)
                            self._need(at, [makers[key]] if key in makers else [])
                        makers.update(((name, microbatch), at) for name in gives(each))
                    if op not in (Op.FORWARD, Op.RECOMPUTE) and stage == gathers:
                        self._need(at, [place for (o, s, _), place in passes.items() if (o, s) == (Op.FORWARD, stage)])
                    passes[op, stage, microbatch] = at
                case SendExchanged(Payload.GRADIENTS):
                    self._need(at, list(adding.values()))
                case SendExchanged(Payload.NOTES):
                    self._need(at, [place for (op, *_), place in passes.items() if op == Op.FORWARD])
                case _ if each.kind.exchange:  # these come last
                    pass
                case _:
                    self._move(at, each, makers, users)

    def _move(
        self, at: int, each: Instruction, makers: dict[MicrobatchValue, int], users: dict[MicrobatchValue, list[int]]
    ) -> None:
        """What is not a computation needs the value that it takes, and if it drops the value, whoever uses that."""
        kind = each.kind
        if kind.drops:
            self._need(at, users.get(kind.drops(each), ()))
        if kind.takes:
            self._need(at, [makers[kind.takes(each)]])
            users.setdefault(kind.takes(each), []).append(at)
        if kind.changes:
            self._need(at, [makers[kind.changes(each)]])
            makers[kind.changes(each)] = at
        if kind.gives:
            makers[kind.gives(each)] = at

    def _need(self, at: int, needed: Iterable[int]) -> None:
        for need in needed:
            if need not in self.needs[at] and need != at:
                self.needs[at].append(need)
                if not isinstance(self.order[at], Compute):
                    self.followers[need].append(at)

    @staticmethod
    def _earlier_halves(compute: Compute, passes: dict[tuple[Op, int, int], int]) -> list[int]:
        """The forward before a backward, or that which computes it again, and the half I before W."""
        built_on = {Op.FORWARD: [], Op.RECOMPUTE: [Op.FORWARD], Op.BACKWARD_WEIGHT: [Op.BACKWARD_INPUT]}
        places = [
            passes.get((op, compute.stage, compute.microbatch))
            for op in built_on.get(compute.op, [Op.RECOMPUTE, Op.FORWARD])
        ]
        return [place for place in places if place is not None][:1]


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
