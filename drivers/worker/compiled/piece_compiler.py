"""Compiles the pieces of stages, those that are alike once: `PieceCompiler`.

    a piece ─▶ its text, shapes and constants ─▶ a key ─▶ the backend compiles it, or has it

Random numbers are drawn in front of the compiled code, by the same operations in the same order as without.
"""

import os
import threading
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import fx

from pippy.drivers.protocol.compile_options import GRAPHS, INDUCTOR, CompileOptions
from pippy.drivers.worker.compiled.backend import Backend, CalledBackend, Code
from pippy.drivers.worker.compiled.inductor import Inductor
from pippy.ir.base.errors import StageError
from pippy.ir.base.node_notes import FAKE_VALUE
from pippy.ir.base.readable import shortened
from pippy.ir.halves.joint import draws_or_seeds
from pippy.ir.halves.pieces import Piece, without_draws

_compiling = threading.RLock()  # torch's compilers change settings of the process while they run


class NotCompiled(StageError):
    """A piece that is not compiled, and why. It runs as a graph."""


class PieceCompiler:
    """Compiles pieces by a backend."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.made: dict[str, Code | NotCompiled] = {}

    def code(self, piece: Piece) -> Code:
        """The compiled code of a piece. Raises `NotCompiled` if there is none."""
        if any(map(draws_or_seeds, piece.module.graph.nodes)):
            divided = without_draws(piece)
            if divided is None:
                raise NotCompiled("it draws random numbers that depend on values")
            draw, rest = divided
            code = self.code(rest)
            return lambda values: code([*values, *draw([])])
        if not any(node.op == "call_function" for node in piece.module.graph.nodes):
            return piece.module
        key = _key(piece)
        if key not in self.made:
            try:
                with _compiling:
                    self.made[key] = self.backend.compile(piece, key)
            except Exception as error:  # of a compiler, a file system, or an artifact of another machine
                first = str(error).strip().partition("\n")[0]
                self.made[key] = NotCompiled(f"{type(error).__name__}: {shortened(first, 200)}")
        made = self.made[key]
        if isinstance(made, NotCompiled):
            raise NotCompiled(str(made))
        return made

    @property
    def failures(self) -> Sequence[str]:
        """Why pieces could not be compiled."""
        return [str(each) for each in self.made.values() if isinstance(each, NotCompiled)]


def compiler_of(options: CompileOptions) -> PieceCompiler | None:
    """What compiles pieces with these options; None if they run as graphs.

    >>> compiler_of(CompileOptions("graphs"))
    """
    if options.backend == GRAPHS:
        return None
    if options.backend == INDUCTOR:
        _share_the_cores()
        return PieceCompiler(Inductor(options.mode, options.options))
    return PieceCompiler(CalledBackend(options.backend, options.mode, options.options))


def _share_the_cores() -> None:
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        from torch._inductor import config  # slow to import

        config.compile_threads = torch.get_num_threads()  # a worker's share of the cores: all compile at the same time


def _key(piece: Piece) -> str:
    """A name for all pieces that compute the same."""
    values = [FAKE_VALUE.of(node) for node in piece.inputs]
    forms = [(each.shape, each.stride(), each.dtype, str(each.device)) for each in values]
    constants = [_content(piece, node) for node in piece.module.graph.nodes if node.op == "get_attr"]
    text = f"{_text(piece.module.graph)}\n{forms}\n{constants}"
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _text(graph: fx.Graph) -> str:
    """A graph without the names of its nodes, which are those of the stage's own layers."""
    numbers = {node: f"%{number}" for number, node in enumerate(graph.nodes)}

    def named(argument: Any) -> Any:
        return fx.node.map_arg(argument, lambda node: numbers[node])

    lines = []
    for node in graph.nodes:
        target = node.target if node.op == "call_function" else ""
        lines.append(f"{node.op} {target} {named(node.args)} {named(node.kwargs)}")
    return "\n".join(lines)


def _content(piece: Piece, node: fx.Node) -> Any:
    value = getattr(piece.module, str(node.target))
    return (value.shape, value.dtype, value.cpu().numpy().tobytes()) if isinstance(value, torch.Tensor) else value
