"""A joint graph, cut into the pieces that a schedule runs: F, and B or its halves I and W.

    F   what is held, what is given         ─▶  outputs, what is kept
    I   held, kept, gradients of outputs    ─▶  gradients of what was given, what is handed on
    W   held, handed on                     ─▶  gradients of parameters
    B   I and W in one

What is kept and what is handed on are the smallest cuts: views and quick operations are computed again behind it. I computes
what a gradient of an input needs, and W the rest. What I computes by the way, as the gradient of a norm's weight, it hands on.

A piece as code calls torch's own functions, `torch.mm` and not `torch.ops.aten.mm.default` (`quick_code`). They run the same
kernels, and take half a microsecond less for each call: there are hundreds in a stage. A step under `torch.no_grad()` has no
use for `detach`, which is left out.
"""

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen

from pippy.ir.base.errors import StageError
from pippy.ir.base.node_notes import FAKE_VALUE, copy_notes
from pippy.ir.halves.joint import Joint, draws_or_seeds, smallest_cut

# Operations that read no values of the tensors that they are given.
_ONLY_SHAPES = {
    getattr(torch.ops.aten, name)
    for name in ("empty_like", "empty", "empty_strided", "new_empty", "new_empty_strided", "rand_like", "randn_like")
}


@dataclass(frozen=True)
class Piece:
    """A graph of its own, and the nodes of the joint graph that its inputs and outputs are.

    The last inputs may be ``sums`` of gradients, to which the piece adds: with each the number of the parameter. The module
    takes one list, and empties it: so a value is freed right after the operation that reads it last.
    """

    module: fx.GraphModule
    inputs: Sequence[fx.Node]
    outputs: Sequence[fx.Node | None]
    sums: Mapping[fx.Node, int] = field(default_factory=dict)


