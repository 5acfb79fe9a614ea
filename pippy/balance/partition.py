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

The bytes that a stage keeps depend on where it begins and ends, and a larger stage may keep less. Then the allowed starts are
no window, but any set. Both steps look at all starts that can be reached and that leave no more than the later stages may hold
(at most stages × units × units).
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil

import numpy as np

from pippy.balance.run_table import Rectangle, RunTable, Table, first_uses, table_of

SLACK = 0.03  # of the cost of the heaviest stage, for a lower price
_FINEST = 0.001  # of the mean: costs that were measured are told apart no finer
Window = tuple[int, int]  # the first and the last start that are allowed for an end
Mask = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


@dataclass(frozen=True, eq=False)
class RunWeight:
    """The weight of a run of units: the sum of their weights, where a tensor of several units counts once.

    A part that ``varies`` with where the run begins and ends, as the bytes that it keeps, counts ``times``. Every run weighs
    ``besides`` more.

    >>> load = RunWeight([1, 2, 3], [{"embedding": 10}, {}, {"embedding": 10}])
    >>> load.of(0, 1), load.of(0, 3), load.of(1, 3)
    (11, 16, 15)
    """

    weights: Sequence[int]
    held: Sequence[Mapping[Hashable, int]] = ()
    varies: RunTable | None = None
    times: int = 1
    besides: int = 0

    def of(self, start: int, end: int) -> int:
        """The weight of the units from ``start`` to before ``end``."""
        held: dict[Hashable, int] = {}
        for things in self.held[start:end]:
            held.update(things)
        more = 0 if self.varies is None else self.varies.of(start, end) * self.times
        return sum(self.weights[start:end]) + sum(held.values()) + more + self.besides

    def least_of(self, unit: int) -> int:
        """The least weight of a stage with this unit."""
        return self.weights[unit] + sum(self.held[unit].values() if self.held else ()) + self.besides

    def once(self) -> int:
        """The weight of tensors of several units, which count once, in a stage of all units."""
        return replace(self, varies=None).of(0, len(self.weights)) - sum(self.weights)

    def most(self) -> int:
        """The weight of the heaviest run."""
        if self.varies is None:
            return self.of(0, len(self.weights))
        return int(self.table.max())

    @cached_property
    def table(self) -> Table:
        """The weight of every run, by its start and its end."""
        count = len(self.weights)
        before = np.array([0, *accumulate(self.weights)], dtype=np.int64)
        table = before[None, :] - before[:, None] + table_of(count, self._held_rectangles()) + self.besides
        return table if self.varies is None else table + self.varies.table * self.times

    def _held_rectangles(self) -> list[Rectangle]:
        holders = dict[Hashable, tuple[int, list[int]]]()
        for unit, things in enumerate(self.held):
            for thing, amount in things.items():
                holders.setdefault(thing, (amount, []))[1].append(unit)
        return [each for amount, units in holders.values() for each in first_uses(units, amount)]

    def starts(self, ceiling: int) -> list[int]:
        """For each end, the first start from which the run weighs no more than ``ceiling``; the end itself if none.

        Only where a larger run never weighs less: nothing varies.
        """
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

    def least_cost(self, cuts: Sequence[int]) -> int:
        """The cost of the lightest stage."""
        return min(load.of(*run) for load, run in zip(self.costs, runs(cuts, self.units)))

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


