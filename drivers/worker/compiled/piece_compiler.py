"""Compiles the pieces of stages, those that are alike once: `PieceCompiler`.

    a piece ─▶ its text, shapes and constants ─▶ a key ─▶ the backend compiles it, or has it

Random numbers are drawn in front of the compiled code, by the same operations in the same order as without. Products that go
into sums of gradients follow behind it.
"""

import logging
import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import fx

from pippy.drivers.protocol.compile_options import GRAPHS, CompileOptions
from pippy.drivers.worker.compiled.backend import Backend, Code, NotCompiled, one_at_a_time
from pippy.drivers.worker.compiled.inductor import backend_of
from pippy.ir.base.node_notes import FAKE_VALUE
from pippy.ir.base.readable import count_with_noun
from pippy.ir.halves.adding_up import Parted, without_sums
from pippy.ir.halves.joint import draws_or_seeds
from pippy.ir.halves.pieces import Piece, quick_code, without_draws

_log = logging.getLogger(__name__)


class PieceCompiler:
    """Compiles pieces by a backend. ``progress``: while it does, how many are done, and how many there are."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.made: dict[str, Code | NotCompiled] = {}
        self.progress: tuple[int, int] | None = None
        self._begun: tuple[float, int] | None = None  # since when it compiles, and how many it had made before

    def codes(self, pieces: Sequence[Piece]) -> list[Code | NotCompiled]:
        """The compiled codes of pieces, or why there are none. Those that other workers compile now come last."""
        found: dict[int, Code | NotCompiled] = {}
        try:
            for wait in (False, True):
                for piece in pieces:
                    self.progress = len(found), len(pieces)
                    if id(piece) not in found and (code := self._code(piece, wait)) is not None:
                        found[id(piece)] = code
        finally:
            self.progress = None
        if self._begun is not None:
            since, before = self._begun
            self._begun = None
            made = count_with_noun(len(self.made) - before, "piece")
            _log.info("compiled %s of stages in %.1f s", made, time.monotonic() - since)
        return [found[id(piece)] for piece in pieces]

    def _code(self, piece: Piece, wait: bool) -> Code | NotCompiled | None:
        if any(map(draws_or_seeds, piece.module.graph.nodes)):
            divided = without_draws(piece)
            if divided is None:
                return NotCompiled("it draws random numbers that depend on values")
            draw, rest = divided
            code = self._code(rest, wait)
            if code is None or isinstance(code, NotCompiled):
                return code
            return _drawing(draw, code)
        if (parted := without_sums(piece)) is not None:
            code = self._code(parted.rest, wait)
            return code if code is None or isinstance(code, NotCompiled) else _adding(parted, code)
        if not any(node.op == "call_function" for node in piece.module.graph.nodes):
            return piece.module
        key = _key(piece)
        if key not in self.made:
            if self._begun is None:
                self._begun = time.monotonic(), len(self.made)
                _log.info("compiles pieces of stages")
            try:
                with one_at_a_time:
                    code = self.backend.compile(piece, key, wait)
            except Exception as error:  # of a compiler, a file system, or an artifact of another machine
                code = NotCompiled.by(error)
            if code is None:
                return None
            self.made[key] = code
        return self.made[key]

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
    return PieceCompiler(backend_of(options))


def _drawing(draw: Code, code: Code) -> Code:
    return lambda values: code([*values, *draw([])])


def _adding(parted: Parted, code: Code) -> Code:
    add, passed, kept = quick_code(parted.sums), parted.passed, parted.kept

    def run(values: list[torch.Tensor]) -> Sequence[Any]:
        taken, given = [values[at] for at in kept], [values[at] for at in passed]
        values.clear()
        results = list(code(given))
        outputs = results[: len(results) - made]
        add([*taken, *results[len(outputs) :]])
        return outputs

    made = len(parted.sums.inputs) - len(kept)
    return run


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
