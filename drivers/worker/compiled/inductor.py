"""Pieces of stages compiled by torch's inductor, each piece once: for all stages, workers of a host, and runs that are alike.

    a piece ─▶ its text, shapes and constants, the version of torch ─▶ a name in a folder
                                                                        there:       it is loaded
                                                                        not there:   who has the lock compiles it and saves it

The folder is ``pippy`` in that of inductor's own cache, which TORCHINDUCTOR_CACHE_DIR sets.
"""

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import fx

from pippy.ir.base.errors import StageError
from pippy.ir.base.node_notes import FAKE_VALUE
from pippy.ir.base.readable import shortened
from pippy.ir.halves.joint import draws_or_seeds
from pippy.ir.halves.pieces import Piece, without_draws

Code = Callable[[list[torch.Tensor]], Sequence[Any]]


class NotCompiled(StageError):
    """A piece that is not compiled, and why. It runs as a graph."""


class Inductor:
    """Compiles pieces. ``compiled`` and ``loaded`` count those that it has compiled itself, and found in the folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.made: dict[str, Code | NotCompiled] = {}
        self.compiled = self.loaded = 0

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
                self.made[key] = self._load_or_compile(piece, key)
            except Exception as error:  # of a compiler, a file system, or an artifact of another machine
                first = str(error).strip().partition("\n")[0]
                self.made[key] = NotCompiled(f"{type(error).__name__}: {shortened(first, 200)}")
        made = self.made[key]
        if isinstance(made, NotCompiled):
            raise NotCompiled(str(made))
        return made

    @property
    def failures(self) -> list[str]:
        """Why pieces could not be compiled."""
        return [str(each) for each in self.made.values() if isinstance(each, NotCompiled)]

    def _load_or_compile(self, piece: Piece, key: str) -> Code:
        artifact_class = torch._inductor.CompiledArtifact
        with _locked(self._folder() / f"{key}.lock"):
            path = self._folder() / key
            if path.exists():
                try:
                    code = _code(artifact_class.load(path=str(path), format="binary"))
                    self.loaded += 1
                    return code
                except Exception:
                    path.unlink(missing_ok=True)  # of another version, or half written: it is compiled again
            graph = fx.GraphModule(piece.module, piece.module.graph)
            graph.graph.set_codegen(fx.graph.CodeGen())
            graph.recompile()
            inputs: list[Any] = [_like(FAKE_VALUE.of(node)) for node in piece.inputs]
            artifact = torch._inductor.standalone_compile(graph, inputs, dynamic_shapes="from_example_inputs")
            self.compiled += 1
            own = path.with_name(f"{key}.{os.getpid()}")
            artifact.save(path=str(own), format="binary")
            own.replace(path)
            return _code(artifact)

    def _folder(self) -> Path:
        if self.folder is None:
            from torch._inductor.runtime.cache_dir_utils import cache_dir  # slow to import

            self.folder = Path(cache_dir()) / "pippy"
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder


def _code(artifact: Callable[..., Any]) -> Code:
    def run(values: list[torch.Tensor]) -> Sequence[Any]:
        given = tuple(values)
        values.clear()
        return list(artifact(*given))

    return run


def _like(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _key(piece: Piece) -> str:
    """A name for all pieces that compute the same."""
    values = [FAKE_VALUE.of(node) for node in piece.inputs]
    forms = [(each.shape, each.stride(), each.dtype, str(each.device)) for each in values]
    constants = [_content(piece, node) for node in piece.module.graph.nodes if node.op == "get_attr"]
    told = torch.__version__, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    text = f"{_text(piece.module.graph)}\n{forms}\n{constants}\n{told}"
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


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Inside, no other process has this lock. The system takes it from a process that ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