def lightest_cuts(row: Row) -> list[int] | None:
    """The cuts whose heaviest stage has the least memory, whatever the limits; None if no cut is allowed."""
    return best_cuts(replace(row, costs=row.memory, limits=[], measured=False), slack=0.0)


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
        lightest = [min(each) for each in zip(*(load.weights for load in _different(row.costs)))]
        self.before = np.array([0, *accumulate(lightest)], dtype=np.int64)  # what the units before each weigh at least
        least = row.least or [1] * row.stages
        ends = {count: RunWeight(row.layers).last_starts(count) for count in set(least)}
        self.last = [ends[least[stage]] for stage in stages]

    def _fixed_starts(self, stage: int) -> list[int]:
        """For each end, the first start that the limits allow; the ceiling does not count here."""
        bounds = [[0] * (self.row.units + 1)]
        if self.row.limits and self.row.memory[stage].varies is None:
            bounds.append(self.row.memory[stage].starts(self.row.limits[stage]))
        if self.row.most:
            bounds.append(RunWeight(self.row.layers).starts(self.row.most[stage]))
        return [max(each) for each in zip(*bounds)]

    def _starts(self, ceiling: int, floor: int = 0) -> Iterator["_Starts"]:
        """Stage by stage, where it may start."""
        loads = _different(self.row.costs)
        windows = {
            load: (load.starts(ceiling), load.last_starts(floor)) if load.varies is None else None for load in loads
        }
        for stage, (load, fixed, last) in enumerate(zip(self.row.costs, self.fixed, self.last)):
            window, tables = windows[load], [] if load.varies is None else [(load.table, floor, ceiling)]
            if self.row.limits and self.row.memory[stage].varies is not None:
                tables.append((self.row.memory[stage].table, 0, self.row.limits[stage]))
            firsts, lasts = (fixed, last) if window is None else (map(max, window[0], fixed), map(min, window[1], last))
            # an end that leaves more than the stages behind it may hold is none
            first_end = int(np.searchsorted(self.before, self.before[-1] - (self.row.stages - 1 - stage) * ceiling))
            yield _Starts(list(zip(firsts, lasts)), tables, first_end)

    def feasible(self, ceiling: int) -> bool:
        """Whether there is a cut whose stages all cost at most ``ceiling``."""
        reached = [True, *[False] * self.row.units]
        for starts in self._starts(ceiling):
            reached = starts.reached(reached)
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
        for stage, starts in enumerate(self._starts(ceiling, floor)):
            if stage:
                value = [None if cost is None else cost + price for cost, price in zip(value, [*prices, 0])]
            value, places = starts.minima(value)
            chosen.append(places)
        if value[-1] is None:
            return None
        cuts = [units]
        for places in reversed(chosen):
            cuts.append(places[cuts[-1]])
        return cuts[-2:0:-1]


class _Starts:
    """The allowed starts of one stage, for each end: in a window, and with weights within the limits of all ``tables``.

    Each table comes with the least and the most weight of a run. If there are tables, ends before ``first_end`` do not count.
    """

    def __init__(self, windows: list[Window], tables: Sequence[tuple[Table, int, int]], first_end: int) -> None:
        self.windows, self.tables, self.first_end = windows, tables, first_end

    def _allowed(self, starts: slice) -> tuple[int, Mask]:
        """Which of these starts are allowed, by start and end; the ends begin with the first that counts."""
        first_end = max(starts.start + 1, self.first_end)
        first, last = np.array(self.windows[first_end:]).reshape(-1, 2).T
        numbers = np.arange(starts.start, starts.stop)[:, None]
        allowed = (numbers >= first) & (numbers <= last)
        for table, least, most in self.tables:
            weights = table[starts, first_end:]
            allowed &= weights <= most
            if least > 0:
                allowed &= weights >= least
        return first_end, allowed

    def reached(self, starts: Sequence[bool]) -> list[bool]:
        """The ends that are reached from these starts."""
        if self.tables:
            there = _from_first_to_last(starts)
            first_end, allowed = self._allowed(there)
            ends: list[bool] = (allowed & np.array(starts[there], dtype=bool)[:, None]).any(0).tolist()
            return [*[False] * first_end, *ends]
        before = [0, *accumulate(starts)]
        return [first <= last and before[last + 1] > before[first] for first, last in self.windows]

    def minima(self, value: Sequence[int | None]) -> tuple[list[int | None], list[int]]:
        """For each end, the least value of a start, and which start that is: of several the latest."""
        if not self.tables:
            return _window_minima(value, self.windows)
        none, there = len(value), _from_first_to_last([each is not None for each in value])
        first_end, allowed = self._allowed(there)
        order = sorted({each for each in value if each is not None})
        rank = {each: number for number, each in enumerate(order)}
        keys = np.array([
            none * none if each is None else rank[each] * none + none - 1 - start
            for start, each in enumerate(value[there], there.start)
        ])  # fmt: skip
        least = np.where(allowed, keys[:, None], none * none).min(0, initial=none * none).tolist()
        places = [-1] * first_end + [-1 if each == none * none else none - 1 - each % none for each in least]
        return [None if place < 0 else value[place] for place in places], places


def _from_first_to_last(holds: Sequence[bool]) -> slice:
    """From the first that holds to the last; empty if none does."""
    if True not in holds:
        return slice(0, 0)
    return slice(holds.index(True), len(holds) - holds[::-1].index(True))


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
