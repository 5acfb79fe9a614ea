"""Helpers for tests of processes, and what strangers do at a port of TCP: they leave, say nothing, and come by the thousand."""

import gc
import os
import random
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

from pippy.drivers.engines.cluster import _open, _opened
from pippy.drivers.engines.local.local_cluster import local_cluster


def close_open_cluster():
    """End the workers' processes, if this thread has a cluster of them: another can be opened then. Threads go on."""
    if (cluster := _open(_opened.get(threading.current_thread()))) is not None:
        cluster.close()


def kept_open(held, workers):
    """The cluster that ``held`` has for many tests, opened again after a test that broke it or closed it."""
    if not held or held[0].session.broken:
        close_open_cluster()
        held[:] = [local_cluster(workers, threads=1)]
    return held[0]


STALL = 3.0  # seconds for which a process may get no core. What would happen without the promise must take longer


@contextmanager
def within(seconds):
    """The block must end so soon, or later as the machine has more to do than it can, and a process may have stalled."""
    start = time.monotonic()
    yield
    took = time.monotonic() - start
    assert took < allowing_for(seconds), f"took {took:.2f} s where {wanting_a_core():.1f} processes wanted each core"


def allowing_for(seconds):
    """What may take so many seconds on a machine that has nothing else to do takes no longer than this on any."""
    return seconds * max(1.0, wanting_a_core()) + STALL


def wanting_a_core():
    """How many processes want each core: over the last minute, or now, for a minute may have been quiet until now."""
    waiting = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    return max(os.getloadavg()[0], waiting) / (os.cpu_count() or 1)


def until(found, limit=30.0):
    """Wait until something holds."""
    end = time.monotonic() + allowing_for(limit)
    while not found() and time.monotonic() < end:
        time.sleep(0.01)
    return found()


@contextmanager
def hearing_of_deaths(session):
    """How a worker died is waited for as long as it takes: a peer that finds the connection closed may report it first."""
    deaths = session._deaths
    with patch.object(session, "_deaths", lambda wait: deaths(100 * wait)):
        yield


@contextmanager
def watched(*processes, within=3.0):
    """At the end all of these processes must have ended in time, as for `within`; others are killed, and the test fails."""
    with ExitStack() as stack:
        found = {stack.enter_context(os.fdopen(os.pidfd_open(pid), "rb", 0)): pid for pid in processes}
        try:
            yield
            end = time.monotonic() + allowing_for(within)
            left = dict(found)
            while left and (done := select.select(list(left), [], [], max(0, end - time.monotonic()))[0]):
                for fd in done:
                    del left[fd]
            assert not left, f"still there after {within:g} s: {sorted(left.values())}"
        finally:
            for fd, pid in found.items():
                if not select.select([fd], [], [], 0)[0]:
                    os.kill(pid, signal.SIGKILL)


class Forked:
    """A fork of this process that runs a function and ends. Its standard error is a pipe."""

    def __init__(self, body):
        self._said, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.dup2(writing, 2)
                sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
                body()
                os._exit(0)
            except SystemExit as end:
                os._exit(end.code)
            except BaseException:
                os.write(writing, traceback.format_exc().encode())
            finally:
                os._exit(99)
        os.close(writing)

    def ended(self):
        """The exit status, and what was written."""
        with watched(self.pid), within(10), open(self._said) as said:
            text = said.read()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), text


def stop(pid):
    """Stop a process, and wait until it is: until one of its threads has taken the signal up, the others run."""
    os.kill(pid, signal.SIGSTOP)
    while {_state(each) for each in Path(f"/proc/{pid}/task").iterdir()} != {"T"}:
        time.sleep(0.001)


def strike(pid, number):
    """Send a signal that nobody survives, or that stops a process."""
    if number == signal.SIGSTOP:
        stop(pid)
    else:
        os.kill(pid, number)


def _state(thread):
    with suppress(OSError):  # it has ended
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    return "T"


def listening(processes):
    """The sockets of every kind to which others could connect, of any of these processes, as rows of /proc/net."""
    return {row for pid in processes for row in _listening(pid)}


