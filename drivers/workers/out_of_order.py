"""Runs a worker's part of a program, and does something else where it would only wait.

While the values of the next computation have not come, a later one whose values are here may overtake it, as far as `Lanes`
allows: the numbers stay the same to the bit, no more is alive than the limit says, and nothing locks up. lanes.py says why.

To overtake is not always good: what the worker began is to be finished, although the value may come the next moment, and
other workers wait for what would be made of it. So a computation overtakes only

1. if it takes little beside the wait to be expected, going by when the value came in the steps before, or if the worker has
   waited in vain for a good part of what it takes;
2. if it is a forward or the half W; or a backward, which shrinks what is under way, while more is under way than there are
   workers left to pass.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from pippy.drivers.control.messages import AddProgram, Overtaking
from pippy.drivers.lowering.lower import taken
from pippy.drivers.schedules.programs.graph import Pass, produced_by
from pippy.drivers.schedules.programs.instructions import Compute, Op, Receive
from pippy.drivers.transport.interface import Interrupted, Key, Transport
from pippy.drivers.workers.executor import Executor, Handle
from pippy.drivers.workers.lanes import Lanes
from pippy.ir.names import LOSS

EXPECTED = 0.15  # a wait is worth using if it is expected to be longer than this share of what would be done in it,
WAITED = 0.25  # or if it has been longer than this share
_NOTICED = 2e-4  # a value that was there within so many seconds was not waited for


class OutOfOrderExecutor(Executor):
    """One program on one worker, whose computations may overtake one another."""

    def __init__(
        self,
        program: AddProgram,
        modules: Mapping[str, nn.Module],
        constant: Mapping[str, Sequence[str]],
        transport: Transport,
        device: torch.device,
        overtaking: Overtaking,
    ) -> None:
        super().__init__(program, modules, constant, transport, device)
        self.overtaking = overtaking
        backward = [key.stage for key in program.work if key.phase == "B"]
        gathers = [key.stage for key, work in program.work.items() if self.single and LOSS in [w.call for w in work]]
        self.lanes = Lanes(
            program.order, backward, self._taken, self._made, overtaking.limit, gathers[0] if gathers else None
        )
        self._kinds = [f"{each.op}{each.stage}" if isinstance(each, Compute) else "" for each in program.order]
        self._keys = {at: self._key(at) for at, each in enumerate(program.order) if isinstance(each, Receive)}
        self.durations: dict[str, float] = {}  # of each kind of computation, lately
        self.expected: dict[int, float] = {}  # when the values of a computation are there, from the begin of a step

    def _go_through(self, code: Sequence[tuple[Handle, tuple[Any, ...]]], given_up: Callable[[], bool]) -> None:
        lanes = self.lanes
        lanes.begin()
        self.begun, self.late = time.monotonic(), 0.0
        while lanes.left:
            if given_up():
                raise Interrupted
            free = time.monotonic()
            at = self._next(free)
            for receive in lanes.awaited(at):
                self._do(code, receive)
            begin = time.monotonic()
            self._note_arrival(at, begin, waited=begin - free > _NOTICED)
            self._do(code, at)
            self._note_duration(at, time.monotonic() - begin)
        while rest := lanes.rest():
            self._do(code, rest[0])

    def _do(self, code: Sequence[tuple[Handle, tuple[Any, ...]]], at: int) -> None:
        """Do an instruction, and what it was the last to be waited for by: sends and frees."""
        self.at = at
        handle, operands = code[at]
        handle(*operands)
        for follower in self.lanes.done(at):
            self._do(code, follower)

    def _next(self, free: float) -> int:
        """The computation to do now: the head, or one that overtakes it. Waits while there is none."""
        head = self.lanes.head()
        if not self._missing(head):  # as most often: no more is asked
            return head
        others = [at for at in self.lanes.open()[1:] if self._may_overtake(head, at)]
        while others and (missing := self._missing(head)):
            lacking = {at: self._missing(at) for at in others}  # looked at once: more may come at any moment
            ready = next((at for at in others if not lacking[at]), None)
            patience = None if ready is None else self._patience(head, ready, free)
            if ready is not None and patience is not None and patience <= 0:
                return ready
            self.at = missing[0]
            receives = chain(missing, *lacking.values())
            self.transport.wait_any(list(map(self._wanted, receives)), patience)
        return head

    def _may_overtake(self, head: int, at: int) -> bool:
        first, other = self.program.order[head], self.program.order[at]
        assert isinstance(first, Compute) and isinstance(other, Compute)
        shrinks = first.op == Op.FORWARD and other.op in (Op.BACKWARD, Op.BACKWARD_INPUT)
        return (not shrinks or self.lanes.live > self.overtaking.depth) and self._kinds[at] in self.durations

    def _patience(self, head: int, at: int, free: float) -> float:
        """For how many more seconds the head is to be waited for, before this computation overtakes it."""
        duration, now = self.durations[self._kinds[at]], time.monotonic()
        coming = self.begun + self.expected.get(head, 0.0) + self.late
        return 0.0 if coming - now > EXPECTED * duration else free + WAITED * duration - now

    def _note_arrival(self, at: int, now: float, waited: bool) -> None:
        """Remember when the values were there. Without a wait, they came some time before."""
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
        return [receive for receive in self.lanes.awaited(at) if not ready(self._wanted(receive)[0])]

    def _key(self, receive: int) -> tuple[tuple[int, int], int]:
        """The slot, micro-batch and source of a receive."""
        instruction = self.program.order[receive]
        assert isinstance(instruction, Receive)
        slot = self.program.slots[instruction.value]
        return (slot, instruction.microbatch), self.program.ranks[instruction.source]

    def _wanted(self, receive: int) -> tuple[Key, int]:
        """The same, in this step."""
        key, source = self._keys[receive]
        return (self.number, *key), source

    def _taken(self, compute: Compute) -> Iterable[str]:
        return chain.from_iterable(taken(work) for work in self._work(compute))

    def _made(self, compute: Compute) -> Iterable[str]:
        return (name for work in self._work(compute) for name in work.gives if name)

    def _work(self, compute: Compute) -> Iterable[Any]:
        done = produced_by(compute)
        return self.program.work.get(done, ()) if isinstance(done, Pass) else ()
