"""A piece as Python code that calls torch's own functions: `torch.mm`, not `torch.ops.aten.mm.default`.

They run the same kernels, and take half a microsecond less for each call: there are hundreds in a stage. A step under
`torch.no_grad()` has no use for `detach`, which is left out.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from pippy.ir.halves.pieces import Piece, TakesAList

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
