"""The ways of gradients inside of forward: what lies between the inputs and the outputs of `torch.autograd.grad`.

    x = x.requires_grad_()                     x
    hidden = self.first(x)                     └─▶ hidden ─▶ energy      the way: the operations that make these two
    energy = self.second(hidden).sum()                         │
    torch.autograd.grad(energy, x)                        autograd.grad

A change in place, as `requires_grad_` is one, is on the ways of all that uses the changed tensor later. No way leads through
what carries no gradient: a `detach`, `torch.no_grad()`, a size, a comparison. A part that is called as a whole may
differentiate any value that it is given by any other, if its code names `torch.autograd.grad`.
"""

from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import fx

from pippy.ir.base.node_notes import GRADIENTS_OFF, NO_GRADIENT
from pippy.ir.base.operations import name_of
from pippy.ir.cut.effects import find_mutations
from pippy.ir.cut.uses import operations, uses_of_tensors
from pippy.ir.record.compiled import Traced
from pippy.ir.record.reached import names_of, reached_by

Nodes = list[fx.Node]
_NO_GRADIENT = frozenset(
    """detach data size shape dim ndim numel len dtype device item tolist argmax argmin argsort nonzero eq ne lt le gt ge isnan
    isinf isfinite zeros_like ones_like empty_like full_like rand_like randn_like""".split()
)


def inner_gradients(traced: Traced) -> Iterator[tuple[fx.Node, list[int]]]:
    """The calls that compute gradients, with the numbers of the operations on the way, the call among them."""
    ways = None
    for call in operations(traced):
        outputs, inputs = _ends(traced, call)
        if inputs:
            ways = ways or _Ways(traced)
            yield call, ways.between(inputs, outputs, call)


def _ends(traced: Traced, call: fx.Node) -> tuple[Nodes, Nodes]:
    """The outputs and the inputs of a call that computes gradients; none of any other call."""
    if call.target is getattr and call.args[1] == "grad":  # written by .backward()
        return list(traced.graph.find_nodes(op="call_method", target="backward")), call.all_input_nodes
    if call.target is torch.autograd.grad:
        named = {**dict(zip(("outputs", "inputs"), call.args)), **call.kwargs}
        return _nodes_in(named["outputs"]), _nodes_in(named["inputs"])
    given = [node for node in call.all_input_nodes if node.op != "get_attr"]
    code = traced.attributes[str(call.target)] if call.op == "call_module" else call.target
    return (given, given) if len(given) > 1 and names_gradients(code) else ([], [])


class _Ways:
    def __init__(self, traced: Traced) -> None:
        self.traced, self.uses, self.operations = traced, uses_of_tensors(traced), operations(traced)
        self.place = {node: place for place, node in enumerate(traced.graph.nodes)}
        mutations, self.roots = find_mutations(traced.graph, traced.attributes)
        changes = [(each.root, each.node) for each in mutations]
        changing = {change for _, change in changes}  # whose result says nothing of what they write
        self.ends = {node for node in self.place if node not in changing and _has_no_gradient(node)}
        self.flagged = {node: node.all_input_nodes[0] for node in self.place if node.target == "requires_grad_"}
        self.changes = [*changes, *((root, flag) for flag, value in self.flagged.items() for root in self.roots[value])]

    def between(self, inputs: Nodes, outputs: Nodes, call: fx.Node) -> list[int]:
        held = [self.traced.attributes[str(node.target)] for node in inputs if node.op == "get_attr"]
        reached = {self.operations[number] for tensor in held for number in self.uses[id(tensor)].all}
        before = [node for node in self.place if self.place[node] < self.place[call]]
        for node in before:
            if node not in self.ends and not reached.union(inputs).isdisjoint(self._before(node)):
                reached.add(node)
        way, needed = {call}, set(outputs)
        for node in reversed(before):
            if node in needed & reached:
                way.add(node)
                needed.update(self._before(node))
        # The way may lead through the flagged tensor under its other name, which has the flag in the stage that sets it.
        way |= {node for node in inputs if node in self.flagged and not way.isdisjoint(self.flagged[node].users)}
        return [number for number, node in enumerate(self.operations) if node in way]

    def _before(self, node: fx.Node) -> Nodes:
        """What a node uses, and what has changed that in place before."""
        roots = {root for value in node.all_input_nodes for root in self.roots[value]}
        changes = [change for root, change in self.changes if root in roots and self.place[change] < self.place[node]]
        return [*node.all_input_nodes, *changes]


def names_gradients(part: Any) -> bool:
    """Whether the code of a module or a function, or code that this reaches, names `torch.autograd.grad`.

    >>> names_gradients(lambda x: torch.autograd.grad(x.sum(), x)), names_gradients(torch.nn.ReLU())
    (True, False)
    """
    functions = [each.value for each in reached_by(part, "part", kind=FunctionType)]
    return any(each is torch.autograd.grad or {"autograd", "grad"} <= names_of(each) for each in functions)


def _has_no_gradient(node: fx.Node) -> bool:
    name = node.args[1] if node.target is getattr else name_of(node.target)
    return GRADIENTS_OFF.of(node) or NO_GRADIENT.of(node) or (node.op != "call_module" and name in _NO_GRADIENT)


def _nodes_in(value: Any) -> Nodes:
    found: Nodes = []
    fx.node.map_arg(value, found.append)
    return found
