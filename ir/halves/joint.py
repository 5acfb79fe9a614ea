"""A stage's forward and backward as one flat graph of torch's operations: ``joint_graph``.

    held      parameters and buffers  ─┐                   ┌─▶ outputs
    given     the tensors it is given ─┼─▶  joint graph  ──┼─▶ gradients of what was given
    tangents  gradients of outputs    ─┘                   └─▶ gradients of what is held

It is recorded on tensors without data, so for these shapes, strides, dtypes and flags only. Autograd itself makes the second
half, so the operations are those that eager autograd runs, in their order, and in place where they are in place: the same
operation on other strides may round differently. Random numbers are drawn as in the stage: the operations that seed the
generators are nodes, in front of those that draw.

What one part of the graph keeps for another takes the fewest bytes: ``smallest_cut``.

    kept  ──▶ a ──▶ view ──▶ b           a keeps less than view and sum do: keep a, and compute the view and the sum again
              └──▶ sum  ──▶ c

It is a minimum cut. Each value is an edge whose capacity is its bytes. Operations that are cheap may be computed again. Of
several cuts with as few bytes it is the one that computes the least again.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from pippy.ir.base.errors import StageError
from pippy.ir.base.fake_mode import FakeMode, stand_in
from pippy.ir.base.node_notes import FAKE_VALUE, copy_notes
from pippy.ir.base.trees import nbytes
from pippy.ir.run.random_state import draw_key, drawing_with, seed_draws

aten = torch.ops.aten

# Pointwise operations that take no longer than to read their inputs and write their result.
_CHEAP = {
    getattr(aten, name)
    for name in (
        "add sub rsub mul div neg abs relu threshold_backward where masked_fill clone copy _to_copy ge gt le lt eq ne "
        "logical_not logical_and logical_or bitwise_not bitwise_and square reciprocal minimum maximum clamp clamp_min "
        "clamp_max empty_like new_empty_strided full full_like zeros_like "
        "ones_like new_zeros arange scalar_tensor lift_fresh_copy"
    ).split()
}
_SOURCE, _SINK = "source", "sink"
_SCALE = 1 << 20  # more than there are nodes: what is added to the bytes decides between cuts with as many


def is_view(node: fx.Node) -> bool:
    """Whether a node gives the memory of another one, or an item of a tuple."""
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(
        each.alias_info is not None and not each.alias_info.is_write for each in schema.returns
    )


def is_cheap(node: fx.Node) -> bool:
    """Whether a node may be computed again: it is a view, or pointwise and quick, and gives the same bits each time."""
    return node.op == "get_attr" or (
        node.op == "call_function" and (is_view(node) or getattr(node.target, "overloadpacket", None) in _CHEAP)
    )


def value_bytes(node: fx.Node) -> int | None:
    """The bytes of a node's value; None if it is no tensor."""
    value = FAKE_VALUE.get(node)
    return nbytes(value) if isinstance(value, torch.Tensor) else None


def smallest_cut(
    wanted: Iterable[fx.Node],
    free: Collection[fx.Node],
    needed_by: Callable[[fx.Node], Iterable[fx.Node]],
    here: Callable[[fx.Node], bool],
    repeats: Callable[[fx.Node], bool],
    only_for_it: Collection[fx.Node] = (),
) -> list[fx.Node]:
    """The nodes to keep for those that are ``wanted`` behind the cut, in the order of the graph.

    Values that are ``free`` are there anyway. ``needed_by`` gives a node's inputs, and what has to run before it. A node that
    is ``here`` is computed before the cut; it may be computed again behind it if it ``repeats``. All that is not here is
    computed behind the cut. What would be computed before the cut ``only_for_it`` is kept only if that takes fewer bytes.
    """
    import networkx as nx  # slow to import, and only needed here

    network = nx.DiGraph()
    network.add_nodes_from((_SOURCE, _SINK))
    seen: set[fx.Node] = set()
    stack: list[tuple[fx.Node, Any]] = [(node, _SINK) for node in wanted]
    while stack:
        node, taker = stack.pop()
        if node in free:
            continue
        if here(node):
            network.add_edge((node, "out"), taker)  # of infinite capacity, as all without one
        if node in seen:
            continue
        seen.add(node)
        if not here(node):
            stack.extend((each, _SINK) for each in needed_by(node) if each in node.all_input_nodes or not here(each))
            continue
        size = value_bytes(node)
        weight = None if size is None else size * _SCALE + (node in only_for_it)
        network.add_edge((node, "in"), (node, "out"), **({} if weight is None else {"capacity": weight}))
        if repeats(node):
            stack.extend((each, (node, "in")) for each in needed_by(node))
        else:
            network.add_edge(_SOURCE, (node, "in"))
    _, (before, _) = nx.minimum_cut(network, _SOURCE, _SINK)
    insides = [node for node in seen if here(node)]
    return sorted(node for node in insides if (node, "in") in before and (node, "out") not in before)


