"""Compiling while steps run: `CompileProcess`, a worker's handle of a process that compiles for it."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from pippy.drivers.protocol.compile_options import INDUCTOR, CompileOptions
from pippy.drivers.wire.pickling import pickle_to_bytes
from pippy.drivers.worker.compiled.backend import Backend, Code, NotCompiled
from pippy.drivers.worker.compiled.compile_server import SERVER_CODE
from pippy.drivers.worker.compiled.inductor import inductor_settings
from pippy.ir.halves.pieces import Piece

_ENDS_WITHIN = 3.0  # seconds


class CompileProcess:
    """Has pieces compiled by another process, which starts with the first of them. ``backend`` reads what that sends.

    A thread that asks for the `progress` takes in answers, too.
    """

    def __init__(self, backend: Backend, options: CompileOptions) -> None:
        self.backend, self.options = backend, options
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: Connection | None = None
        self.count = 0  # how many pieces the process was given
        self.missing: set[str] = set()  # the keys of those that it has not answered
        self.answers: dict[str, Any] = {}
        self._lock = threading.Lock()

    @property
    def progress(self) -> tuple[int, int] | None:
        """While it compiles: how many pieces are done, and how many there are."""
        with self._lock:
            self._take_answers()
            return (self.count - len(self.missing), self.count) if self.missing else None

    def compile(self, piece: Piece, key: str, wait: bool) -> Code | None:
        """The code of a piece; None until it is compiled."""
        with self._lock:
            self._take_answers()
            if key not in self.answers:
                if key not in self.missing:
                    self._ask(key, piece)
                return None
            answer = self.answers.pop(key)
        if isinstance(answer, NotCompiled):
            raise answer
        return self.backend.code_of(answer)

    def close(self) -> None:
        """End the process, and what it has started. The next piece starts another."""
        with self._lock:
            self._end()
            self.missing.clear()

    def _ask(self, key: str, piece: Piece) -> None:
        message = pickle.dumps((key, pickle_to_bytes(piece)))
        if self.process is None:
            self._start()
        assert self.connection is not None
        self.count += 1
        self.missing.add(key)
        with suppress(ConnectionError):  # the process has died: the next reading finds that
            self.connection.send_bytes(message)

    def _start(self) -> None:
        inductor = inductor_settings() if self.options.backend == INDUCTOR else {}
        settings = pickle.dumps((torch.get_num_threads(), pickle_to_bytes((self.options, inductor))))
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", SERVER_CODE, str(theirs.fileno()), "pippy-compiler"],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=dict(os.environ),
                process_group=0,  # so Ctrl-C does not reach it, and all that it starts can be ended
            )
        with suppress(ConnectionError):
            self.connection.send_bytes(pickle.dumps(sys.path))
            self.connection.send_bytes(settings)

    def _take_answers(self) -> None:
        try:
            while self.missing and self.connection is not None and self.connection.poll():
                key, answer = pickle.loads(self.connection.recv_bytes())
                self.missing.discard(key)
                self.answers[key] = answer
        except (EOFError, OSError):
            status = self._end()
            died = NotCompiled(f"the process that compiles pieces has died, with status {status}")
            self.answers.update(dict.fromkeys(self.missing, died))
            self.missing.clear()

    def _end(self) -> int | None:
        process, connection, self.process, self.connection = self.process, self.connection, None, None
        self.count = 0
        if connection is not None:
            connection.close()
        if process is None:
            return None
        try:
            return process.wait(_ENDS_WITHIN)  # it ends itself when it cannot read any more
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.wait()
