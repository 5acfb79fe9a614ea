"""What is kept for a later part of a graph takes the fewest bytes: compared with all sets of values that would do."""

from itertools import combinations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from pippy.ir.halves.joint import is_cheap, smallest_cut, value_bytes

aten = torch.ops.aten


@st.composite
def graphs(draw):
    """A graph of a few nodes, some of which are cheap, and how many of them are before the cut."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for _ in range(draw(st.integers(2, 7))):
        operands = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=2))
        target = draw(st.sampled_from([aten.neg.default, aten.mm.default, aten.gelu.default]))
        nodes.append(graph.call_function(target, tuple(operands)))
    for node in nodes:
        node.meta["val"] = torch.empty(draw(st.integers(1, 9)), device="meta")
    before = draw(st.integers(1, len(nodes) - 1))
    return nodes, set(nodes[:before])


def inputs(node):
    return node.all_input_nodes


def missing(wanted, kept, before):
    """Whether something would have to be computed behind the cut that is not cheap."""
    stack, seen = [node for node in wanted if node not in kept], set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in before and not is_cheap(node):
            return True
        stack.extend(each for each in node.all_input_nodes if each not in kept)
    return False


@given(graphs())
def test_no_other_set_of_values_is_smaller(drawn):
    nodes, before = drawn
    wanted = nodes[-2:]
    kept = smallest_cut(wanted, (), inputs, lambda node: node in before, is_cheap)
    assert kept == sorted(kept) and set(kept) <= before and not missing(wanted, kept, before)
    sizes = [
        sum(map(value_bytes, each))
        for count in range(len(before) + 1)
        for each in combinations(sorted(before), count)
        if not missing(wanted, each, before)
    ]
    assert sum(map(value_bytes, kept)) == min(sizes)


def test_of_cuts_with_as_few_bytes_the_one_that_computes_the_least_again():
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(aten.gelu.default, (x,))
    again = graph.call_function(aten.neg.default, (first,))
    behind = graph.call_function(aten.mm.default, (again, again))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(3, 3, device="meta")
    assert smallest_cut([behind], (), inputs, lambda node: node is not behind, is_cheap) == [again]
    again.meta["val"] = torch.empty(3, 3, dtype=torch.float64, device="meta")
    assert smallest_cut([behind], (), inputs, lambda node: node is not behind, is_cheap) == [first]
    assert smallest_cut([behind], (x,), inputs, lambda node: node is not behind, lambda node: True) == []
