"""Opens a cluster whose workers are processes of this host.

The engine starts, watches and ends the processes.
"""

import contextlib
import errno
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from pippy.drivers.base.errors import RECOVERY_ADVICE, ClusterError
from pippy.drivers.base.host_errors import host_error, in_words
from pippy.drivers.base.interrupts import uninterrupted
from pippy.drivers.base.process import open_standard_streams
from pippy.drivers.engines.arguments import check_choice, checked_names, device_name, polling_time
from pippy.drivers.engines.cluster import Cluster, check_none_open, note_local_cluster, opened
from pippy.drivers.engines.local.fork_server import (
    BOOT,
    Died,
    End,
    Failed,
    Fork,
    LaunchConfig,
    Ready,
    killed_for_memory,
    send_boot,
)
from pippy.drivers.engines.routes import Routes
from pippy.drivers.session.calls import Address
from pippy.drivers.wire.messages.controller_messages import ControllerConnections
from pippy.ir.base.logs import LOGGER
from pippy.ir.base.public_calls import placing_words
from pippy.ir.base.source import warn

# glibc keeps freed memory: `keep_freed_memory` says why, and does it in processes that others have started
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
        self.config, self.timeout = config, timeout
        self.names, self.device_type = config.names, torch.device(config.devices[0]).type
        self.pids: dict[int, int] = {}
        self.starts = [0] * len(config.names)  # which start of each worker counts
        self._running = False
        self._died: dict[int, str] = {}
        self._reading = threading.Lock()
        self._killed_for_memory = killed_for_memory()
        self.messages = ControllerConnections()
        self.socket, self.fork_server = self._fork_server()

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
        """Start the workers, and wait for them."""
        self._place(range(len(self.config.names)), timeout)
        self._running = True
        return [self._address(index) for index in range(len(self.config.names))]

    def _address(self, index: int) -> Address:
        return Address(self.config.names[index], socket.gethostname(), self.pids[index], is_here=True)

    @property
    def fixed(self) -> str | None:
        """Why a worker cannot be replaced; None if it can."""
        if os.getpid() != self.owner or self.socket.fileno() == -1:
            return "the processes of this cluster were ended; open another"
        return None

    def replace(self, workers: Iterable[int]) -> dict[int, Address]:
        """End what is left of some workers, and start others in their places. Gives where those are.

        If that fails it can be tried again; a process that was started meanwhile is ended then. A fork server that has ended
        is replaced, too.
        """
        if self.fixed is not None:
            raise ClusterError(self.fixed)
        with in_words("other workers"):
            return self._place(workers, self.timeout)

    def _place(self, workers: Iterable[int], within: float) -> dict[int, Address]:
        """Have some workers forked, in the places of those that may be there, and wait for them. Gives where they are."""
        deadline = time.monotonic() + within
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
                self._await(deadline, within)
            with uninterrupted():
                for index, sockets in ends.items():
                    self.messages.replace(index, *sockets)
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
                self.messages.drop(index)

    def _forget(self, index: int) -> None:
        """Go on without the process of a worker, and what is reported of it from now on."""
        self.pids.pop(index, None)
        self._died.pop(index, None)
        self.starts[index] += 1

    def _ask_for(self, index: int, undo: ExitStack) -> list[socket.socket]:
        """Have the fork server start a worker anew. Returns the controller's ends of its sockets."""
        self._forget(index)
        pairs = [_pair(undo), _pair(undo)]
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
        return Routes.of_host(self.config.names, socket.gethostname(), self.config.devices)

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
        """The next report; nothing if the fork server has ended.

        If that had not read all requests, the system says so once, before it gives the reports.
        """
        for _ in range(2):
            with contextlib.suppress(OSError):
                return self.socket.recv(1 << 20)
        return b""

    def close(self, lost: str | None = None) -> None:
        """End every process. In a process that was forked from the controller it does nothing."""
        if os.getpid() != self.owner or self.socket.fileno() == -1:
            return
        with uninterrupted():  # it is over soon, and what is closed by half is never closed
            with contextlib.suppress(OSError):  # it has ended
                self.socket.shutdown(socket.SHUT_RDWR)  # forks of this process hold it open, too
            self.socket.close()
            self.messages.close()
            self._end()

    def _end(self) -> None:
        """Close the socket, at which the fork server ends its workers and itself. If it does not, kill all of them."""
        try:
            self.fork_server.wait(2.0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.fork_server.pid, signal.SIGKILL)
            self.fork_server.wait()

    def _await(self, deadline: float, timeout: float) -> None:
        """Take in one report."""
        if not select.select([self.socket.fileno()], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise ClusterError(
                f"the workers did not start within {timeout:g} s ({len(self.pids)} of {len(self.config.names)} are ready); "
                f"give cluster() a larger start_timeout, or fewer workers"
            )
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


WORKER = "pippy.drivers.worker.worker:Worker"
DEFAULT_DEVICE = "cpu"  # of workers; the tests' option --device names another


@placing_words()
def local_cluster(
    n: int,
    *,
    threads: int | None = None,
    devices: Sequence[str | torch.device] | None = None,
    device: str | torch.device | None = None,
    pin: bool = False,
    names: Sequence[str] | None = None,
    timeout: float = 5.0,
    transport: Literal["shared_memory"] | None = None,
    start_timeout: float = 60.0,
    patience: float | None = None,
    _worker: str = WORKER,
) -> Cluster:
    """Start ``n`` workers on this host, in processes of their own.

    `cluster` does this too, and in a script that torchrun has started it joins the workers of torchrun; this function
    is refused there. No main guard is needed: the workers do not run your script. Nothing of the cluster can be reached
    from another host.

    Args:
        n: how many workers to start.
        threads: how many threads each worker computes with. Default: the cores, divided among the workers.
        devices: one device for each worker.
        device: one device for all workers. Default: the CPU.
        pin: gives each worker one core to itself; with a warning if there are more workers than cores.
        names: the names of the workers in messages.
        timeout: a worker that does not answer for so many seconds is lost. So is one whose stage holds Python's lock for
            so long, which only a C extension does.
        transport: how workers pass tensors to one another: "shared_memory" is the only way here.
        start_timeout: how many seconds the workers may take to start.
        patience: how many seconds a worker that waits for a value polls for it before it sleeps; waking it takes longer
            than polling. Default: 1 ms if every worker has cores of its own, else 0.

    >>> with local_cluster(2) as workers:  # doctest: +SKIP
    ...     workers
    <Cluster of 2 workers, open: worker0, worker1>
    """
    _check_system()
    cores = sorted(os.sched_getaffinity(0))
    names = checked_names(n, names, threads, devices, device, timeout=timeout, start_timeout=start_timeout)
    device_names = tuple(map(device_name, devices if devices is not None else [device or DEFAULT_DEVICE] * n))
    threads = threads or (1 if pin else max(1, len(cores) // n))
    _check_transport(transport)
    _check_is_only_process(n)
    check_none_open()
    note_local_cluster()
    _check_shares_memory()
    with in_words(f"{n} workers"):
        if pin:
            _warn_of_shared_cores(names, cores)
        config = LaunchConfig(
            worker=_worker,
            names=names,
            devices=device_names,
            threads=threads,
            cores=tuple(cores[i % len(cores)] for i in range(n)) if pin else None,
            controller=os.getpid(),
            timeout=timeout,
            patience=polling_time(patience, crowded=n * threads > len(cores)),
            log_level=LOGGER.getEffectiveLevel(),
        )
        return opened(partial(LocalEngine, config, start_timeout), timeout, start_timeout)


def _check_system() -> None:
    """Raise where the system calls of a cluster do not exist."""
    if sys.platform != "linux":
        raise ClusterError(
            f"workers need Linux, and this system is {sys.platform!r}; graphs, schedules and drawings work here, and a Pipe "
            f"runs in this process: pipe(x)"
        )


def _check_is_only_process(n: int) -> None:
    """Raise in one of several processes that torchrun has started: each of them would train on a cluster of its own."""
    rank, ranks = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "1")
    if rank is not None and ranks != "1":
        raise ClusterError(
            f"this is rank {rank} of {ranks} processes that run this script, by torchrun or something like it (RANK and "
            f"WORLD_SIZE are set), and local_cluster({n}) would start {n} workers for each of them; write cluster() in its "
            "place, which makes workers of these processes, or start the script with python. If it was started as one process, "
            "unset RANK and WORLD_SIZE"
        )


def _check_transport(transport: str | None) -> None:
    """Raise for a way that is not one between processes of a host."""
    if transport == "rpc":
        raise ClusterError(
            'transport="rpc" is for workers that torchrun has started, and this call starts workers on this host, which pass '
            "values through memory that both see; leave out transport, or start the script with torchrun"
        )
    check_choice("transport", transport, (None, "shared_memory"))


def _check_shares_memory() -> None:
    """Raise where processes of this host cannot share memory."""
    try:
        with uninterrupted():
            os.close(os.memfd_create("pippy"))
    except (OSError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise host_error(error, "memory that workers share") from error
        raise ClusterError(
            f"this host cannot share memory between processes, because memfd_create does not work here ({error}); allow "
            "memfd_create in the container's seccomp profile, or write cluster(n, join=True): workers that join pass values "
            "by TCP here"
        ) from error


def _warn_of_shared_cores(names: Sequence[str], cores: Sequence[int]) -> None:
    if len(names) <= len(cores):
        return
    shared = "; ".join(
        f"core {core}: {', '.join(on_it)}" for at, core in enumerate(cores) if len(on_it := names[at :: len(cores)]) > 1
    )
    warn(
        f"pin=True gives each worker a core, and this process may use {len(cores)} for {len(names)} workers, so some share one "
        f"and wait for each other ({shared}); start no more than {len(cores)}, or leave out pin, so that the system divides "
        "the cores"
    )
