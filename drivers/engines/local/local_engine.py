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

from torch.distributed import FileStore

from pippy.drivers.base.errors import RECOVERY_ADVICE, ClusterError
from pippy.drivers.base.host_errors import in_words
from pippy.drivers.base.interrupts import uninterrupted
from pippy.drivers.engines.local.fork_server import BOOT, send_boot
from pippy.drivers.engines.local.launch_config import CONTROLLER, End, Fork, LaunchConfig
from pippy.drivers.engines.local.launch_reports import Died, Failed, Ready, killed_for_memory
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

    def __init__(self, config: LaunchConfig, timeout: float) -> None:
        self.owner = os.getpid()
        self.joined = False
        self.config, self.timeout = config, timeout
        self.pids: dict[int, int] = {}
        self.starts = [0] * len(config.names)  # which start of each worker counts
        self._running = False
        self._died: dict[int, str] = {}
        self._reading = threading.Lock()
        self._killed_for_memory = killed_for_memory()
        self.connections = ControllerConnections()
        with ExitStack() as undo:
            if config.directory:
                undo.callback(shutil.rmtree, config.directory, ignore_errors=True)
            self.socket, self.fork_server = self._fork_server()
            undo.pop_all()

    def _fork_server(self) -> "tuple[socket.socket, subprocess.Popen[bytes]]":
        """Start a fork server. Returns the socket to it, and its process."""
        open_standard_streams()
        with ExitStack() as undo:
            ours, theirs = _pair(undo)
            ours.settimeout(self.timeout)
            process = subprocess.Popen(
                [sys.executable or "", "-P", "-c", BOOT, str(theirs.fileno()), "pippy-fork-server"],
                stdin=subprocess.DEVNULL,
                cwd=_directory(),
                start_new_session=True,
                pass_fds=[theirs.fileno()],
                env=os.environ | MEMORY | {"OMP_NUM_THREADS": str(self.config.threads), "TORCH_CPP_LOG_LEVEL": "ERROR"},
            )
            undo.callback(process.kill)
            theirs.close()
            dies_with_thread = threading.current_thread() is threading.main_thread()
            with contextlib.suppress(ConnectionError):  # `_await` says that it has ended
                send_boot(ours, sys.path, replace(self.config, dies_with_thread=dies_with_thread))
            undo.pop_all()
        return ours, process

    recovery_advice = RECOVERY_ADVICE

    def start(self, timeout: float) -> list[Address]:
        """Start the workers, wait for them, and join them."""
        deadline = time.monotonic() + timeout
        self._place(range(len(self.config.names)), deadline)
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

        If that fails it can be tried again; a process that was started meanwhile is ended then. A fork server that has ended
        is replaced, too.
        """
        if self.fixed is not None:
            raise ClusterError(self.fixed)
        with in_words("other workers"):
            return self._place(workers, time.monotonic() + self.timeout)

    def _place(self, workers: Iterable[int], deadline: float) -> dict[int, Address]:
        """Have some workers forked, in the places of those that may be there, and wait for them. Gives where they are."""
        ends: dict[int, list[socket.socket]] = {}
        with ExitStack() as undo, self._reading:
            if self.fork_server.poll() is not None:
                ended = self.socket
                with uninterrupted():
                    self.socket, self.fork_server = self._fork_server()
                    ended.close()
            for index in workers:
                with uninterrupted():
                    ends[index] = self._ask_for(index, undo)
            while not ends.keys() <= self.pids.keys():
                self._await(deadline, self.timeout)
            with uninterrupted():
                for index, sockets in ends.items():
                    if sockets:
                        self.connections.replace(index, *sockets)
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

    def _ask_for(self, index: int, undo: ExitStack) -> list[socket.socket]:
        """Have the fork server start a worker anew. Returns the controller's ends of its sockets."""
        self._forget(index)
        pairs = [] if self.config.uses_rpc else [_pair(undo), _pair(undo)]
        self._ask(Fork(index, self.starts[index]), *(its.fileno() for _, its in pairs))
        for _, its in pairs:
            its.close()
        return [own for own, _ in pairs]

    def _ask(self, request: Fork | End, *descriptors: int) -> None:
        with contextlib.suppress(ConnectionError):  # it has ended, and all workers with it: `_await` says so
            socket.send_fds(self.socket, [pickle.dumps(request)], descriptors, socket.MSG_NOSIGNAL)

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
                    how = f"{self._fork_server_ended()}, and they with it"
                    return dict.fromkeys(self.pids, how) | self._died
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
                    f"{self._fork_server_ended()} while workers started; if its output on stderr does not say why, try again"
                )

    def _fork_server_ended(self) -> str:
        """How the fork server has ended, in words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.fork_server.wait(1.0)  # it is about to end: its sockets are closed
        ended, status = "the process that the workers are forked from ended", self.fork_server.returncode
        out_of_memory = killed_for_memory() > self._killed_for_memory
        return ended if status is None else f"{ended} ({Died(0, status, out_of_memory=out_of_memory).how})"

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


def _directory() -> str | None:
    """Where the workers start: in this process's directory (None), or, as torch starts in none that was deleted, at the root.

    They are not told to go to this process's directory, but begin there: it may not be allowed to enter it any more.
    """
    try:
        os.getcwd()
    except OSError:
        return "/"
    return None


def _pair(undo: ExitStack) -> tuple[socket.socket, socket.socket]:
    one, other = socketpair()
    return undo.enter_context(one), undo.enter_context(other)


def socketpair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a socket that only those can use to whom they are handed."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
