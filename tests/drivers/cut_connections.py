"""Cuts the TCP connections between two workers of a host, as `ss -K` does: from inside one of them."""

import os
import socket
from contextlib import suppress
from pathlib import Path


def cut_connections_to_siblings():
    """Shut down all TCP connections of this process to other processes that have the same parent."""
    parent = os.getppid()
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    siblings = {inode for pid in children if int(pid) != os.getpid() for inode in _sockets(pid)}
    own = _sockets("self")
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inode_of = {(row[1], row[2]): row[9] for row in rows}
    for (here, there), inode in inode_of.items():
        if inode in own and inode_of.get((there, here)) in siblings:
            with suppress(OSError), socket.socket(fileno=os.dup(own[inode])) as end:
                end.shutdown(socket.SHUT_RDWR)


def _sockets(pid):
    """The file descriptors of a process's sockets, by inode."""
    found = {}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            kind, _, inode = os.readlink(fd).partition(":")
            if kind == "socket":
                found[inode[1:-1]] = int(fd.name)
    return found
