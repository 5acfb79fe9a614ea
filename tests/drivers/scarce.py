"""What a host runs out of, for a moment, in the process of a worker; and sockets that are cut."""

import gc
import os
import resource
import socket
import threading

from pippy.drivers.wire.worker_transport import WorkerTransport

NO_MEMORY, NO_DESCRIPTORS, NO_SHARED_MEMORY, CUT_SOCKETS = range(20, 24)
SECONDS = 0.2  # that something is missing
SAID = ("memory", "descriptor", "Too many open files", "File too large")  # one of these is in the error


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
