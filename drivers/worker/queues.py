"""What a worker may do next when it need not run its instructions in order. Pure data: no tensors, no clock.

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

from bisect import insort
from collections.abc import Callable, Iterable, Sequence

from pippy.drivers.plan.language.instructions import (
    Compute,
    Instruction,
    MicrobatchValue,
    Op,
    SendGradients,
    SendNotes,
)
from pippy.drivers.plan.language.program import computations_of, live_changes, peak_live

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
                case SendGradients():
                    self._need(at, list(adding.values()))
                case SendNotes():
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