def _listening(pid):
    own = {link[8:-1] for link in links(Path(f"/proc/{pid}/fd")) if link.startswith("socket:[")}
    # Where a row has the inode, and what it has while others can connect: TCP's state LISTEN, a UDP socket that is bound to a
    # port, SO_ACCEPTCON among the flags of a unix socket, or the name of one of datagrams, which can be sent there.
    for table, inode, is_open in (
        ("tcp", 9, lambda row: row[3] == "0A"),
        ("tcp6", 9, lambda row: row[3] == "0A"),
        ("udp", 9, lambda row: True),
        ("udp6", 9, lambda row: True),
        ("unix", 6, lambda row: int(row[3], 16) & 0x10000 or (row[4] == "0002" and len(row) > 7)),
    ):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            row = line.split()
            if row[inode] in own and is_open(row):
                yield f"{table} {row[inode]}"


def unprobed(processes):
    """How many connections of TCP of these processes the kernel does not probe while they are quiet."""
    inodes = {link[8:-1] for pid in processes for link in links(Path(f"/proc/{pid}/fd")) if link.startswith("socket:[")}
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[9] in inodes and row[3] == "01" and not row[5].startswith("02:") for row in rows)


def open_descriptors():
    """How many descriptors this process has open, without those of garbage: a collection meanwhile would close them."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def shared_files():
    """The names of files in /dev/shm. A folder there is one that another test fills."""
    return {each.name for each in os.scandir("/dev/shm") if not each.is_dir()}


def assert_no_more_shared_files(before):
    """What others have in /dev/shm for a moment goes away; what was left there stays."""
    end = time.monotonic() + allowing_for(5)
    while (more := shared_files() - before) and time.monotonic() < end:
        time.sleep(0.01)
    assert not more


@contextmanager
def few_descriptors(free):
    """This process can open only so many more."""
    gc.collect()  # or a collection might close some meanwhile
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    with suppress(OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1 + free, hard))
        while True:
            taken.append(os.eventfd(0))
    for fd in taken[:free]:
        os.close(fd)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken[free:]:
            os.close(fd)


def links(folder):
    for link in folder.iterdir():
        with suppress(OSError):  # it is gone
            yield os.readlink(link)


def children(pid):
    """The processes that a process has started."""
    for each in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            yield from map(int, each.read_text().split())


def descendants(pid):
    """The processes that a process has started, those that they have started, and so on."""
    for child in children(pid):
        yield child
        yield from descendants(child)


@contextmanager
def interrupted(after):
    """Sends this process SIGINT, so many seconds later."""
    stop = threading.Event()

    def run():
        if not stop.wait(after):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


# Strangers


HTTP = b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n"


def ports_of(pids):
    """The places at which any of these processes listens for TCP of version 4."""
    inodes = {row.split()[1] for row in listening(pids) if row.startswith("tcp ")}
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = [row[1].split(":") for row in rows if row[3] == "0A" and row[9] in inodes]
    return [(socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)) for address, port in found]


@contextmanager
def half_open(connect, count):
    """So many connections that say nothing, or half of what could be a length. ``connect`` makes them."""
    with ExitStack() as stack:
        ends = [stack.enter_context(connect()) for _ in range(count)]
        for end in ends[::2]:
            end.sendall(b"\x40\0\0\0")
        yield ends


def say(end, *words):
    """Say this, if the other end listens, and leave."""
    with end, suppress(OSError):
        for each in words:
            end.sendall(each)


def attack(connect):
    """Strangers come and leave, say a line of HTTP, or what comes to mind."""
    generator = random.Random(7)
    for words in ([], [HTTP], *([generator.randbytes(size)] for size in (1, 8, 100, 1 << 16))):
        with suppress(ConnectionRefusedError):  # nobody listens
            say(connect(), *words)


def come_by_the_thousand(place):
    """A thousand connect at once."""
    with ExitStack() as stack:
        for _ in range(1000):
            end = stack.enter_context(socket.socket())
            end.setblocking(False)
            end.connect_ex(place)
