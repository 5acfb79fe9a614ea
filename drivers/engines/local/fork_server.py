"""The process that forks the local workers. It imports torch once for all of them.

    controller ──socket── fork server ──fork──▶ worker 0, worker 1, …
        sends the LaunchConfig, and a Fork or End for a worker; gets reports of started and dead workers

The fork server and the workers have a session of their own, so that Ctrl-C reaches only the controller. When the
controller ends in any way, its socket closes and its process ends. The fork server notices this, kills and reaps the
workers, and ends. Each worker watches the controller too, in case the fork server is stopped.

If the fork server is killed, the system kills the workers: nobody else would end a worker that is stopped, or that computes
without Python's lock, when the controller is killed, too. Then the controller starts another fork server, which forks the
workers that it is asked for.

What they say to each other:

    LaunchConfig, Fork, End     the controller: the settings of a local cluster, and which worker to fork or to end
    Ready, Failed, Died         the fork server and the workers: a worker starts, cannot start, or has died

A report says which start of the worker it is about: a worker that was lost is started again, and reports of its earlier
processes may still come.
"""

import contextlib
import ctypes
import gc
import os
import pickle
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NoReturn

from pippy.drivers.base.host_errors import HostError, in_words, no_descriptor
from pippy.drivers.base.process import exit_at_once, open_standard_streams
from pippy.drivers.engines.routes import on_devices


@dataclass(frozen=True)
class LaunchConfig:
    """The settings of a local cluster, for the fork server and the workers.

    Attributes:
        worker: the dotted name of the class that the workers run.
        cores: the core of each worker, if they are pinned.
        controller: the controller's process.
        dies_with_thread: whether the fork server is killed when the thread of the controller that started it ends.
        sockets: the file descriptors of a worker's sockets to the controller: for messages, and for urgent ones.
        timeout: how many seconds a process may leave others without an answer.
        patience: how many seconds a worker that waits for a value polls for it before it sleeps.
        log_level: from which level on records of the workers are sent to the controller.
        start: which start of a worker it is: 1, and one more whenever another process takes its place.

    >>> LaunchConfig("package.module:Class", ("a", "b"), ("cuda:0", "cuda:1"), 1, None, 4711).near(0)
    [1]
    """

    worker: str
    names: tuple[str, ...]
    devices: tuple[str, ...]
    threads: int
    cores: tuple[int, ...] | None
    controller: int
    dies_with_thread: bool = False
    sockets: tuple[int, ...] = ()
    timeout: float = 5.0
    patience: float = 0.0
    log_level: int = 30
    start: int = 0

    def near(self, index: int) -> list[int]:
        """The other workers that compute on devices, if values may stay on them on their way from a worker."""
        return [worker for worker in on_devices(self.devices) if worker != index]


@dataclass(frozen=True)
class Fork:
    """Asks the fork server to end what is left of a worker, and to fork it; its two sockets come beside this.

    >>> Fork(1, start=1)
    Fork(index=1, start=1)
    """

    index: int
    start: int


@dataclass(frozen=True)
class End:
    """Asks the fork server to end what is left of a worker.

    >>> End(1)
    End(index=1)
    """

    index: int


LONGEST_TRACEBACK = 1 << 16  # a traceback is cut to this many characters; one packet of the socket holds it


@dataclass(frozen=True)
class Ready:
    """A worker is about to join.

    >>> Ready(0, 4711)
    Ready(index=0, pid=4711, start=0)
    """

    index: int
    pid: int
    start: int = 0


@dataclass(frozen=True)
class Failed:
    """A worker, or the fork server (None), failed to start.

    >>> Failed(None, "Traceback ...")
    Failed(index=None, text='Traceback ...', start=0)
    """

    index: int | None
    text: str
    start: int = 0


