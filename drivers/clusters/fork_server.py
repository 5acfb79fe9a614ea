"""The process that forks the local workers. It imports torch once for all of them.

    controller ──socket── fork server ──fork──▶ worker 0, worker 1, …
        sends the LaunchConfig; gets reports of started and dead workers

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

from pippy.drivers.clusters.forked_worker import start_worker
from pippy.drivers.clusters.launch_config import LaunchConfig
from pippy.drivers.clusters.launch_reports import Died, Failed, report
from pippy.drivers.clusters.parent_death import die_with_parent, watch_controller

# torch, and a module that the first backward would import in each worker.
NEEDED = ("torch", "torch.fx.experimental.symbolic_shapes")

# The first packet is the controller's sys.path; without it the import of pippy could fail.
BOOT = (
    "import pickle, socket, sys; s = socket.socket(fileno=int(sys.argv[1])); sys.path[:] = pickle.loads(s.recv(1 << 20)); "
    "from pippy.drivers.clusters.fork_server import main; main(s)"
)


def main(controller: socket.socket) -> None:
    """Run the fork server, from its first packet to its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
        self.children: dict[int, int] = {}
        self.deaths, alarm = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)

    def start(self) -> None:
        """Import what the workers need, once, and fork them."""
        worker = load(self.config.worker)
        gc.freeze()  # collections in the workers skip the imported objects, so their memory stays shared
        for index in range(len(self.config.names)):
            pid = os.fork()
            if pid == 0:
                start_worker(index, worker, self.config, self.controller)
            self.children[pid] = index
        for fds in self.config.sockets:
            for fd in fds:
                os.close(fd)

    def watch(self) -> None:
        """Wait until the controller ends. Reap and report workers that die before."""
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
        """Kill the workers, and delete the directory."""
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)
        for pid in self.children:
            os.waitpid(pid, 0)
        if self.config.directory:
            shutil.rmtree(self.config.directory, ignore_errors=True)

    def _reap(self) -> None:
        for pid, index in list(self.children.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self.children[pid]
                report(self.controller, Died(index, os.waitstatus_to_exitcode(status)))


def load(dotted: str) -> type:
    """The class with a dotted name.

    >>> load("pippy.drivers.clusters.launch_reports:Died").__name__
    'Died'
    """
    module, _, name = dotted.partition(":")
    for needed in NEEDED:
        importlib.import_module(needed)
    return getattr(importlib.import_module(module), name)
