"""The network interface of this host that leads to the others, and the address by which the others reach it."""

import os
import socket
import struct
from array import array
from contextlib import suppress
from dataclasses import dataclass
from fcntl import ioctl
from ipaddress import ip_address
from pathlib import Path

LOOPBACK = "lo"
CHOSEN_BY = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_SIOCGIFCONF = 0x8912
_REQUEST = 40  # bytes of Linux's struct ifreq: 16 of the name, then an address
_REQUESTS = 512


@dataclass(frozen=True)
class NetworkInterface:
    """A network interface, and the address of this host on it; None if it is not known.

    >>> link_named("lo")
    NetworkInterface(interface='lo', address='127.0.0.1')
    """

    interface: str | None = None
    address: str | None = None

    @property
    def leaves(self) -> bool:
        """Whether other hosts can reach it."""
        return self.address is not None and not ip_address(self.address).is_loopback


def addresses() -> list[tuple[str, str]]:
    """The interfaces of this host with their addresses, IPv4 first, without IPv6 addresses that are valid on one link only.

    >>> ("lo", "127.0.0.1") in addresses()
    True
    """
    return [*_of_version_4(), *_of_version_6()]


def interface_from_environment() -> tuple[str, str] | None:
    """The environment variable that names an interface, and the name; the first one if there are several, as for gloo."""
    for variable in CHOSEN_BY:
        if name := os.environ.get(variable, "").partition(",")[0].strip():
            return variable, name
    return None


def link_named(name: str) -> NetworkInterface:
    """The interface of this name, with its first address.

    >>> link_named("none")
    NetworkInterface(interface='none', address=None)
    """
    return NetworkInterface(name, next((address for interface, address in addresses() if interface == name), None))


def link_to(host: str, port: int) -> NetworkInterface:
    """The interface that leads to a host, by its name or an address. Nothing is sent.

    >>> link_to("127.0.0.1", 1)
    NetworkInterface(interface='lo', address='127.0.0.1')
    """
    with suppress(OSError):
        for family, kind, protocol, _, there in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(there)
                own_address = probe.getsockname()[0]
                if ip_address(own_address).is_loopback:
                    return link_named(LOOPBACK)
                return link_at(own_address)
    return NetworkInterface()


def link_at(address: str) -> NetworkInterface:
    """The interface of this host with an address.

    >>> link_at("127.0.0.1")
    NetworkInterface(interface='lo', address='127.0.0.1')
    """
    return NetworkInterface(next((name for name, each in addresses() if each == address), None), address)


def _of_version_4() -> list[tuple[str, str]]:
    buffer = array("B", bytes(_REQUEST * _REQUESTS))
    place, _ = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        size, _ = struct.unpack("iP", ioctl(probe.fileno(), _SIOCGIFCONF, struct.pack("iP", len(buffer), place)))
    requests = (buffer[start : start + _REQUEST].tobytes() for start in range(0, size, _REQUEST))
    return [(_name(each[:16]), socket.inet_ntoa(each[20:24])) for each in requests]


def _name(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode().partition(":")[0]  # eth0:1 is another address of eth0


def _of_version_6() -> list[tuple[str, str]]:
    lines = []
    with suppress(OSError):  # this system has no IPv6
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    named = [
        (name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))) for digits, *_, name in map(str.split, lines)
    ]
    return [(name, address) for name, address in named if not ip_address(address).is_link_local]