@dataclass(frozen=True)
class Died:
    """A worker has ended; ``status`` is an exit status, or minus the number of a signal.

    ``out_of_memory`` says whether the system has killed a process meanwhile because memory ran out.

    >>> print(Died(0, -9).how, "|", Died(0, 3).how)
    killed by SIGKILL | it ended with status 3
    >>> print(Died(0, -9, out_of_memory=True).how)
    killed by SIGKILL, when the system killed a process because memory ran out (dmesg says which; driver.memory ...
    """

    index: int
    status: int
    start: int = 0
    out_of_memory: bool = False

    @property
    def how(self) -> str:
        """In words."""
        if self.status >= 0:
            return f"it ended with status {self.status}"
        if -self.status not in list(signal.Signals):
            return f"killed by signal {-self.status}"
        how = f"killed by {signal.Signals(-self.status).name}"
        if self.status == -signal.SIGKILL and self.out_of_memory:
            return (
                f"{how}, when the system killed a process because memory ran out (dmesg says which; driver.memory says what a "
                "worker holds; the memory may be that of a container or a job)"
            )
        return how


def killed_for_memory() -> int:
    """How many processes the system has killed because memory ran out, in all or in a container; 0 if it does not say.

    >>> killed_for_memory() >= 0
    True
    """
    with contextlib.suppress(OSError), open("/proc/vmstat") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return 0


def report(controller: socket.socket, message: Ready | Failed | Died) -> None:
    """Send a report, if the controller is there."""
    if isinstance(message, Failed):
        message = replace(message, text=message.text[-LONGEST_TRACEBACK:])
    with contextlib.suppress(OSError):
        controller.send(pickle.dumps(message), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)


_PR_SET_PDEATHSIG = 1


def watch_controller(
    waiting: "select.poll", controller: socket.socket, config: LaunchConfig, events: int = 0
) -> list[int]:
    """Register the controller's socket and, if the system allows it, its process, to notice when the controller ends.

    The socket alone is not enough: processes that the controller has forked hold it open, too. ``events`` are those of the
    socket to wait for, beside its end. Returns the file descriptors that were opened.
    """
    waiting.register(controller, events)  # poll reports a hang-up without being asked for it
    with contextlib.suppress(OSError):
        process = os.pidfd_open(config.controller)
        waiting.register(process, select.POLLIN)
        return [process]
    return []


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


def start_worker(index: int, config: LaunchConfig, controller: socket.socket) -> NoReturn:
    """Run a worker in this process, then exit."""
    status = 1
    try:
        with in_words(f"worker {config.names[index]!r}"):
            become_worker(index, config, controller)
            run_worker(index, config, controller)
        status = 0
    except BaseException as error:
        text = str(error) if isinstance(error, HostError) else traceback.format_exc()
        report(controller, Failed(index, text, config.start))
        traceback.print_exc()
    finally:
        exit_at_once(status)


def become_worker(index: int, config: LaunchConfig, controller: socket.socket) -> None:
    """Set up this process: signals, its end with the controller's, its core, its output."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with_parent(os.getppid())
    threading.Thread(target=die_with_controller, args=(controller, config), daemon=True).start()
    if config.cores:
        os.sched_setaffinity(0, {config.cores[index]})
    for stream in (sys.stdout, sys.stderr):  # so that all is written when a worker is killed
        if stream is not None:
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def run_worker(index: int, config: LaunchConfig, controller: socket.socket) -> None:
    """Make a worker, let it be reached, and run it."""
    from pippy.drivers.engines.connected_worker import ConnectedWorker, RunSettings
    from pippy.drivers.wire.messages.doors import THIS_HOST

    given = config.worker, config.names, config.devices[index], config.threads, config.timeout, config.patience
    running = ConnectedWorker(index, THIS_HOST, RunSettings(*given, config.log_level, tuple(config.near(index))))
    messages, urgent = (socket.socket(fileno=each) for each in config.sockets)
    running.start(messages, urgent)
    report(controller, Ready(index, os.getpid(), config.start))
    running.run()


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
        from pippy.drivers.engines.connected_worker import load

        load(self.config.worker)
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
        """Kill the workers."""
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)
        for pid in self.children:
            os.waitpid(pid, 0)

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
            if len(descriptors) < 2:
                raise no_descriptor(f"the sockets of {name}")
            with in_words(name):
                pid = os.fork()
            if pid == 0:
                _close(self.own_descriptors)
                config = replace(self.config, sockets=tuple(descriptors), start=request.start)
                start_worker(index, config, self.controller)
            self.children[pid] = index, request.start
        except HostError as error:
            report(self.controller, Failed(index, str(error), request.start))
        _close(descriptors)


def _close(descriptors: Iterable[int]) -> None:
    for each in descriptors:
        os.close(each)
