"""Backends of torch.compile, called on pieces of stages: `Backend`, and `CalledBackend` for all but inductor."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from pippy.ir.base.errors import StageError
from pippy.ir.base.node_notes import FAKE_VALUE
from pippy.ir.base.readable import shortened
from pippy.ir.halves.pieces import Piece

Code = Callable[[list[torch.Tensor]], Sequence[Any]]  # it takes a list, and empties it
# torch's tracers and compilers change classes and settings of a process while they run
one_at_a_time = threading.RLock()


class NotCompiled(StageError):
    """A piece that is not compiled, and why. It runs as a graph."""

    @classmethod
    def by(cls, error: Exception) -> "NotCompiled":
        """A piece that an error has kept from being compiled."""
        if isinstance(error, cls):
            return error
        return cls(f"{type(error).__name__}: {shortened(str(error).strip().partition(chr(10))[0], 200)}")


class Backend(Protocol):
    """What gives compiled code for pieces. Pieces of one ``key`` are alike."""

    def compile(self, piece: Piece, key: str, wait: bool) -> Code | None:
        """The compiled code of a piece; None if another process compiles such a piece now, and this one is not to wait for it.

        Raises what the compiler raises.
        """


class CalledBackend:
    """A backend by its name, or a function, that torch.compile would call on a graph and its inputs.

    >>> CalledBackend("eager").function.__name__
    'eager'
    """

    def __init__(
        self, backend: str | Callable[..., Any], mode: str | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        from torch._dynamo.backends.registry import lookup_backend  # slow to import

        self.function = lookup_backend(backend)
        given = {"mode": None if mode == "default" else mode, "options": dict(options or {})}
        self.options = {name: value for name, value in given.items() if value}

    def compile(self, piece: Piece, key: str, wait: bool) -> Code:
        """The code that the backend makes of a piece."""
        inputs = [each.zero_() for each in example_inputs(piece)]
        return takes_a_list(self.function(plain_graph(piece), inputs, **self.options))


def plain_graph(piece: Piece) -> fx.GraphModule:
    """A piece as a module that takes its inputs one by one, as those of torch do."""
    graph = fx.GraphModule(piece.module, piece.module.graph)
    graph.graph.set_codegen(fx.graph.CodeGen())
    graph.recompile()
    return graph


def example_inputs(piece: Piece) -> list[torch.Tensor]:
    """Tensors like the inputs of a piece, with any numbers."""
    values = [FAKE_VALUE.of(node) for node in piece.inputs]
    return [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device) for each in values]


def takes_a_list(function: Callable[..., Any]) -> Code:
    """A function of tensors as one that takes them in a list, and empties it."""

    def run(values: list[torch.Tensor]) -> Sequence[Any]:
        given = tuple(values)
        values.clear()
        return list(function(*given))

    return run