class TakesAList(CodeGen):
    """Code whose function takes its values in one list."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: bool) -> str:
        names = [each.split(":")[0].split("=")[0].strip() for each in free_vars if each != "self"]
        taken = "".join(f"{name}, " for name in names)
        return f"def {self._func_name}(self, values):\n    {f'({taken}) = values; ' if names else ''}values.clear()\n"


@dataclass(frozen=True)
class Pieces:
    """The pieces of a joint graph.

    ``kept_before`` is what F keeps, if that is settled: F has run, and this is for gradients of other outputs or of other
    strides. Nothing is computed again if it ``keeps_all`` that is read behind a cut.
    """

    joint: Joint
    kept_before: Sequence[fx.Node] | None = None
    keeps_all: bool = False

    @cached_property
    def kept(self) -> Sequence[fx.Node]:
        """What F keeps for the backward, besides what is held."""
        if self.kept_before is not None:
            return self.kept_before
        joint = self.joint
        return smallest_cut(
            _nodes(self._gradients),
            {*joint.tangents, *joint.held},
            joint.needed_by,
            lambda node: node in joint.forward,
            self._repeats,
        )

    @cached_property
    def handed(self) -> Sequence[fx.Node]:
        """What is handed on to W: of what was kept, of the gradients of outputs, and of what I computed.

        I may compute a part of the forward again for that, if one result is smaller than what it is made from.
        """
        there, joint, inside = self._given_to_backward, self.joint, self._inside
        again = {node for node in joint.forward if self._repeats(node)}.difference(inside, there)
        return smallest_cut(
            _nodes(joint.held_gradients),
            joint.held,
            joint.needed_by,
            lambda node: node in inside or node in there or node in again,
            lambda node: node not in there and self._repeats(node),
            again,
        )

    @cached_property
    def forward(self) -> Piece:
        """The piece F."""
        joint = self.joint
        outputs, inputs = [*joint.outputs, *self.kept], [*joint.held, *joint.given]
        nodes = self._closure([*outputs, *joint.effects], inputs, ())
        return piece_of(joint.module, inputs, outputs, nodes)

    @cached_property
    def backward(self) -> Piece:
        """The piece B."""
        return self._behind(self._gradients, self._given_to_backward, self.joint.forward)

    @cached_property
    def backward_input(self) -> Piece:
        """The piece I."""
        there = self._given_to_backward
        made = [node for node in self.handed if node not in there]
        return self._behind([*self.joint.given_gradients, *made], there, self.joint.forward)

    @cached_property
    def backward_weight(self) -> Piece:
        """The piece W."""
        return self._behind(self.joint.held_gradients, set(self.handed), self.joint.forward | self._inside)

    def _repeats(self, node: fx.Node) -> bool:
        return not self.keeps_all and self.joint.repeats(node)

    @property
    def _gradients(self) -> Sequence[fx.Node | None]:
        return [*self.joint.given_gradients, *self.joint.held_gradients]

    @property
    def _given_to_backward(self) -> set[fx.Node]:
        return {*self.kept, *self.joint.tangents}

    @cached_property
    def _inside(self) -> set[fx.Node]:
        """What I computes for gradients of inputs."""
        there = {*self._given_to_backward, *self.joint.held}
        return self._closure(self.joint.given_gradients, there, self.joint.forward)

    def _behind(
        self, outputs: Sequence[fx.Node | None], there: Collection[fx.Node], done: Collection[fx.Node]
    ) -> Piece:
        """A piece of the backward that takes what is there and what is held. Nodes that are ``done`` ran in other pieces."""
        joint = self.joint
        nodes = self._closure(outputs, {*there, *joint.held}, done)
        for node in nodes:
            if node.op == "placeholder" or (node in done and not joint.repeats(node)):
                raise StageError(f"{node.name} was computed, is needed again, and was not kept: a fault of the cut")
        read = {each for node in nodes for each in node.all_input_nodes} | set(outputs)
        return piece_of(joint.module, [node for node in (*joint.held, *sorted(there)) if node in read], outputs, nodes)

    def _closure(
        self, wanted: Iterable[fx.Node | None], without: Collection[fx.Node], done: Collection[fx.Node]
    ) -> set[fx.Node]:
        """The nodes that have to run for those that are wanted, if some values are there, and other nodes ran before."""
        need: set[fx.Node] = set()
        stack = _nodes(wanted)
        while stack:
            node = stack.pop()
            if node not in need and node not in without:
                need.add(node)
                stack.extend(node.all_input_nodes)
                stack.extend(each for each in self.joint.before.get(node, ()) if each not in done)
        items = {user for node in need for user in node.users if user.target is operator.getitem}
        return need | items.difference(without)


def without_draws(piece: Piece) -> tuple[fx.GraphModule, Piece] | None:
    """A graph that draws all random numbers of a piece, and the piece that takes them behind its inputs. Both take a list.

    None if what is drawn depends on more than shapes.
    """
    drawing, rest = fx.Graph(), fx.Graph()
    drawn: dict[fx.Node, fx.Node] = {}
    copies: dict[fx.Node, fx.Node] = {}
    nodes = list(piece.module.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    random = [node for node in nodes if draws_or_seeds(node)]
    for node in random:
        args = list(node.args)
        if isinstance(node.args[0], fx.Node):
            like = FAKE_VALUE.of(node.args[0])
            packets = {getattr(each.target, "overloadpacket", None) for each in (node, node.args[0])}
            if packets.isdisjoint(_ONLY_SHAPES) or len(node.all_input_nodes) > 1:
                return None
            options = {"dtype": like.dtype, "device": like.device}
            args[0] = drawing.call_function(torch.ops.aten.empty_strided.default, (like.shape, like.stride()), options)
        elif node.all_input_nodes:
            return None
        made = drawing.call_function(node.target, tuple(args), node.kwargs)
        if FAKE_VALUE.is_at(node):
            drawn[node] = made
    drawing.output(list(drawn.values()))
    for node in (*inputs, *drawn):
        copies[node] = rest.placeholder(node.name)
        copy_notes(copies[node], node)
    for node in nodes:
        if node not in copies and node not in random:
            copies[node] = rest.node_copy(node, copies.__getitem__)
    for graph in (drawing, rest):
        graph.set_codegen(TakesAList())
    taker = Piece(fx.GraphModule(piece.module, rest), [*piece.inputs, *drawn], piece.outputs, piece.sums)
    return fx.GraphModule(piece.module, drawing), taker


def _nodes(some: Iterable[fx.Node | None]) -> list[fx.Node]:
    return [each for each in some if each is not None]


def _join_convolutions(graph: fx.Graph) -> None:
    """Make one operation of the two that are the backward of a convolution, where a piece has both."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default):
        first, (*args, mask) = node.prev, node.args
        if first.target is node.target and list(first.args[:-1]) == args:
            first.args = (*args, [one or other for one, other in zip(first.args[-1], mask)])
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def piece_of(
    module: fx.GraphModule, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node | None], nodes: Collection[fx.Node]
) -> Piece:
    """The piece that computes the outputs by these nodes of one graph, which has its operations' module."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copy_notes(copies[node], node)
    for node in sorted(nodes):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([None if each is None else copies[each] for each in outputs])
    _join_convolutions(graph)
    graph.set_codegen(TakesAList())
    return Piece(fx.GraphModule(module, graph), inputs, outputs)


_ATEN = torch.ops.aten
_FUNCTIONS = {
    getattr(getattr(_ATEN, name), overload): getattr(torch, name)
    for overload, names in {
        "default": "mm bmm addmm t relu tanh sigmoid exp neg rsqrt native_layer_norm embedding squeeze zeros_like clone",
        "Tensor": "add mul sub div",
        "int": "transpose select",
        "dim_IntList": "sum",
    }.items()
    for name in names.split()
}
_METHODS = {getattr(_ATEN, name).default: name for name in ("view", "expand", "permute")} | {_ATEN.add_.Tensor: "add_"}


def quick_code(piece: Piece) -> Callable[[list[torch.Tensor]], Sequence[Any]]:
    """What runs a piece. It takes a list, and empties it."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in piece.module.graph.nodes:
        if node.target is _ATEN.detach.default:
            copies[node] = copies[node.args[0]]
        elif node.target in _METHODS:
            args = fx.node.map_arg(node.args, copies.__getitem__)
            copies[node] = graph.call_method(_METHODS[node.target], args, node.kwargs)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.target in _FUNCTIONS:
                copies[node].target = _FUNCTIONS[node.target]
    graph.set_codegen(TakesAList())
    return fx.GraphModule(piece.module, graph).forward
