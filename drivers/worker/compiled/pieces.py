"""Compiles the pieces of stages, those that are alike once: `PieceCompiler`.

    a piece ─▶ its text, shapes and constants ─▶ a key ─▶ the backend compiles it, or has it

Random numbers are drawn in front of the compiled code, by the same operations in the same order as without. Products that go
into sums of gradients follow behind it.

Pieces are compiled by backends of torch.compile: a `Backend`, which is a `CalledBackend` for all but inductor.

`Inductor` is torch's inductor as a backend that keeps what it compiles, for all workers of a host and all runs.

    the key of a piece, the versions and settings ─▶ a name in a folder
                                                      there:       it is loaded
                                                      not there:   who has the lock compiles it and saves it;
                                                                   the others compile other pieces meanwhile

The folder is ``pippy`` in that of inductor's own cache, which TORCHINDUCTOR_CACHE_DIR sets.
"""

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import fx

from pippy.drivers.protocol.compile_options import GRAPHS, INDUCTOR, CompileOptions
from pippy.ir.base.errors import StageError
from pippy.ir.base.node_notes import FAKE_VALUE
from pippy.ir.base.readable import count_with_noun, shortened
from pippy.ir.halves.adding_up import Parted, without_sums
from pippy.ir.halves.joint import draws_or_seeds
from pippy.ir.halves.pieces import Piece, quick_code, without_draws

Code = Callable[[list[torch.Tensor]], Sequence[Any]]  # it takes a list, and empties it
# torch's tracers and compilers change classes and settings of a process while they run
one_at_a_time = threading.RLock()


class NotCompiled(StageError):
    """A piece that is not compiled, and why. It runs as a graph."""


def first_line(error: Exception) -> str:
    """The class and the first line of an error of a compiler, or of a stage that is recorded."""
    return f"{type(error).__name__}: {shortened(str(error).strip().partition(chr(10))[0], 200)}"


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


class Inductor:
    """Compiles with the options of a mode, or with others. ``compiled`` and ``loaded`` count the pieces that it has compiled
    itself, and found in the folder."""

    def __init__(
        self, mode: str | None = None, options: Mapping[str, Any] | None = None, folder: Path | None = None
    ) -> None:
        self.mode, self.options, self.folder = mode, options or {}, folder
        self.compiled = self.loaded = 0

    def compile(self, piece: Piece, key: str, wait: bool) -> Code | None:
        """The code of a piece, from the folder if it is there; None if another worker makes it, and this one does not wait."""
        options = {**(torch._inductor.list_mode_options(self.mode) if self.mode else {}), **self.options}
        name = blake2b(f"{key} {_settings(options)}".encode(), digest_size=16).hexdigest()
        with _locked(self._folder() / f"{name}.lock", wait) as locked:
            if not locked:
                return None
            path = self._folder() / name
            if path.exists():
                try:
                    return self._load(path)
                except Exception:
                    path.unlink(missing_ok=True)  # of another version, or half written: it is compiled again
            artifact = torch._inductor.standalone_compile(
                plain_graph(piece),
                example_inputs(piece),  # type: ignore[arg-type]
                dynamic_shapes="from_example_inputs",
                options={"config_patches": options},
            )
            self.compiled += 1
            with suppress(OSError):  # the disk is full: others compile it again
                own = path.with_name(f"{name}.{os.getpid()}")
                artifact.save(path=str(own), format="binary")
                own.replace(path)
            return takes_a_list(artifact)

    def _load(self, path: Path) -> Code:
        code = takes_a_list(torch._inductor.CompiledArtifact.load(path=str(path), format="binary"))
        self.loaded += 1
        return code

    def _folder(self) -> Path:
        if self.folder is None:
            from torch._inductor.runtime.cache_dir_utils import cache_dir  # slow to import

            self.folder = Path(cache_dir()) / "pippy"
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder


def backend_of(options: CompileOptions) -> Backend:
    """What compiles with these options: `Inductor`, or another backend."""
    if options.backend != INDUCTOR:
        return CalledBackend(options.backend, options.mode, options.options)
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        from torch._inductor import config  # slow to import

        config.compile_threads = torch.get_num_threads()  # a worker's share of the cores: all compile at the same time
    return Inductor(options.mode, options.options)


def _settings(options: Mapping[str, Any]) -> str:
    """What compiled code depends on besides its piece."""
    from torch._inductor import config  # slow to import

    with config.patch({**options, "compile_threads": 1}):
        settings = config.get_hash().hex()
    return f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} {settings}"


@contextmanager
def _locked(path: Path, wait: bool) -> Iterator[bool]:
    """Inside, no other process has this lock; False if one has it. The system takes it from a process that ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


_log = logging.getLogger(__name__)


class PieceCompiler:
    """Compiles pieces by a backend. ``progress``: while it does, how many are done, and how many there are."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.made: dict[str, Code | NotCompiled] = {}
        self.progress: tuple[int, int] | None = None
        self._before = 0  # how many were made when it was asked for others

    def codes(self, pieces: Sequence[Piece]) -> list[Code | NotCompiled]:
        """The compiled codes of pieces, or why there are none. Those that other workers compile now come last."""
        found: dict[int, Code | NotCompiled] = {}
        begin, self._before = time.monotonic(), len(self.made)
        try:
            for wait in (False, True):
                for piece in pieces:
                    self.progress = len(found), len(pieces)
                    if id(piece) not in found and (code := self._code(piece, wait)) is not None:
                        found[id(piece)] = code
        finally:
            self.progress = None
        if made := len(self.made) - self._before:
            _log.info("compiled %s of stages in %.1f s", count_with_noun(made, "piece"), time.monotonic() - begin)
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
            if len(self.made) == self._before:
                _log.info("compiles pieces of stages")
            try:
                with one_at_a_time:
                    code = self.backend.compile(piece, key, wait)
            except Exception as error:  # of a compiler, a file system, or an artifact of another machine
                code = error if isinstance(error, NotCompiled) else NotCompiled(first_line(error))
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
