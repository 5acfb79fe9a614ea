"""What a worker may do next when its instructions need not be done in order. Pure data: no tensors, no clock.

The computations of a worker are dealt to lanes, and each lane keeps the program's order:

    lane of the forwards   F0.0  F0.1  F0.2  F0.3      all stages together: random numbers are drawn, and buffers change,
                                                       in the same order
    lane of each stage     I0.0  I0.1  I0.2  I0.3      backwards, whole or the half I: gradients are added in the same order
    lane of each stage     W0.0  W0.1  W0.2  W0.3      the half W; where a stage has whole backwards too, W and B keep their
                                                       order, because both add to the same gradients

Only the first computation of each lane that is not done can be next. It must find what it builds on, and a forward room
below the limit of live stage-micro-batches. The *head* is the first computation of the whole program that is not done; it
is at the front of its lane.

Why nothing locks up. (1) The head is never held back by the limit: forwards keep their order, so when the head is a
forward, none that comes later was done, and no more is alive than the program itself would have alive here; the limit is
never below the program's own peak. (2) All that the head builds on in its own worker comes before it, and is done. (3) So
as long as a worker waits it would take its head the moment that its values arrive. Of all computations that are not done, on
all workers, take the one that comes first where the program runs in order: it is the head of its worker, all that it builds
on is done, and what was to be sent was sent when it was made. So it can be done, and some worker always goes on.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Sequence

from pippy.drivers.schedules.programs.instructions import Compute, Free, Instruction, Op, Receive, Reduce, Send
from pippy.drivers.schedules.programs.program import peak_live

Takes = Callable[[Compute], Iterable[str]]  # the names of the values that a computation takes, and that it makes
Gives = Callable[[Compute], Iterable[str]]


class Lanes:
    """One worker's instructions, numbered as in ``order``, and which of them are done in a step.

    ``backward`` are the stages that have a backward. ``limit`` is how many stage-micro-batches may be alive, the program's own
    peak if left out. ``gathers`` is a stage all of whose forwards come before its first backward, if there is one.

    >>> from pippy.drivers.schedules.programs.instructions import parse_instruction
    >>> order = [parse_instruction(text) for text in ("F0.0", "F0.1", "receive g.0 from 1", "B0.0", "F0.2")]
    >>> lanes = Lanes(order, {0}, takes=lambda each: ["g"] if each.op == "B" else [], gives=lambda each: [], limit=3)
    >>> lanes.done(0), lanes.done(1)
    ([], [])
    >>> [(str(order[at]), lanes.awaited(at)) for at in lanes.open()]  # B0.0 is the head; F0.2 may overtake it
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
        computations = [each for each in order if isinstance(each, Compute)]
        self.peak = peak_live(computations, self.backward)
        self.limit = self.peak if limit is None else max(limit, self.peak)
        self.needs: list[list[int]] = [[] for _ in order]  # what has to be done first
        self.followers: list[list[int]] = [
            [] for _ in order
        ]  # what can be done at once when this was the last it needs
        self._lanes = list(self._dealt())
        self._find_needs(takes, gives, gathers)
        self._arrivals = [[need for need in needs if isinstance(order[need], Receive)] for needs in self.needs]
        self._computations = [at for at, each in enumerate(order) if isinstance(each, Compute)]
        self._changes = [self._change(each) if isinstance(each, Compute) else 0 for each in order]  # of what is alive
        self._built_on = [[need for need in needs if isinstance(order[need], Compute)] for needs in self.needs]
        self.begin()

    def begin(self) -> None:
        """A step begins: nothing is done."""
        self._done = bytearray(len(self.order))
        self._missing = list(map(len, self.needs))
        self._fronts = [0] * len(self._lanes)
        self.live = self._before_head = 0
        self.left = sum(map(len, self._lanes))

    def open(self) -> list[int]:
        """The computations that could be done now if their values are here, in the program's order: the head first."""
        found: list[int] = []
        for lane, front in zip(self._lanes, self._fronts):
            if front < len(lane) and self._permitted(lane[front]):
                insort(found, lane[front])
        return found

    def head(self) -> int:
        """The first computation that is not done."""
        while self._done[self._computations[self._before_head]]:
            self._before_head += 1
        return self._computations[self._before_head]

    def awaited(self, at: int) -> list[int]:
        """The receives that a computation needs and that are not done."""
        return [receive for receive in self._arrivals[at] if not self._done[receive]]

    def done(self, at: int) -> list[int]:
        """A receive, a computation, or what follows from them was done. Gives what can be done at once."""
        self._done[at] = True
        lane = self._lane_of.get(at)
        if lane is not None:
            self._fronts[lane] += 1
            self.left -= 1
            self.live += self._changes[at]
        ready = []
        for follower in self.followers[at]:
            self._missing[follower] -= 1
            if not self._missing[follower]:
                ready.append(follower)
        return ready

    def rest(self) -> list[int]:
        """What is not done although all computations are, in order: what no computation builds on."""
        return [at for at, done in enumerate(self._done) if not done]

    def _change(self, compute: Compute) -> int:
        if compute.op == Op.FORWARD:
            return 1 if compute.stage in self.backward else 0
        return 0 if compute.op == Op.BACKWARD_INPUT else -1

    def _permitted(self, at: int) -> bool:
        compute = self.order[at]
        assert isinstance(compute, Compute)
        if compute.op == Op.FORWARD and self.live >= self.limit:
            return False
        return all(self._done[need] for need in self._built_on[at])

    def _dealt(self) -> Iterable[list[int]]:
        lanes: dict[tuple[Op, int], list[int]] = {}
        for at, each in enumerate(self.order):
            if isinstance(each, Compute):
                key = {
                    Op.FORWARD: (Op.FORWARD, -1),
                    Op.BACKWARD_WEIGHT: (Op.BACKWARD_WEIGHT, each.stage),
                }.get(each.op, (Op.BACKWARD, each.stage))
                lanes.setdefault(key, []).append(at)
        self._lane_of = {at: number for number, lane in enumerate(lanes.values()) for at in lane}
        return lanes.values()

    def _find_needs(self, takes: Takes, gives: Gives, gathers: int | None) -> None:
        makers: dict[tuple[str, int], int] = {}  # of values
        users: dict[tuple[str, int], list[int]] = {}
        passes: dict[tuple[Op, int, int], int] = {}
        adding: dict[int, int] = {}  # by stage, what added to the gradients of its weights last
        for at, each in enumerate(self.order):
            match each:
                case Compute(op, stage, microbatch):
                    self._need(at, self._earlier_halves(each, passes))
                    if op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
                        self._need(at, [adding[stage]] if stage in adding else [])
                        adding[stage] = at
                    if op != Op.BACKWARD_WEIGHT:  # which finds all that it works on in what I has kept
                        for key in [(name, microbatch) for name in takes(each)]:
                            users.setdefault(key, []).append(at)
                            self._need(at, [makers[key]] if key in makers else [])
                        makers.update(((name, microbatch), at) for name in gives(each))
                    if op != Op.FORWARD and stage == gathers:
                        self._need(at, [place for (o, s, _), place in passes.items() if (o, s) == (Op.FORWARD, stage)])
                    passes[op, stage, microbatch] = at
                case Receive(value, microbatch, _):
                    makers[value, microbatch] = at
                case Send(value, microbatch, _):
                    self._need(at, [makers[value, microbatch]])
                    users.setdefault((value, microbatch), []).append(at)
                case Free(value, microbatch):
                    self._need(at, [makers[value, microbatch], *users.get((value, microbatch), ())])
                case Reduce():  # does nothing: the sums are made when the step ends
                    pass

    def _need(self, at: int, needed: Iterable[int]) -> None:
        for need in needed:
            if need not in self.needs[at] and need != at:
                self.needs[at].append(need)
                if not isinstance(self.order[at], Compute):
                    self.followers[need].append(at)

    @staticmethod
    def _earlier_halves(compute: Compute, passes: dict[tuple[Op, int, int], int]) -> list[int]:
        """The forward before a backward, and the half I before W."""
        before = {Op.FORWARD: None, Op.BACKWARD_WEIGHT: Op.BACKWARD_INPUT}.get(compute.op, Op.FORWARD)
        found = passes.get((before, compute.stage, compute.microbatch)) if before else None
        return [] if found is None else [found]
