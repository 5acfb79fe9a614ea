"""What a process does that compiles pieces for a worker.

    worker ──pieces──▶ a thread that reads them; when the worker ends, it ends this process and all that it has started
           ◀─answers── the main thread, which compiles one piece after the other

It begins without torch: the import takes seconds, in which the worker may end.
"""

import itertools
import os
import pickle
import queue
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pippy.drivers.worker.compiled.backend import Backend

_NICENESS = 5  # on a core on which steps compute, it gets a quarter of the time

# The first message is the worker's sys.path; without it the import of pippy could fail.
SERVER_CODE = (
    "import pickle, sys; from multiprocessing.connection import Connection; c = Connection(int(sys.argv[1])); "
    "sys.path[:] = pickle.loads(c.recv_bytes()); "
    "from pippy.drivers.worker.compiled.compile_server import compile_for; compile_for(c)"
)


def compile_for(worker: Connection) -> None:
    """Compile what a worker asks for, until it ends."""
    os.nice(_NICENESS)
    messages = queue.SimpleQueue[bytes]()
    threading.Thread(target=_read, args=(worker, messages), daemon=True).start()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # others would be processes that are not as nice
    threads, given = pickle.loads(messages.get())
    waiting: dict[str, bytes] = {}
    backend: Backend | None = None
    while True:
        while not waiting or not messages.empty():
            key, piece = pickle.loads(messages.get())
            waiting[key] = piece
        try:
            backend = backend or backend_with(threads, given)
            key, answer = _next(waiting, backend)
        except Exception as error:
            key, answer = next(iter(waiting)), _not_compiled(error)
        del waiting[key]
        worker.send_bytes(pickle.dumps((key, answer)))


def _read(worker: Connection, messages: "queue.SimpleQueue[bytes]") -> None:
    try:
        while True:
            messages.put(worker.recv_bytes())
    except (EOFError, OSError):  # the worker has ended
        end_all()


def end_all() -> None:
    """End this process, and all that it has started.

    What a C++ compiler has half written is deleted first: inductor would load it, in this cache for ever.
    """
    compilers = list(_started_by(os.getpid()))
    for pid in compilers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    for pid in compilers:
        with suppress(OSError):  # it has ended, and its file is whole
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            for option, path in itertools.pairwise(words):
                if option == "-o":
                    Path(f"/proc/{pid}/cwd", path).unlink(missing_ok=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _started_by(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            for child in map(int, children.read_text().split()):
                yield child
                yield from _started_by(child)


def backend_with(threads: int, given: bytes) -> "Backend":
    """What compiles in this process as in the worker: with so many threads, the worker's options and settings of inductor."""
    import torch

    from pippy.drivers.worker.compiled.inductor import backend_of

    torch.set_num_threads(threads)
    options, settings = pickle.loads(given)
    if settings:
        from torch._inductor import config

        config.load_config(settings)
    return backend_of(options)


def _next(waiting: Mapping[str, bytes], backend: "Backend") -> tuple[str, Any]:
    """Compile a piece: the first that no other process compiles now; if they compile all, wait for the first."""
    for wait in (False, True):
        for key, piece in waiting.items():
            try:
                answer = backend.compile_to_send(pickle.loads(piece), key, wait)
            except Exception as error:  # of a compiler, a file system, or an operation that this process has not
                answer = _not_compiled(error)
            if answer is not None:
                return key, answer
    raise AssertionError("a compiler that waits gives an answer")


def _not_compiled(error: Exception) -> Exception:
    from pippy.drivers.worker.compiled.backend import NotCompiled

    return NotCompiled.by(error)
