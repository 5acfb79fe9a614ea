"""What strangers do at a port of TCP: they leave, say nothing, speak another protocol, and come by the thousand."""

import random
import socket
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.drivers.processes import listening

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
