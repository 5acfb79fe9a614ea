"""The process that forks the local workers. It imports torch once for all of them.

    controller ──socket── fork server ──fork──▶ worker 0, worker 1, …
        sends the LaunchConfig, and a Replace or End for a worker that is lost; gets reports of started and dead workers

The fork server and the workers have a session of their own, so that Ctrl-C reaches only the controller. When the
controller ends in any way, its socket closes and its process ends. The fork server notices this, kills and reaps the
workers, and ends. Each worker watches the controller too, in case the fork server is stopped. If the fork server is killed,
the system kills the workers.
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
from itertools import chain

from pippy.drivers.engines.local.forked_worker import start_worker
from pippy.drivers.engines.local.launch_config import End, LaunchConfig, Replace
from pippy.drivers.engines.local.launch_reports import Died, Failed, killed_for_memory, report
from pippy.drivers.engines.local.parent_death import die_with_parent, watch_controller
from pippy.drivers.engines.standard_streams import open_standard_streams

# torch, and what the first command and the first backward would import in each worker.
NEEDED = ("torch", "numpy.random", "torch.fx.experimental.symbolic_shapes")

# The first packet is the controller's sys.path; without it the import of pippy could fail.
BOOT = (
    "import pickle, socket, sys; s = socket.socket(fileno=int(sys.argv[1])); sys.path[:] = pickle.loads(s.recv(1 << 20)); "
    "from pippy.drivers.engines.local.fork_server import run_fork_server; run_fork_server(s)"
)


def run_fork_server(controller: socket.socket) -> None:
    """Run the fork server, from its first packet to its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the thread that opened the cluster may have blocked any
    open_standard_streams()
    config: LaunchConfig = pickle.loads(controller.recv(1 << 20))
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
        """Import what the workers need, once, and fork them."""
        worker = load(self.config.worker)
        gc.freeze()  # collections in the workers skip the imported objects, so their memory stays shared
        self.worker = worker
        for index in range(len(self.config.names)):
            self._fork(index, self.config)
        _close(chain(*self.config.sockets))

    def watch(self) -> None:
        """Wait until the controller ends. Reap and report workers that die before, and end or replace those that it names."""
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
                request: Replace | End = pickle.loads(packet)
                self._end_worker(request.index)
                if isinstance(request, Replace):
                    self._replace(request, descriptors)

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

    def _fork(self, index: int, config: LaunchConfig) -> None:
        pid = os.fork()
        if pid == 0:
            _close(self.own_descriptors)
            start_worker(index, self.worker, config, self.controller)
        self.children[pid] = index, config.start

    def _end_worker(self, worker: int) -> None:
        """End what is left of a worker, which may be stopped."""
        for pid, (index, _) in list(self.children.items()):
            if index == worker:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                del self.children[pid]

    def _replace(self, request: Replace, descriptors: list[int]) -> None:
        """Fork another process in the place of a worker. If that fails, all others go on."""
        from pippy.drivers.wire.memory import no_descriptor  # it needs torch

        try:
            if len(descriptors) < 2:
                raise no_descriptor("the sockets of a worker")
            sockets: list[tuple[int, ...]] = [()] * len(self.config.names)
            sockets[request.index] = tuple(descriptors)
            self._fork(request.index, replace(self.config, sockets=tuple(sockets), start=request.start))
        except OSError as error:
            report(self.controller, Failed(request.index, f"{type(error).__name__}: {error}", request.start))
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
