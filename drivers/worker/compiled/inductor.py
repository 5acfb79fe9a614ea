"""torch's inductor as a backend that keeps what it compiles, for all workers of a host and all runs: `Inductor`.

    the key of a piece, the versions and settings ─▶ a name in a folder
                                                      there:       it is loaded
                                                      not there:   who has the lock compiles it and saves it;
                                                                   the others compile other pieces meanwhile

The folder is ``pippy`` in that of inductor's own cache, which TORCHINDUCTOR_CACHE_DIR sets.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from pippy.drivers.protocol.compile_options import INDUCTOR, CompileOptions
from pippy.drivers.worker.compiled.backend import (
    Backend,
    CalledBackend,
    Code,
    example_inputs,
    plain_graph,
    takes_a_list,
)
from pippy.ir.halves.pieces import Piece


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
