"""The process that the local workers are forked from: it imports torch once, for all of them.

    controller ──socket── fork server ──fork──▶ worker 0, worker 1, …
        the config goes down, word of starts and deaths comes up; when the controller is gone, all go

The fork server and the workers have a session of their own, so Ctrl-C is the controller's alone. Whatever way the controller
ends, the fork server sees its end of the socket closed or its process gone, kills and reaps the workers, and ends. Each worker
watches the same two for itself, in case the fork server is stopped, and dies with the fork server, in case that is killed.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn

LONGEST = 1 << 16  # a traceback is cut to this many characters; one packet of the socket holds it
CONTROLLER = "controller"  # its name for RPC
_PR_SET_PDEATHSIG = 1
# Beside torch itself, what the first backward would import, in each worker on its own.
NEEDED = ("torch", "torch.fx.experimental.symbolic_shapes")

# The first packet is the controller's sys.path, without which pippy itself might not be found.
BOOT = (
    "import pickle, socket, sys; s = socket.socket(fileno=int(sys.argv[1])); sys.path[:] = pickle.loads(s.recv(1 << 20)); "
    "from pippy.drivers.clusters.fork_server import main; main(s)"
)


@dataclass(frozen=True)
class LaunchConfig:
    """What the controller tells the fork server.

    ``worker`` is the dotted name of the class that the workers run, ``transport`` how they pass tensors ("shared_memory",
    "rpc" or "none"), ``directory`` a private one where all meet, ``cores`` the core of each if they are pinned, ``bound``
    whether the fork server may die with the controller's thread, which is the main one, ``lines`` the file descriptor of
    each worker's line to the controller, if there are any, and ``patience`` how long a worker that waits stays awake.

    >>> LaunchConfig("package.module:Class", ("a", "b"), ("cpu", "cpu"), 1, None, "none", "shm", "", 4711, False).rpc_name(0)
    'worker0'
    """

    worker: str
    names: tuple[str, ...]
    devices: tuple[str, ...]
    threads: int
    cores: tuple[int, ...] | None
    transport: str
    rpc_transport: str
    directory: str
    controller: int
    bound: bool
    sockets: tuple[int, ...] = ()
    patience: float = 0.0

    def rpc_name(self, index: int) -> str:
        """The name that a worker has for RPC."""
        return f"worker{index}"

    @property
    def has_sockets(self) -> bool:
        """Whether the controller and each worker have a line to one another."""
        return self.transport == "shared_memory"

    @property
    def meeting(self) -> str:
        """Where the processes find one another."""
        return f"file://{self.directory}/store"


@dataclass(frozen=True)
class Ready:
    """A worker is about to join.

    >>> Ready(0, 4711)
    Ready(index=0, pid=4711)
    """

    index: int
    pid: int


@dataclass(frozen=True)
class Failed:
    """A worker, or the fork server (None), failed to start.

    >>> Failed(None, "Traceback ...")
    Failed(index=None, text='Traceback ...')
    """

    index: int | None
    text: str


@dataclass(frozen=True)
class Died:
    """A worker has ended; ``status`` is an exit status, or minus the number of a signal.

    >>> print(Died(0, -9).how, "|", Died(0, 3).how)
    killed by SIGKILL | it ended with status 3
    """

    index: int
    status: int

    @property
    def how(self) -> str:
        """In words."""
        if self.status < 0:
            return f"killed by {signal.Signals(-self.status).name}"
        return f"it ended with status {self.status}"


def main(controller: socket.socket) -> None:
    """What the fork server does, from its first packet to its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config: LaunchConfig = pickle.loads(controller.recv(1 << 20))
    if config.bound:
        die_with_parent(config.controller)
    fork_server = ForkServer(controller, config)
    try:
        fork_server.start()
        fork_server.watch()
    except Exception:
        report(controller, Failed(None, traceback.format_exc()))
    finally:
        fork_server.end()


