"""The cuts are the best there are: every other way to cut is tried too."""

from functools import partial
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pippy.balance.partition import SLACK, Row, RunWeight, best_cuts, lightest_cuts, lower_bound, most_stages, runs


def loads(units):
    held = st.lists(st.dictionaries(st.sampled_from("ab"), st.just(7), max_size=2), min_size=units, max_size=units)
    weights = st.lists(st.sampled_from([0, 1, 2, 5, 9, 58, 59, 60]), min_size=units, max_size=units)
    return st.builds(RunWeight, weights, st.one_of(st.just(()), held), st.sampled_from([0, 4]))


@st.composite
def rows(draw):
    units, stages = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    numbers = st.lists(st.integers(0, 3), min_size=units, max_size=units)
    costs = [draw(loads(units))] * stages if draw(st.booleans()) else [draw(loads(units)) for _ in range(stages)]
    limited, bounded = draw(st.booleans()), draw(st.booleans())
    return Row(
        stages,
        costs,
        draw(numbers),
        draw(numbers),
        [draw(loads(units)) for _ in range(stages)] if limited else (),
        draw(st.lists(st.integers(0, 200), min_size=stages, max_size=stages)) if limited else (),
        draw(st.lists(st.integers(0, 2), min_size=stages, max_size=stages)) if bounded else (),
        draw(st.lists(st.integers(1, 6), min_size=stages, max_size=stages)) if bounded else (),
        measured := draw(st.booleans()),
        draw(st.sampled_from([0.0, 0.2])) if measured else 0.0,
    )


def allowed(row, cuts):
    for stage, run in enumerate(runs(cuts, row.units)):
        layers = sum(row.layers[slice(*run)])
        if layers < (row.least[stage] if row.least else 1) or (row.most and layers > row.most[stage]):
            return False
        if row.limits and row.memory[stage].of(*run) > row.limits[stage]:
            return False
    return True


def every_cut(row):
    found = (list(cuts) for cuts in combinations(range(1, row.units), row.stages - 1))
    return [cuts for cuts in found if allowed(row, cuts)]


def least_cost(row, cuts):
    """The cost of the lightest stage."""
    return min(load.of(*run) for load, run in zip(row.costs, runs(cuts, row.units)))


def best_of(row, tried):
    """The best of all cuts, by the words of `best_cuts`."""
    least = min(map(row.greatest, tried))
    cheap = [cuts for cuts in tried if row.greatest(cuts) <= least + int(least * max(SLACK, row.uncertain))]
    cheapest = min(map(row.price, cheap))
    same = [cuts for cuts in cheap if row.price(cuts) == cheapest]
    lowest = min(map(row.greatest, same))
    lowest += int(lowest * SLACK) if row.measured else 0
    same = [cuts for cuts in same if row.greatest(cuts) <= lowest]
    floor = max(least_cost(row, cuts) for cuts in same)
    floor -= int(floor * SLACK) if row.measured else 0
    return max((cuts for cuts in same if least_cost(row, cuts) >= floor), key=sum)


@settings(max_examples=100)
@given(rows())
def test_no_other_cut_is_better(row):
    tried, found = every_cut(row), best_cuts(row)
    assert (found is None) == (not tried)
    if found is not None:
        assert allowed(row, found)
        best = best_of(row, tried)
        qualities = row.price, sum, *(() if row.measured else (row.greatest, partial(least_cost, row)))
        assert [quality(found) for quality in qualities] == [quality(best) for quality in qualities]
        if not row.least or min(row.least):  # else a stage may have no layer, as only these tests ask for
            assert lower_bound(row)[0] <= row.greatest(found)


@settings(max_examples=60)
@given(rows())
def test_the_least_memory_is_the_least_that_some_cut_needs(row):
    if not row.memory:
        return
    free = Row(row.stages, row.costs, row.layers, row.prices, row.memory, [10**6] * row.stages, row.least, row.most)
    needs = [max(load.of(*run) for load, run in zip(row.memory, runs(cuts, row.units))) for cuts in every_cut(free)]
    found = lightest_cuts(row, 0.0)
    assert (found is None) == (not needs)
    if found is not None:
        assert max(load.of(*run) for load, run in zip(row.memory, runs(found, row.units))) == min(needs)


@given(st.lists(st.integers(0, 2), max_size=8))
def test_as_many_stages_as_have_layers(layers):
    most, load = most_stages(layers), RunWeight(layers)
    for stages in range(1, len(layers) + 1):
        row = Row(stages, [load] * stages, layers, [0] * len(layers))
        assert (best_cuts(row) is not None) == (stages <= most)


@pytest.mark.parametrize(
    ("weights", "stages", "cuts", "greatest"),
    [
        ([1] * 8, 4, [2, 4, 6], 2),
        ([9, 1, 1, 1, 1, 1], 3, [1, 4], 9),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 3, [5, 7], 17),  # the textbook's example
    ],
)
def test_known_answers(weights, stages, cuts, greatest):
    row = Row(stages, [RunWeight(weights)] * stages, [1] * len(weights), [0] * len(weights))
    assert row.greatest(best_cuts(row)) == greatest == row.greatest(cuts)


def test_the_bound_knows_which_stages_a_unit_can_be_in():
    row = Row(2, [RunWeight([8, 1]), RunWeight([4, 1])], [1, 1], [0, 0])
    assert lower_bound(row) == (8, 0) == (row.greatest(best_cuts(row)), 0)


def test_a_long_row_is_quick():
    weights = [(index * 7919) % 1000 for index in range(3000)]
    row = Row(16, [RunWeight(weights)] * 16, [1] * 3000, [0] * 3000)
    assert row.greatest(best_cuts(row)) < sum(weights) / 16 + 1000
