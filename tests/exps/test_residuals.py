"""What the experiment on residuals by attention counts is what its formulas say."""

import pytest

from exps import residuals


@pytest.mark.parametrize(("workers", "blocks", "without"), [(2, 3, 9), (3, 2, 12)])
def test_recorded_transfers_are_those_of_the_formula(workers, blocks, without):
    expected = residuals.formulas(workers, blocks)["P(P-1)/2 + (V-1)P(P-1)"]
    steps = residuals.recorded(workers, blocks, chunks=2, width=4, rows=3)
    found = {name: residuals.by_link(step) for name, step in steps.items()}
    totals = {name: [sum(links[key].values()) / 2 for key in "FB"] for name, links in found.items()}
    assert totals == {"sums": [expected, expected], "no sums": [expected, without]}
    assert found["sums"]["F bytes"].total() == found["sums"]["B bytes"].total() > 0


def test_recorded_transfers_between_hosts_are_those_of_the_formulas():
    steps = residuals.recorded(4, 2, chunks=2, width=4, rows=3, make=residuals.programs_on_hosts)
    found = {name: residuals.by_hosts(step) for name, step in steps.items()}
    totals = {name: [sum(links[key].values()) / 2 for key in "FB"] for name, links in found.items()}
    once, each = residuals.formulas_between(4, 2, hosts=2).values()
    assert totals == {"handed on": [once, each], "by makers": [each, each]} and (once, each) == (6, 12)
    size = 3 * 4 * 4  # the bytes of a value
    assert [found[name]["F bytes"] for name in totals] == [
        {(0, 1): 4 * 2 * size, (1, 0): 2 * 2 * size},
        {(0, 1): 8 * 2 * size, (1, 0): 4 * 2 * size},
    ]
    assert found["handed on"]["B bytes"] == found["by makers"]["B bytes"]
