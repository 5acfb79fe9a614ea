"""A connection to a host that is cut off breaks, with something on its way or not; one to a stopped process does not."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack

import pytest

from exps.peers.hosts import NoHosts, hosts
from pippy.drivers.wire.messages.sockets import break_silent_connections
from tests.drivers.processes import open_descriptors, within

ACCEPTS = """
import socket
door = socket.create_server(("0.0.0.0", 7007))
print("listens", flush=True)
ends = []
while True:
    ends.append(door.accept()[0])
"""
WAITS = """
import runpy, select, socket, sys
file, cut_off, stopped = sys.argv[1:]
idle, sending, other = [socket.create_connection((each, 7007), timeout=20) for each in (cut_off, cut_off, stopped)]
runpy.run_path(file)["break_silent_connections"](1)
print("connected", flush=True)
input()
sending.sendall(b"more")
for each in (idle, sending):
    each.settimeout(None)
    try:
        print(each.recv(1), flush=True)
    except TimeoutError:
        print("broken", flush=True)
print("broken" if select.select([other], [], [], 1)[0] else "stands", flush=True)
"""
FILE = "pippy/drivers/wire/messages/sockets.py"


def test_a_cut_breaks_connections_that_wait_and_those_with_something_on_its_way():
    with ExitStack() as stack:
        try:
            here, there, stopped = stack.enter_context(hosts(3))
        except NoHosts as error:
            pytest.skip(str(error))

        def start(host, *arguments):
            command = host.command(sys.executable, "-S", "-c", *arguments)
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
            stack.enter_context(process)
            stack.callback(host.kill)
            return process

        accepting = [start(each, ACCEPTS) for each in (there, stopped)]
        assert [each.stdout.readline() for each in accepting] == ["listens\n"] * 2
        waits = start(here, WAITS, FILE, there.address, stopped.address)
        assert waits.stdout.readline() == "connected\n"
        os.kill(accepting[1].pid, signal.SIGSTOP)  # the kernel answers for it
        there.cut()
        with within(4 + 1 + 2):
            waits.stdin.write("\n")
            assert waits.stdout.read() == "broken\nbroken\nstands\n"


def test_no_descriptor_stays():
    before = open_descriptors()
    break_silent_connections(1)
    assert open_descriptors() == before
