"""Several hosts on one: network namespaces, joined by a bridge, or by a network on which each packet takes its time.

    host 1: 10.99.7.1 ──┐                    host 1 ──┐
    host 2: 10.99.7.2 ──┼── a bridge    or   host 2 ──┼── slow_network.py: each packet waits
    host 3: 10.99.7.3 ──┘                    host 3 ──┘

Each host has a name of its own, and an address that only the others reach. The bridge is in a namespace, too, so this
machine's own network stays as it is. The kernel's own delays (netem) are not in every kernel, so a process holds the packets.
"""

import fcntl
import itertools
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LINK = "eth0"  # on each host
ANY = "0-65535"
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_LARGE_PACKETS = 0x01 | 0x02 | 0x04  # sums are not computed, and TCP is not cut into packets: as on the bridge
_numbers = itertools.count()


class NoHosts(Exception):
    """Network namespaces cannot be made here; says why."""


@dataclass(frozen=True)
class Host:
    """One of the hosts. ``namespace`` is its name, and that by which `ip netns` knows it."""

    namespace: str
    address: str

    def command(self, *words: str) -> list[str]:
        """The words of a command that runs ``words`` on this host, and becomes that process.

        >>> Host("pippy7", "10.99.7.2").command("python", "train.py")[:4]
        ['ip', 'netns', 'exec', 'pippy7']
        """
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.namespace]
        return ["ip", "netns", "exec", self.namespace, *named, *words]

    def cut(self) -> None:
        """Take the host off the network, without a word to anybody."""
        ip("-n", self.namespace, "link", "set", LINK, "down")

    def mend(self) -> None:
        """Put the host back on the network."""
        ip("-n", self.namespace, "link", "set", LINK, "up")

    def pids(self) -> list[int]:
        """The processes that run here."""
        return [int(pid) for pid in ip("netns", "pids", self.namespace).split()]

    def kill(self) -> None:
        """Kill all processes at once. What the kernel would tell their peers is not sent if the host is cut before."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def hosts(n: int, delay: float = 0.0, ports: str = ANY, rate: float = 0.0) -> Iterator[list[Host]]:
    """So many hosts. A packet takes ``delay`` seconds from one to another; a link between two carries ``rate`` bits a second.

    Without a rate a link carries any number of bits. The processes of hosts are killed at the end of the block, or of this
    process, however it ends.

    ``ports``, as "29500,40000-40999", are those that a firewall between all of them leaves open.

    Raises NoHosts where they cannot be made: it takes root, Linux and iproute2.
    """
    with ExitStack() as stack:
        try:
            _end_with_this_process(stack)
            found = [_host(stack, number) for number in range(1, n + 1)]
            _slow(stack, found, delay, ports, rate) if delay or rate or ports != ANY else _bridge(stack, found)
            for number, host in enumerate(found, 1):
                ip("-n", host.namespace, "addr", "add", f"10.99.7.{number}/24", "dev", LINK)
                for link in ("lo", LINK):
                    ip("-n", host.namespace, "link", "set", link, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", None) or error
            raise NoHosts(f"network namespaces cannot be made here: {str(why).strip()}") from error
        yield found


def ip(*words: str) -> str:
    """Run `ip` with these words; returns what it prints."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30).stdout


def _end_with_this_process(stack: ExitStack) -> None:
    """Start a process that removes the hosts of this one when this one has ended without that."""
    script = Path(__file__).with_name("hosts_end.py")
    process = _beside(script, f"pippy{os.getpid()}-", start_new_session=True)  # Ctrl-C is for this process alone
    stack.callback(process.wait)
    stack.callback(process.kill)


def _beside(script: Path, *words: str, passed: Sequence[int] = (), **how: Any) -> "subprocess.Popen[bytes]":
    """Run a script that is told of this process's end by a file descriptor, its first argument."""
    this = os.pidfd_open(os.getpid())
    try:
        command = [sys.executable, "-S", str(script), str(this), *words]
        return subprocess.Popen(command, pass_fds=[this, *passed], stdin=subprocess.DEVNULL, **how)
    finally:
        os.close(this)


def _host(stack: ExitStack, number: int) -> Host:
    host = Host(f"pippy{os.getpid()}-{next(_numbers)}", f"10.99.7.{number}")
    _namespace(stack, host.namespace)
    stack.callback(host.kill)
    return host


def _namespace(stack: ExitStack, name: str) -> None:
    ip("netns", "add", name)
    stack.callback(ip, "netns", "del", name)


def _bridge(stack: ExitStack, joined: list[Host]) -> None:
    between = f"pippy{os.getpid()}-{next(_numbers)}"
    _namespace(stack, between)
    ip("-n", between, "link", "add", "bridge", "type", "bridge")
    ip("-n", between, "link", "set", "bridge", "up")
    for number, host in enumerate(joined):
        port = f"port{number}"
        ip("-n", between, *f"link add {port} type veth peer name {LINK} netns {host.namespace}".split())
        ip("-n", between, "link", "set", port, "master", "bridge", "up")


def _slow(stack: ExitStack, joined: list[Host], delay: float, ports: str, rate: float) -> None:
    ends = []
    with ExitStack() as opened:  # the process below keeps the ends
        for host in joined:
            name = f"pp{os.getpid()}.{next(_numbers)}"
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            opened.callback(os.close, end)
            flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
            fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
            fcntl.ioctl(end, _TUNSETOFFLOAD, _LARGE_PACKETS)
            ip("link", "set", name, "netns", host.namespace)
            ip("-n", host.namespace, "link", "set", name, "name", LINK, "txqueuelen", "10000")
            ends.append(end)
        script = Path(__file__).with_name("slow_network.py")
        process = _beside(script, str(delay), str(rate), ports, *map(str, ends), passed=ends)
    stack.callback(process.wait)
    stack.callback(process.kill)