class ForkServer:
    """The fork server's own view of its workers: their processes, and a file descriptor that tells of their deaths."""

    def __init__(self, controller: socket.socket, config: LaunchConfig) -> None:
        self.controller, self.config = controller, config
        self.children: dict[int, int] = {}
        self.deaths, alarm = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)

    def start(self) -> None:
        """Import what the workers need, once, and fork them."""
        worker = load(self.config.worker)
        gc.freeze()  # what was imported stays: collections in the workers need not look at it, nor unshare its memory
        pairs = self._pairs()
        for index in range(len(self.config.names)):
            pid = os.fork()
            if pid == 0:
                start_worker(index, worker, self.config, self.controller, pairs)
            self.children[pid] = index
        for pair in pairs.values():
            for end in pair:
                end.close()
        for fd in self.config.sockets:
            os.close(fd)

    def watch(self) -> None:
        """Wait until the controller is gone; reap workers that die before, and tell."""
        waiting = select.poll()
        watch_controller(waiting, self.controller, self.config)
        waiting.register(self.deaths, select.POLLIN)
        while True:
            found = {fd for fd, _ in waiting.poll()}
            if found - {self.deaths}:
                return
            os.read(self.deaths, 4096)
            self._reap()

    def end(self) -> None:
        """Leave nothing."""
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)
        for pid in self.children:
            os.waitpid(pid, 0)
        shutil.rmtree(self.config.directory, ignore_errors=True)

    def _pairs(self) -> dict[tuple[int, int], tuple[socket.socket, socket.socket]]:
        if self.config.transport != "shared_memory":
            return {}
        many = range(len(self.config.names))
        return {(a, b): socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for a in many for b in many if a < b}

    def _reap(self) -> None:
        for pid, index in list(self.children.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self.children[pid]
                report(self.controller, Died(index, os.waitstatus_to_exitcode(status)))


def start_worker(
    index: int, worker: type, config: LaunchConfig, controller: socket.socket, pairs: dict[Any, Any]
) -> NoReturn:
    """The life of a forked worker."""
    status = 1
    try:
        become_worker(index, config, controller)
        peers = {
            other: pairs[min(index, other), max(index, other)][index > other] for other in others(index, config, pairs)
        }
        for pair in pairs.values():
            for end in pair:
                if end not in peers.values():
                    end.close()
        for other, fd in enumerate(config.sockets):
            if other != index:
                os.close(fd)
        run_worker(index, worker, config, controller, peers)
        status = 0
    except BaseException:
        report(controller, Failed(index, traceback.format_exc()))
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def others(index: int, config: LaunchConfig, pairs: dict[Any, Any]) -> list[int]:
    """The workers that this one shares a socket with."""
    return [other for other in range(len(config.names)) if pairs and other != index]


def become_worker(index: int, config: LaunchConfig, controller: socket.socket) -> None:
    """What a fresh child sets before anything else."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with_parent(os.getppid())
    threading.Thread(target=die_with_controller, args=(controller, config), daemon=True).start()
    if config.cores:
        os.sched_setaffinity(0, {config.cores[index]})
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr] # a worker that is killed keeps back no line


def run_worker(
    index: int, worker: type, config: LaunchConfig, controller: socket.socket, peers: dict[int, socket.socket]
) -> None:
    """Make a worker, join the group, and run it."""
    import torch

    from pippy.drivers.transport import rpc
    from pippy.drivers.transport.message_queue import MessageQueue
    from pippy.drivers.workers.worker_context import WorkerContext

    torch.set_num_threads(config.threads)
    device = config.devices[index]
    torch.empty(0, device=device)  # a device that does not work is told of now
    messages = MessageQueue()
    transport = make_transport(config, index, peers, messages)
    running = worker(WorkerContext(index, config.names, messages, transport, device, config.threads))
    rpc.serve(rpc.Served(messages, running.urgent, getattr(transport, "deliver", ignore)))
    report(controller, Ready(index, os.getpid()))
    rpc.join(config.rpc_name(index), index + 1, len(config.names) + 1, config.meeting, config.rpc_transport, "lo")
    running.run()


def make_transport(config: LaunchConfig, index: int, peers: dict[int, socket.socket], messages: Any) -> Any:
    """How this worker passes tensors to the others, and answers to the controller; nothing, if it has none to pass."""
    from pippy.drivers.transport import rpc

    if config.transport == "shared_memory":
        from pippy.drivers.transport.message_connection import WorkerMessageConnection
        from pippy.drivers.transport.shared_memory_transport import SharedMemoryTransport

        end = socket.socket(fileno=config.sockets[index])
        connection = WorkerMessageConnection(
            end, messages, lambda number, packed: rpc.deliver(CONTROLLER, (index, number), packed)
        )
        return SharedMemoryTransport(
            index, peers, device=config.devices[index], controller=connection.connection, patience=config.patience
        )
    if config.transport == "rpc":
        from pippy.drivers.transport.rpc_transport import RpcTransport

        return RpcTransport(
            index, lambda to, key, value: rpc.deliver(f"worker{to}", key, value), device=config.devices[index]
        )
    return None


def ignore(key: Any, value: Any) -> None:
    """What arrives for a worker whose transport takes nothing from RPC."""


def load(dotted: str) -> type:
    """The class that a dotted name names.

    >>> load("pippy.drivers.clusters.fork_server:Died").__name__
    'Died'
    """
    module, _, name = dotted.partition(":")
    for needed in NEEDED:
        importlib.import_module(needed)
    return getattr(importlib.import_module(module), name)


def report(controller: socket.socket, word: Ready | Failed | Died) -> None:
    """Tell the controller, if it is there."""
    if isinstance(word, Failed):
        word = Failed(word.index, word.text[-LONGEST:])
    with contextlib.suppress(OSError):
        controller.send(pickle.dumps(word), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)


def watch_controller(waiting: "select.poll", controller: socket.socket, config: LaunchConfig) -> None:
    """Register what tells that the controller is gone: its socket, and its process where the system can say.

    The socket alone is not enough: processes that the controller has forked hold it open, too.
    """
    waiting.register(controller, 0)  # a hang-up is told of without being asked for
    with contextlib.suppress(OSError):
        waiting.register(os.pidfd_open(config.controller), select.POLLIN)


def die_with_controller(controller: socket.socket, config: LaunchConfig) -> None:
    """A worker's thread that waits for the controller's end."""
    waiting = select.poll()
    watch_controller(waiting, controller, config)
    waiting.poll()
    os._exit(1)


def die_with_parent(parent: int) -> None:
    """Have the system kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
