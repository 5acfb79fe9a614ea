"""What a host runs out of, for a moment, in the process of a worker; and sockets that are cut.

The TCP connections between two workers of a host are cut from inside of one: as `ss -K` does, or without a word.
"""

import ctypes
import gc
import os
import resource
import socket
import struct
import threading
from contextlib import suppress
from pathlib import Path

from pippy.drivers.wire.worker_transport import WorkerTransport

NO_MEMORY, NO_DESCRIPTORS, NO_SHARED_MEMORY, CUT_SOCKETS = range(20, 24)
SECONDS = 0.2  # that something is missing
SAID = ("memory", "descriptor", "Too many open files", "File too large")  # one of these is in the error
_SO_ATTACH_FILTER = 26
CONTROLLERS = "controller"  # the name of its process, for the system


def be_scarce(how):
    """Let this process have too little of something for a moment, or cut its sockets to other workers."""
    if how == NO_MEMORY:
        pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115
        _limit(resource.RLIMIT_AS, pages * os.sysconf("SC_PAGE_SIZE"))
    elif how == NO_DESCRIPTORS:
        _limit(resource.RLIMIT_NOFILE, 3)
    elif how == NO_SHARED_MEMORY:
        _limit(resource.RLIMIT_FSIZE, 0)  # of files in memory, too
    else:
        cut_sockets()


def cut_sockets():
    """Shut down this process's sockets to other workers."""
    for each in gc.get_objects():
        if isinstance(each, WorkerTransport):
            near = [each.connections[peer] for peer in each.sent.keys() & each.connections.keys()]
            for connection in (*near, *each.far_connections.values()):
                connection.socket.shutdown(socket.SHUT_RDWR)


def _limit(what, limit):
    soft, hard = resource.getrlimit(what)
    restoring = threading.Timer(SECONDS, resource.setrlimit, (what, (soft, hard)))
    restoring.daemon = True
    restoring.start()
    resource.setrlimit(what, (limit, hard))


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
