"""Cuts the TCP connections between two workers of a host, from inside of one: as `ss -K` does, or without a word."""

import ctypes
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

_SO_ATTACH_FILTER = 26
CONTROLLERS = "controller"  # the name of its process, for the system


def cut_connections_to_siblings(silently=False):
    """Shut down all TCP connections of this process to others of its parent, but for the controller's; or let nothing in."""
    parent = os.getppid()
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    cut = [pid for pid in children if int(pid) != os.getpid() and _name(pid) != CONTROLLERS]
    siblings = {inode for pid in cut for inode in _sockets(pid)}
    own = _sockets("self")
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inode_of = {(row[1], row[2]): row[9] for row in rows}
    for (here, there), inode in inode_of.items():
        if inode in own and inode_of.get((there, here)) in siblings:
            with suppress(OSError), socket.socket(fileno=os.dup(own[inode])) as end:
                let_nothing_in(end) if silently else end.shutdown(socket.SHUT_RDWR)


def let_nothing_in(end):
    """Drop each packet as it comes, the acknowledgements, too: by a filter of one instruction, "return 0 bytes"."""
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    end.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(instruction)))


def call_this_process(name):
    """Give this process a name for the system."""
    Path("/proc/self/comm").write_text(name)


def _name(pid):
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _sockets(pid):
    """The file descriptors of a process's sockets, by inode."""
    found = {}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            kind, _, inode = os.readlink(fd).partition(":")
            if kind == "socket":
                found[inode[1:-1]] = int(fd.name)
    return found
