"""The engine of a local cluster: processes of this host, started, watched and ended."""

import contextlib
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain

from torch.distributed import FileStore

from pippy.drivers.base.errors import RECOVERY_ADVICE, ClusterError
from pippy.drivers.base.interrupts import uninterrupted
from pippy.drivers.engines.local.fork_server import BOOT
from pippy.drivers.engines.local.launch_config import CONTROLLER, End, LaunchConfig, Replace
from pippy.drivers.engines.local.launch_reports import Died, Failed, Ready
from pippy.drivers.engines.routes import Routes
from pippy.drivers.engines.standard_streams import open_standard_streams
from pippy.drivers.session.calls import Address, Messages
from pippy.drivers.wire.messages import rpc
from pippy.drivers.wire.messages.controller_connections import ControllerConnections
from pippy.drivers.wire.messages.controller_messages import ControllerMessages
from pippy.drivers.wire.pollable_event import PollableEvent

# glibc keeps freed memory: kept_memory.py says why, and does it in processes that others have started
MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


class LocalEngine:
    """The fork server and, through it, the workers. ``close()`` ends them all, and may be called twice."""

    def __init__(self, config: LaunchConfig) -> None:
        self.owner = os.getpid()
        self.joined = False
        self.pids: dict[int, int] = {}
        self.starts = [0] * len(config.names)  # which start of each worker counts
        self._running = False
        self._died: dict[int, str] = {}
        self._reading = threading.Lock()
        with ExitStack() as undo, ExitStack() as handed_over:
            open_standard_streams()
            if config.directory:
                undo.callback(shutil.rmtree, config.directory, ignore_errors=True)
            self.connections, their_ends = _connections(config)
            undo.callback(self.connections.close)
            for end in chain(*their_ends):
                handed_over.enter_context(end)
            self.socket, server_end = socketpair()
            undo.callback(self.socket.close)
            handed_over.enter_context(server_end)
            self.config = config = replace(config, sockets=tuple((a.fileno(), b.fileno()) for a, b in their_ends))
            self.fork_server = subprocess.Popen(
                [sys.executable, "-P", "-c", BOOT, str(server_end.fileno()), "pippy-fork-server"],
                stdin=subprocess.DEVNULL,
                cwd=_directory(),
                start_new_session=True,
                pass_fds=[server_end.fileno(), *chain(*config.sockets)],
                env=os.environ | MEMORY | {"OMP_NUM_THREADS": str(config.threads), "TORCH_CPP_LOG_LEVEL": "ERROR"},
            )
            undo.pop_all()
        with contextlib.suppress(ConnectionError):  # `start` says that it has ended
            self.socket.send(pickle.dumps(sys.path), socket.MSG_NOSIGNAL)
            self.socket.send(pickle.dumps(config), socket.MSG_NOSIGNAL)

    recovery_advice = RECOVERY_ADVICE

    def start(self, timeout: float) -> list[Address]:
        """Wait for the workers and join them."""
        self.timeout = timeout
        deadline = time.monotonic() + timeout
        while len(self.pids) < len(self.config.names):
            self._await(deadline, timeout)
        self._running = True
        if self.config.uses_rpc:
            self._join(deadline, timeout)
            shutil.rmtree(self.config.directory, ignore_errors=True)
        return [self._address(index) for index in range(len(self.config.names))]

    def _address(self, index: int) -> Address:
        return Address(self.config.names[index], socket.gethostname(), self.pids[index], is_here=True)

    @property
    def fixed(self) -> str | None:
        """Why a worker cannot be replaced; None if it can."""
        if os.getpid() != self.owner or self.socket.fileno() == -1:
            return "the processes of this cluster were ended; open another"
        if self.config.uses_rpc:
            return "its workers are connected by RPC, which none can join later; open another, if you can without RPC"
        return None

    def replace(self, workers: Iterable[int]) -> dict[int, Address]:
        """End what is left of some workers, and start others in their places. Gives where those are.

        If that fails it can be tried again; a process that was started meanwhile is ended then.
        """
        if self.fixed is not None:
            raise ClusterError(self.fixed)
        deadline, ends = time.monotonic() + self.timeout, {}
        with ExitStack() as undo, self._reading:
            for index in workers:
                with uninterrupted():
                    ends[index] = self._ask_for(index, undo)
            while not ends.keys() <= self.pids.keys():
                self._await(deadline, self.timeout)
            with uninterrupted():
                for index, (one, urgent) in ends.items():
                    self.connections.replace(index, one, urgent)
                undo.pop_all()
        return {index: self._address(index) for index in ends}

    def end(self, workers: Iterable[int]) -> None:
        """End what is left of some workers."""
        if self.fixed is not None:
            raise ClusterError(self.fixed)
        with self._reading, uninterrupted():
            for index in workers:
                self._forget(index)
                self._ask(End(index))
                self.connections.drop(index)

    def _forget(self, index: int) -> None:
        """Go on without the process of a worker, and what is reported of it from now on."""
        self.pids.pop(index, None)
        self._died.pop(index, None)
        self.starts[index] += 1

    def _ask_for(self, index: int, undo: ExitStack) -> tuple[socket.socket, socket.socket]:
        """Have the fork server start a worker anew. Returns the controller's ends of its sockets."""
        self._forget(index)
        (one, its_one), (urgent, its_urgent) = _pair(undo), _pair(undo)
        with its_one, its_urgent:
            self._ask(Replace(index, self.starts[index]), its_one.fileno(), its_urgent.fileno())
        return one, urgent

    def _ask(self, request: Replace | End, *descriptors: int) -> None:
        try:
            socket.send_fds(self.socket, [pickle.dumps(request)], descriptors, socket.MSG_NOSIGNAL)
        except ConnectionError as error:
            raise ClusterError(
                "the process that the workers are forked from has ended; open another cluster"
            ) from error

    @property
    def routes(self) -> Routes:
        """How values go between the workers."""
        return Routes.of_host(self.config.names, socket.gethostname(), not self.config.uses_rpc, self.config.devices)

    @property
    def messages(self) -> Messages:
        """What carries messages to the workers."""
        return ControllerMessages(self._rpc_names) if self.config.uses_rpc else self.connections

    def deaths(self, wait: float = 0.0) -> Mapping[int, str]:
        """The workers that have died, and how. Waits up to so many seconds for the first."""
        with self._reading:
            while self.socket.fileno() >= 0 and select.select([self.socket], [], [], 0.0 if self._died else wait)[0]:
                packet = self._packet()
                if not packet:
                    return {
                        i: self._died.get(i, "the process that it was forked from ended, and it with it")
                        for i in range(len(self.config.names))
                    }
                self._take(packet)
            return dict(self._died)

    def _packet(self) -> bytes:
        """The next report; nothing if the fork server has ended."""
        try:
            return self.socket.recv(1 << 20)
        except OSError:
            return b""

    def close(self, lost: str | None = None) -> None:
        """Leave the group, and end every process. In a process that was forked from the controller it does nothing."""
        if os.getpid() != self.owner or self.socket.fileno() == -1:
            return
        try:
            if self.joined:
                rpc.leave()
        finally:
            with uninterrupted():  # it is over soon, and what is closed by half is never closed
                with contextlib.suppress(OSError):  # it has ended
                    self.socket.shutdown(socket.SHUT_RDWR)  # forks of this process hold it open, too
                self.socket.close()
                self.connections.close()
                self._end()
                if self.config.directory:
                    shutil.rmtree(self.config.directory, ignore_errors=True)

    @property
    def _rpc_names(self) -> list[str]:
        return [self.config.rpc_name(index) for index in range(len(self.config.names))]

    def _end(self) -> None:
        """Close the socket, at which the fork server ends its workers and itself. If it does not, kill all of them."""
        try:
            self.fork_server.wait(2.0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.fork_server.pid, signal.SIGKILL)
            self.fork_server.wait()

    def _await(self, deadline: float, timeout: float, *others: int) -> None:
        """Take in one report, or return when one of the other file descriptors is readable."""
        readable = select.select([self.socket.fileno(), *others], [], [], max(0.0, deadline - time.monotonic()))[0]
        if not readable:
            raise ClusterError(
                f"the workers did not start within {timeout:g} s ({len(self.pids)} of {len(self.config.names)} are ready); "
                f"give cluster() a larger start_timeout, or fewer workers"
            )
        if self.socket.fileno() in readable:
            self._take(self._packet())

    def _take(self, packet: bytes) -> None:
        report = pickle.loads(packet) if packet else None
        if report is not None and report.index is not None:
            if report.start != self.starts[report.index]:
                return  # of a process that was replaced
            if self._running and report.index in self.pids:
                if isinstance(report, Died):
                    self._died[report.index] = report.how
                return
        match report:
            case Ready(index, pid):
                self.pids[index] = pid
            case Failed(index, text):
                who = "the workers' fork server" if index is None else f"worker {self.config.names[index]!r}"
                raise ClusterError(f"{who} failed to start:\n{text}")
            case Died(index, _):
                raise ClusterError(f"worker {self.config.names[index]!r} died while it started: {report.how}")
            case None:
                raise ClusterError(
                    "the process that the workers are forked from ended while workers started; its output on "
                    "stderr says why"
                )

    def _join(self, deadline: float, timeout: float) -> None:
        """Join the group on a thread, because the call waits for the others without a limit, and Ctrl-C cannot interrupt it."""
        outcome: list[BaseException | None] = []
        done = PollableEvent()

        def join() -> None:
            try:
                rpc.serve_nothing()
                rpc.join(CONTROLLER, 0, len(self.config.names) + 1, self.config.meeting, "uv", "lo")
                self.joined = True
                store = FileStore(f"{self.config.directory}/store", len(self.config.names) + 1)
                rpc.close_ports(CONTROLLER, self._rpc_names, store, timeout, self.config.timeout)
                outcome.append(None)
            except BaseException as error:
                outcome.append(error)
            done.set()

        thread = threading.Thread(target=join, daemon=True)
        thread.start()
        while not outcome:
            self._await(deadline, timeout, done.fileno())
        thread.join()
        done.close()
        if outcome[0] is not None:
            raise ClusterError(f"the controller could not join its workers: {outcome[0]}") from outcome[0]


def _connections(config: LaunchConfig) -> tuple[ControllerConnections, list[tuple[socket.socket, socket.socket]]]:
    """The controller's ends of two sockets to each worker, and the ends that are handed over."""
    with ExitStack() as undo:
        two = [] if config.uses_rpc else [(_pair(undo), _pair(undo)) for _ in config.names]
        undo.pop_all()
    ours = ControllerConnections(
        {worker: one[0] for worker, (one, _) in enumerate(two)},
        {worker: other[0] for worker, (_, other) in enumerate(two)},
    )
    return ours, [(one[1], other[1]) for one, other in two]


def _directory() -> str:
    """Where the workers start: in this process's directory, or, as torch starts in none that was deleted, at the root."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


def _pair(undo: ExitStack) -> tuple[socket.socket, socket.socket]:
    one, other = socketpair()
    return undo.enter_context(one), undo.enter_context(other)


def socketpair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a socket that only those can use to whom they are handed."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
