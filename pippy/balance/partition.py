"""Cuts a row of units into stages: cheap cuts whose heaviest stage is nearly as light as possible. The result is exact.

If there are cuts whose stages all cost at most some ceiling, there are cuts for every higher ceiling. So the lowest ceiling
is found by bisection over whole numbers. One step of it, for a floor and a ceiling of the cost of each stage:

    1 for each stage and each end of it: from where to where it may start      (a window that only moves to the right)
    2 stage by stage: which ends can be reached, and at which price            (stages × units)

Cuts over which less is sent in every step are worth more than a slightly lighter heaviest stage. So the ceiling is raised by
`SLACK`, and the cuts with the lowest price under it are taken. Of several, exact costs choose the lowest ceiling; then, by
another bisection, the heaviest lightest stage; then the latest cuts. Measured costs differ a little each time. With them, all
cuts within `SLACK` count as alike, and the latest are taken. If it is known that measured costs differ by more, the ceiling is
raised by that.
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import ceil

SLACK = 0.03  # of the cost of the heaviest stage, for a lower price
_FINEST = 0.001  # of the mean: costs that were measured are told apart no finer
Window = tuple[int, int]  # the first and the last start that are allowed for an end


@dataclass(frozen=True, eq=False)
class RunWeight:
    """The weight of a run of units: the sum of their weights, where a tensor of several units counts once.

    Every run weighs ``besides`` more.

    >>> load = RunWeight([1, 2, 3], [{"embedding": 10}, {}, {"embedding": 10}])
    >>> load.of(0, 1), load.of(0, 3), load.of(1, 3)
    (11, 16, 15)
    """

    weights: Sequence[int]
    held: Sequence[Mapping[Hashable, int]] = ()
    besides: int = 0

    def of(self, start: int, end: int) -> int:
        """The weight of the units from ``start`` to before ``end``."""
        held: dict[Hashable, int] = {}
        for things in self.held[start:end]:
            held.update(things)
        return sum(self.weights[start:end]) + sum(held.values()) + self.besides

    def least_of(self, unit: int) -> int:
        """The least weight of a stage with this unit."""
        return self.weights[unit] + sum(self.held[unit].values() if self.held else ()) + self.besides

    def once(self) -> int:
        """The weight of tensors of several units, which count once, in a stage of all units."""
        return self.most() - sum(self.weights) - self.besides

    def most(self) -> int:
        """The weight of the heaviest run: that of all units."""
        return self.of(0, len(self.weights))

    def starts(self, ceiling: int) -> list[int]:
        """For each end, the first start from which the run weighs no more than ``ceiling``; the end itself if none."""
        ceiling -= self.besides
        if not self.held:
            before = [0, *accumulate(self.weights)]
            return [bisect_left(before, weight - ceiling, 0, end) for end, weight in enumerate(before)]
        weight, start, counts = 0, 0, dict[Hashable, int]()
        starts = [0]
        for unit, unit_weight in enumerate(self.weights):
            weight += unit_weight
            for thing, amount in self.held[unit].items():
                counts[thing] = counts.get(thing, 0) + 1
                weight += amount if counts[thing] == 1 else 0
            while weight > ceiling and start <= unit:
                weight -= self.weights[start]
                for thing, amount in self.held[start].items():
                    counts[thing] -= 1
                    weight -= 0 if counts[thing] else amount
                start += 1
            starts.append(start)
        return starts

    def last_starts(self, floor: int) -> list[int]:
        """For each end, the last start from which the run weighs ``floor`` or more; -1 where there is none."""
        if floor <= 0:
            return [end - 1 for end in range(len(self.weights) + 1)]
        # A run weighs no more than floor - 1 from its first start on, and more from the one before it.
        return [start - 1 for start in self.starts(floor - 1)]


@dataclass(frozen=True)
class Row:
    """Units in a row, to be cut into ``stages`` runs.

    ``costs`` and ``memory`` hold a RunWeight for each stage (they may differ), ``limits`` the most memory of each stage.
    ``prices[i]`` is the price of a cut before unit i. ``layers`` says how many layers each unit has; a stage has at least
    ``least`` and at most ``most`` of them. ``measured`` costs are not quite the same each time; they may be wrong by
    ``uncertain`` of themselves.
    """

    stages: int
    costs: Sequence[RunWeight]
    layers: Sequence[int]
    prices: Sequence[int]
    memory: Sequence[RunWeight] = ()
    limits: Sequence[int] = ()
    least: Sequence[int] = ()
    most: Sequence[int] = ()
    measured: bool = False
    uncertain: float = 0.0

    @property
    def units(self) -> int:
        return len(self.layers)

    def greatest(self, cuts: Sequence[int]) -> int:
        """The cost of the heaviest stage."""
        return max(load.of(*run) for load, run in zip(self.costs, runs(cuts, self.units)))

    def price(self, cuts: Sequence[int]) -> int:
        """The price of all cuts together."""
        return sum(self.prices[cut] for cut in cuts)


def runs(cuts: Sequence[int], units: int) -> list[tuple[int, int]]:
    """The stages that cuts make, as (first unit, unit after the last).

    >>> runs([2, 3], 5)
    [(0, 2), (2, 3), (3, 5)]
    """
    edges = [0, *cuts, units]
    return list(pairwise(edges))


def best_cuts(row: Row, slack: float = SLACK) -> list[int] | None:
    """The best cuts: those with the lowest price of all whose heaviest stage is within the slack of the lightest possible.

    Of cuts with one price, those whose heaviest stage is lightest, then those whose lightest stage is heaviest, then the
    latest. None if no cut is allowed.

    >>> load = RunWeight([3, 1, 1, 1, 2])
    >>> best_cuts(Row(2, [load] * 2, layers=[1] * 5, prices=[0] * 5))
    [2]
    >>> best_cuts(Row(2, [load] * 2, layers=[1, 0, 0, 0, 0], prices=[0] * 5)) is None
    True
    >>> load = RunWeight([50, 49, 51, 50])
    >>> best_cuts(Row(2, [load] * 2, layers=[1] * 4, prices=[0, 7, 8, 2])), best_cuts(Row(2, [load] * 2, [1] * 4, [0, 2, 8, 2]))
    ([2], [2])
    """
    search = _Search(row)
    most = max(load.most() for load in row.costs)
    if not search.feasible(most):
        return None
    step = max(1, int(_FINEST * most / row.stages)) if row.measured else 1
    least = _least(search.feasible, _no_less(row), most, step)
    ceiling = min(most, least + int(least * max(slack, row.uncertain)))
    price = search.lowest_price(ceiling)
    if not row.measured or row.uncertain > SLACK:
        lowest = _least(lambda each: search.lowest_price(each) == price, least, ceiling, step)
        ceiling = min(ceiling, lowest + int(lowest * SLACK)) if row.measured else lowest
    return _evenest(search, ceiling, price, step)


def _no_less(row: Row) -> int:
    """A cost that some stage has, however the row is cut."""
    weights = [min(each) for each in zip(*(load.weights for load in _different(row.costs)))]
    return max(ceil(sum(weights) / row.stages), *weights)


def _least(holds: Callable[[int], bool], low: int, high: int, step: int = 1) -> int:
    """The least number from ``low`` to ``high``, by steps, for which something holds; it holds for ``high``, and above the
    least."""
    return min(high, low + step * bisect_left(range(low, high, step), True, key=holds))


def _evenest(search: "_Search", ceiling: int, price: int | None, step: int) -> list[int]:
    """The cuts with this price under a ceiling whose lightest stage is heaviest; nearly so for measured costs."""

    def too_high(floor: int) -> bool:
        cuts = search.cheapest(ceiling, floor)
        return cuts is None or search.row.price(cuts) != price

    floor = max(0, _least(too_high, 0, ceiling + 1, step) - step)
    found = search.cheapest(ceiling, floor - int(floor * SLACK) if search.row.measured else floor)
    assert found is not None
    return found


def lightest_cuts(row: Row, slack: float) -> list[int] | None:
    """The best cuts if the memory of stages is the cost, whatever the limits; None if no cut is allowed."""
    return best_cuts(replace(row, costs=row.memory, limits=[], measured=False, uncertain=0.0), slack)


def most_stages(layers: Sequence[int]) -> int:
    """The largest number of stages such that each has a layer.

    >>> most_stages([0, 2, 0, 1])
    2
    """
    return sum(1 for count in layers if count)


def lower_bound(row: Row) -> tuple[int, int | None]:
    """The lowest cost that the heaviest stage can have: the mean, or the cost of one unit, with the number of this unit."""
    loads, units = _different(row.costs), range(row.units)
    weights = sum(min(load.weights[unit] for load in loads) for unit in units)
    mean = ceil((weights + min(load.once() for load in loads)) / row.stages)
    alone = [min(row.costs[stage].least_of(unit) for stage in _possible_stages(row, unit)) for unit in units]
    heaviest = max(units, key=alone.__getitem__)
    return (alone[heaviest], heaviest) if alone[heaviest] > mean else (mean, None)


def _possible_stages(row: Row, unit: int) -> range:
    """The stages that a unit can be in, if each has a layer."""
    before, after = sum(row.layers[:unit]), sum(row.layers[unit + 1 :])
    return range(max(0, row.stages - 1 - after), min(row.stages - 1, before) + 1) or range(row.stages)


def _different(loads: Sequence[RunWeight]) -> list[RunWeight]:
    return list(dict.fromkeys(loads))


class _Search:
    """Finds cuts of one row under a ceiling."""

    def __init__(self, row: Row) -> None:
        self.row = row
        stages = range(row.stages)
        self.fixed = [self._fixed_starts(stage) for stage in stages]
        least = row.least or [1] * row.stages
        ends = {count: RunWeight(row.layers).last_starts(count) for count in set(least)}
        self.last = [ends[least[stage]] for stage in stages]

    def _fixed_starts(self, stage: int) -> list[int]:
        """For each end, the first start that the limits allow; the ceiling does not count here."""
        bounds = [[0] * (self.row.units + 1)]
        if self.row.limits:
            bounds.append(self.row.memory[stage].starts(self.row.limits[stage]))
        if self.row.most:
            bounds.append(RunWeight(self.row.layers).starts(self.row.most[stage]))
        return [max(each) for each in zip(*bounds)]

    def _windows(self, ceiling: int, floor: int = 0) -> Iterator[list[Window]]:
        """Stage by stage, where it may start for each end."""
        windows = {load: (load.starts(ceiling), load.last_starts(floor)) for load in _different(self.row.costs)}
        for load, fixed, last in zip(self.row.costs, self.fixed, self.last):
            firsts, lasts = windows[load]
            yield list(zip(map(max, firsts, fixed), map(min, lasts, last)))

    def feasible(self, ceiling: int) -> bool:
        """Whether there is a cut whose stages all cost at most ``ceiling``."""
        reached = [True, *[False] * self.row.units]
        for windows in self._windows(ceiling):
            before = [0, *accumulate(reached)]
            reached = [first <= last and before[last + 1] > before[first] for first, last in windows]
        return reached[-1]

    def lowest_price(self, ceiling: int) -> int | None:
        """The price of the cheapest cuts under a ceiling; None if there are none."""
        cuts = self.cheapest(ceiling)
        return None if cuts is None else self.row.price(cuts)

    def cheapest(self, ceiling: int, floor: int = 0) -> list[int] | None:
        """The cheapest cuts whose stages all cost from ``floor`` to ``ceiling``; of several the latest."""
        units, stages = self.row.units, self.row.stages
        scale = units * stages + 1  # how late the cuts are counts less than any difference of prices
        prices = [price * scale + units - unit for unit, price in enumerate(self.row.prices)]
        value: list[int | None] = [0, *[None] * units]
        chosen = []
        for stage, windows in enumerate(self._windows(ceiling, floor)):
            if stage:
                value = [None if cost is None else cost + price for cost, price in zip(value, [*prices, 0])]
            value, places = _window_minima(value, windows)
            chosen.append(places)
        if value[-1] is None:
            return None
        cuts = [units]
        for places in reversed(chosen):
            cuts.append(places[cuts[-1]])
        return cuts[-2:0:-1]


def _window_minima(value: Sequence[int | None], windows: Sequence[Window]) -> tuple[list[int | None], list[int]]:
    """The least value in each window and where it is. Windows move to the right only."""
    queue: list[int] = []  # starts with rising values; those before ``head`` have left the window
    head, entered = 0, -1
    minima: list[int | None] = []
    places = []
    for first, last in windows:
        while entered < last:
            entered += 1
            new = value[entered]
            if new is not None:
                while len(queue) > head and value[queue[-1]] >= new:  # type: ignore[operator]
                    queue.pop()
                queue.append(entered)
        while head < len(queue) and queue[head] < first:
            head += 1
        minima.append(value[queue[head]] if head < len(queue) else None)
        places.append(queue[head] if head < len(queue) else -1)
    return minima, places