# They write the running statistics, and their schemas do not say so.
_WRITERS = [getattr(torch.ops.aten, f"{name}_batch_norm").default for name in ("native", "cudnn", "miopen")]
# Under torch.no_grad(), which graphs run in, they give less than their backward needs.
_WITH_GRADIENTS_ONLY = [torch.ops.aten.mkldnn_rnn_layer.default]
Forward = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class NotLowered(StageError):
    """A stage that has no such graph. The text says why: it goes on behind "it"."""


@dataclass(frozen=True)
class Joint:
    """A joint graph, and which of its nodes are what. A tensor without a gradient has None.

    ``forward`` are the nodes of the forward. ``before`` has, for each node that reads or writes memory that is written in
    place, the one that did so before it.
    """

    module: fx.GraphModule
    held: Sequence[fx.Node]
    given: Sequence[fx.Node]
    tangents: Sequence[fx.Node]
    outputs: Sequence[fx.Node]
    given_gradients: Sequence[fx.Node | None]
    held_gradients: Sequence[fx.Node | None]
    forward: frozenset[fx.Node]

    @cached_property
    def before(self) -> dict[fx.Node, set[fx.Node]]:
        written = {memory for node in self.module.graph.nodes for memory in written_by(node)}
        found: dict[fx.Node, set[fx.Node]] = defaultdict(set)
        last: dict[int | None, fx.Node] = {}
        for node in self.module.graph.nodes:
            if node.op == "call_function" and not is_view(node):
                for memory in {storage_of(each) for each in (node, *node.all_input_nodes)} & written:
                    if memory in last:
                        found[node].add(last[memory])
                    last[memory] = node
        return dict(found)

    @cached_property
    def effects(self) -> frozenset[fx.Node]:
        """The nodes of the forward that do something besides giving a value: they draw, or write a buffer."""
        memory = {storage_of(node) for node in self.held}
        drawing = any(draws_or_seeds(node) and node.target is not seed_now for node in self.forward)
        return frozenset(
            node
            for node in self.forward
            if (drawing and draws_or_seeds(node)) or memory & written_by(node) or node.target in _WRITERS
        )

    @cached_property
    def touched(self) -> frozenset[fx.Node]:
        """The nodes that read or write memory that is written in place."""
        return frozenset({*self.before, *(each for some in self.before.values() for each in some)})

    def needed_by(self, node: fx.Node) -> Iterable[fx.Node]:
        """The nodes that have to run before a node."""
        return [*node.all_input_nodes, *self.before.get(node, ())]

    def repeats(self, node: fx.Node) -> bool:
        """Whether a node may be computed again, later: it is cheap, and what it reads is not written meanwhile."""
        return is_cheap(node) and node not in self.touched


class FakeInputs:
    """Tensors without data that stand for others, with the same shapes, strides, dtypes, devices and flags.

    Those that have no data either, as bytes are counted with, are of one ``mode``: then theirs are, too.
    """

    def __init__(self, others: Iterable[torch.Tensor] = ()) -> None:
        modes = [each.fake_mode for each in others if isinstance(each, FakeTensor)]
        self.mode = modes[0] if modes else FakeMode()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that stands for this one."""
        return stand_in(self.mode, tensor).requires_grad_(tensor.requires_grad)


def joint_graph(
    forward: Forward,
    held: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor | None],
) -> Joint:
    """Record ``forward``, which takes what is held and what is given, and its backward. ``tangents`` has a gradient for each
    output, or None."""
    gradients = [each for each in tangents if each is not None]
    counts: list[int] = []

    def step(
        held: Sequence[torch.Tensor], given: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        outputs = list(forward(held, given))
        counts.append(len(outputs))
        _note(_forward_ends)
        seeded = [output for output, tangent in zip(outputs, tangents, strict=True) if tangent is not None]
        leaves = [each for each in (*given, *held) if each.requires_grad]
        found: Sequence[torch.Tensor | None] = [None] * len(leaves)
        if seeded and leaves:
            found = torch.autograd.grad(seeded, leaves, gradients, allow_unused=True)
        inputs = sum(each.requires_grad for each in given)
        return [*outputs, *map(_laid_out, leaves[:inputs], found), *found[inputs:]]

    with drawing_with(_NotedKey()):  # type: ignore[arg-type]
        module = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(held, given, gradients)
    flags = [[each.requires_grad for each in some] for some in (held, given)]
    return _joint(module, flags[0], flags[1], counts[0])


def _laid_out(leaf: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient of an input with the strides that autograd gives to its `.grad`."""
    if gradient is None:
        return None
    strides = torch.empty_like(leaf).stride()
    if all(one == other or size == 1 for one, other, size in zip(gradient.stride(), strides, gradient.shape)):
        return gradient
    return torch.empty_like(leaf).copy_(gradient)


