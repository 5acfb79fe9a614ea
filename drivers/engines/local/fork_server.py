"""The process that forks the local workers. It imports torch once for all of them.

    controller ──socket── fork server ──fork──▶ worker 0, worker 1, …
        sends the LaunchConfig, and a Fork or End for a worker; gets reports of started and dead workers

The fork server and the workers have a session of their own, so that Ctrl-C reaches only the controller. When the
controller ends in any way, its socket closes and its process ends. The fork server notices this, kills and reaps the
workers, and ends. Each worker watches the controller too, in case the fork server is stopped.

If the fork server is killed, the system kills the workers: nobody else would end a worker that is stopped, or that computes
without Python's lock, when the controller is killed, too. Then the controller starts another fork server, which forks the
workers that it is asked for.
"""

import gc
import importlib
import os
import pickle
import select
import shutil
import signal
import socket
import traceback
from collections.abc import Iterable
from dataclasses import replace

from pippy.drivers.base.host_errors import HostError, in_words, no_descriptor
from pippy.drivers.engines.local.forked_worker import start_worker
from pippy.drivers.engines.local.launch_config import End, Fork, LaunchConfig
from pippy.drivers.engines.local.launch_reports import Died, Failed, killed_for_memory, report
from pippy.drivers.engines.local.parent_death import die_with_parent, watch_controller
from pippy.drivers.engines.standard_streams import open_standard_streams

# torch, and what the first command and the first backward would import in each worker.
NEEDED = ("torch", "numpy.random", "torch.fx.experimental.symbolic_shapes")

PACKET = 1 << 16  # a socket takes no packet of any size
# First comes the controller's sys.path, without which the import of pippy could fail, in as many packets as it takes.
BOOT = (
    "import pickle, socket, sys; s = socket.socket(fileno=int(sys.argv[1])); "
    f"sys.path[:], config = pickle.loads(b''.join(s.recv({PACKET}) for _ in range(int(s.recv(16))))); "
    "from pippy.drivers.engines.local.fork_server import run_fork_server; run_fork_server(s, pickle.loads(config))"
)


def send_boot(fork_server: socket.socket, path: list[str], config: LaunchConfig) -> None:
    """Send the packets that ``BOOT`` reads."""
    content = pickle.dumps((path, pickle.dumps(config)))
    packets = [content[at : at + PACKET] for at in range(0, len(content), PACKET)]
    for packet in (b"%d" % len(packets), *packets):
        fork_server.send(packet, socket.MSG_NOSIGNAL)


def run_fork_server(controller: socket.socket, config: LaunchConfig) -> None:
    """Run the fork server to its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the thread that opened the cluster may have blocked any
    open_standard_streams()
    if config.dies_with_thread:
        die_with_parent(config.controller)
    fork_server = ForkServer(controller, config)
    try:
        fork_server.start()
        fork_server.watch()
    except Exception:
        report(controller, Failed(None, traceback.format_exc()))
    finally:
        fork_server.end()
        os._exit(0)  # the controller waits for this; to take Python and torch apart would keep it most of a second


class ForkServer:
    """Starts the workers and watches them. ``deaths`` is a file descriptor that is readable when a worker has died."""

    def __init__(self, controller: socket.socket, config: LaunchConfig) -> None:
        self.controller, self.config = controller, config
        self.killed_for_memory = killed_for_memory()
        self.children: dict[int, tuple[int, int]] = {}  # the worker of each process, and which start of it
        self.own_descriptors: list[int] = []  # file descriptors that are no business of the workers
        self.deaths, alarm = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)

    def start(self) -> None:
        """Import what the workers need, once."""
        self.worker = load(self.config.worker)
        gc.freeze()  # collections in the workers skip the imported objects, so their memory stays shared

    def watch(self) -> None:
        """Wait until the controller ends. Fork and end the workers that it names, reap and report those that die."""
        waiting, controller = select.poll(), self.controller.fileno()
        self.own_descriptors += watch_controller(waiting, self.controller, self.config, select.POLLIN)
        waiting.register(self.deaths, select.POLLIN)
        while True:
            events = dict(waiting.poll())
            if events.keys() - {self.deaths, controller} or events.get(controller, select.POLLIN) != select.POLLIN:
                return
            if self.deaths in events:
                os.read(self.deaths, 4096)
                self._reap()
            if controller in events:
                packet, descriptors, *_ = socket.recv_fds(self.controller, 1 << 16, 2)
                request: Fork | End = pickle.loads(packet)
                self._end_worker(request.index)
                if isinstance(request, Fork):
                    self._fork_worker(request, descriptors)

    def end(self) -> None:
        """Kill the workers, and delete the directory."""
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)
        for pid in self.children:
            os.waitpid(pid, 0)
        if self.config.directory:
            shutil.rmtree(self.config.directory, ignore_errors=True)

    def _reap(self) -> None:
        for pid, (index, start) in list(self.children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.children[pid]
                before, self.killed_for_memory = self.killed_for_memory, killed_for_memory()
                status = os.waitstatus_to_exitcode(status)
                report(self.controller, Died(index, status, start, self.killed_for_memory > before))

    def _end_worker(self, worker: int) -> None:
        """End what is left of a worker, which may be stopped."""
        for pid, (index, _) in list(self.children.items()):
            if index == worker:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                del self.children[pid]

    def _fork_worker(self, request: Fork, descriptors: list[int]) -> None:
        """Fork a worker. If that fails, all others go on."""
        index, name = request.index, f"worker {self.config.names[request.index]!r}"
        try:
            if len(descriptors) < 2 and not self.config.uses_rpc:
                raise no_descriptor(f"the sockets of {name}")
            with in_words(name):
                pid = os.fork()
            if pid == 0:
                _close(self.own_descriptors)
                config = replace(self.config, sockets=tuple(descriptors), start=request.start)
                start_worker(index, self.worker, config, self.controller)
            self.children[pid] = index, request.start
        except HostError as error:
            report(self.controller, Failed(index, str(error), request.start))
        _close(descriptors)


def _close(descriptors: Iterable[int]) -> None:
    for each in descriptors:
        os.close(each)


def load(dotted: str) -> type:
    """The class with a dotted name.

    >>> load("pippy.drivers.engines.local.launch_reports:Died").__name__
    'Died'
    """
    module, _, name = dotted.partition(":")
    for needed in NEEDED:
        importlib.import_module(needed)
    return getattr(importlib.import_module(module), name)
