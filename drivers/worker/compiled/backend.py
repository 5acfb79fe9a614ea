"""Backends of torch.compile, called on pieces of stages: `Backend`, and `CalledBackend` for all but inductor."""

import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, Protocol

import torch
from torch import fx

from pippy.drivers.wire.pickling import pickle_to_bytes
from pippy.ir.base.errors import StageError
from pippy.ir.base.node_notes import FAKE_VALUE
from pippy.ir.base.readable import shortened
from pippy.ir.halves.pieces import Piece
from pippy.ir.run.graph_module import PipeGraphModule

Code = Callable[[list[torch.Tensor]], Sequence[Any]]  # it takes a list, and empties it
one_at_a_time = (
    threading.RLock()
)  # torch's tracers and compilers change classes and settings of a process while they run


class NotCompiled(StageError):
    """A piece that is not compiled, and why. It runs as a graph."""

    @classmethod
    def by(cls, error: Exception) -> "NotCompiled":
        """A piece that an error has kept from being compiled."""
        if isinstance(error, cls):
            return error
        return cls(f"{type(error).__name__}: {shortened(str(error).strip().partition(chr(10))[0], 200)}")


class Compiler(Protocol):
    """What gives compiled code for pieces. Pieces of one ``key`` are alike."""

    def compile(self, piece: Piece, key: str, wait: bool) -> Code | None:
        """The compiled code of a piece; None if another process compiles such a piece now, and this one is not to wait for it.

        Raises what the compiler raises.
        """


class Backend(Compiler, Protocol):
    """A compiler whose code another process may take."""

    def compile_to_send(self, piece: Piece, key: str, wait: bool) -> Any | None:
        """Like `compile`, but gives what another process takes the code from."""

    def code_of(self, sent: Any) -> Code:
        """The code, from what another process has sent."""


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
        return takes_a_list(self._made(piece))

    def compile_to_send(self, piece: Piece, key: str, wait: bool) -> bytes:
        """The code that the backend makes of a piece, pickled. Most give the ``forward`` of a graph, a method."""
        made = self._made(piece)
        owner, name = (made.__self__, made.__name__) if isinstance(made, MethodType) else (made, None)
        try:
            return pickle_to_bytes((owner, name))
        except Exception as error:  # pickle has no one error for what it cannot write
            raise NotCompiled(
                f"the process that compiled it cannot send what the backend has given: {NotCompiled.by(error)}"
            ) from error

    def code_of(self, sent: bytes) -> Code:
        """The code."""
        owner, name = pickle.loads(sent)
        return takes_a_list(owner if name is None else getattr(owner, name))

    def _made(self, piece: Piece) -> Callable[..., Any]:
        inputs = [each.zero_() for each in example_inputs(piece)]
        made: Callable[..., Any] = self.function(plain_graph(piece), inputs, **self.options)
        return made


def plain_graph(piece: Piece) -> fx.GraphModule:
    """A piece as a module that takes its inputs one by one, as those of torch do. It can be pickled if the piece's own can."""
    kind = PipeGraphModule if isinstance(piece.module, PipeGraphModule) else fx.GraphModule
    graph = kind(piece.module, piece.module.graph)
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