def _note(function: Callable[..., None], *args: Any) -> None:
    """Have the graph that is recorded call a function here."""
    mode = get_proxy_mode()
    assert mode is not None
    mode.tracer.create_node("call_function", function, args, {})


def _forward_ends() -> None:
    """Stands between the nodes of the forward and those of the backward."""


def seed_now(name: str, pythons: bool) -> None:
    """Seed the generators for an operation, with the key of the micro-batch that runs."""
    seed_draws(draw_key(), name, pythons)


class _NotedKey:
    """In place of a key: it notes in the graph what is seeded where."""

    def seed(self, name: str, pythons: bool) -> None:
        _note(seed_now, name, pythons)


def draws_or_seeds(node: fx.Node) -> bool:
    """Whether a node draws random numbers, or seeds what they are drawn from. Attention without dropout does not."""
    if node.target is seed_now:
        return True
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [each.name for each in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args)) | node.kwargs
    return "dropout_p" not in names or bool(given.get("dropout_p", 0.0))


def storage_of(node: fx.Node) -> int | None:
    """What the nodes that share memory have in common; None for one that gives no tensor."""
    value = FAKE_VALUE.get(node)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def written_by(node: fx.Node) -> set[int]:
    """The memory that a node writes in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return set()
    given = dict(zip([each.name for each in schema.arguments], node.args)) | node.kwargs
    written = [given.get(each.name) for each in schema.arguments if each.alias_info and each.alias_info.is_write]
    nodes = [each for some in written for each in (some if isinstance(some, (list, tuple)) else [some])]
    return {memory for each in nodes if isinstance(each, fx.Node) and (memory := storage_of(each)) is not None}


def _part_convolutions(graph: fx.Graph) -> None:
    """Make of each backward of a convolution two operations: one for its input, and one for its weight and bias.

    As one, it would be in I as a whole. The kernels are the same.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default):
        *args, (of_input, of_weight, of_bias) = node.args
        if of_input and (of_weight or of_bias):
            with graph.inserting_after(node):
                other = graph.call_function(node.target, (*args, [False, of_weight, of_bias]), node.kwargs)
            copy_notes(other, node)
            node.args = (*args, [True, False, False])
            for item in list(node.users):
                if item.args[1] > 0:
                    item.args = (other, item.args[1])


def _joint(module: fx.GraphModule, held_flags: Sequence[bool], given_flags: Sequence[bool], outputs: int) -> Joint:
    _part_convolutions(module.graph)
    nodes = list(module.graph.nodes)
    places = [node for node in nodes if node.op == "placeholder"]
    count = len(held_flags)
    held, given, tangents = places[:count], places[count : count + len(given_flags)], places[count + len(given_flags) :]
    at_end = next(at for at, node in enumerate(nodes) if node.target is _forward_ends)
    results = list(nodes[-1].args[0])
    gradients = iter(results[outputs:])
    given_gradients = [next(gradients) if flag else None for flag in given_flags]
    held_gradients = [next(gradients) if flag else None for flag in held_flags]
    joint = Joint(
        module, held, given, tangents, results[:outputs], given_gradients, held_gradients, frozenset(nodes[:at_end])
    )
    _check(joint, {storage_of(node) for node, flag in zip(held, held_flags) if flag})
    return joint


def _check(joint: Joint, parameters: set[int | None]) -> None:
    given = {storage_of(node) for node in (*joint.given, *joint.tangents)}
    buffers = {storage_of(node) for node in joint.held}
    for node in joint.module.graph.nodes:
        written, ahead = written_by(node), node in joint.forward
        if node.target in _WITH_GRADIENTS_ONLY:
            raise NotLowered(f"calls {node.target}, which keeps nothing for a backward where autograd is off")
        if written & parameters:
            raise NotLowered("changes a parameter in place")
        if written & given:
            raise NotLowered("changes in place what it is given")
        if written & buffers and not ahead:
            raise NotLowered("changes a buffer in its backward")
        if draws_or_seeds(node) and not ahead:
            raise NotLowered("draws random numbers in its backward")
