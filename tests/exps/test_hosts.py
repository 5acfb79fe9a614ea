"""Hosts that are network namespaces: what is sent arrives, later on a slow network; nothing is left, whatever happens."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from exps.peers.hosts import NoHosts, hosts, ip
from tests.drivers.processes import descendants, watched

ECHO = """
import socket
door = socket.create_server(("0.0.0.0", 7007))
print("listens on", socket.gethostname(), flush=True)
end = door.accept()[0]
while got := end.recv(1 << 20):
    end.sendall(got)
"""
ASK = """
import json, socket, sys, time
end = socket.create_connection((sys.argv[1], 7007), timeout=50)
end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
times = []
for _ in range(int(sys.argv[2])):
    started = time.perf_counter()
    end.sendall(b"x")
    assert end.recv(1) == b"x"
    times.append(time.perf_counter() - started)
sent, got = bytes(range(256)) * 1000, b""
started = time.perf_counter()
end.sendall(sent)
while len(got) < len(sent):
    got += end.recv(1 << 20)
assert got == sent
print(json.dumps([times, len(sent), time.perf_counter() - started]))
"""


def left():
    return [name for name in ip("netns", "list").split() if name.startswith(f"pippy{os.getpid()}-")]


@pytest.fixture(autouse=True)
def possible():
    try:
        with hosts(1):
            pass
    except NoHosts as error:
        pytest.skip(str(error))
    yield
    assert left() == []


@pytest.mark.parametrize(("delay", "rate"), [(0.0, 0.0), (0.02, 0.0), (0.0, 4e6)])
def test_what_is_sent_arrives_after_the_delay_and_at_the_rate(delay, rate):
    """Between the second host and the third."""
    with hosts(3, delay, rate=rate) as (_, here, there), ExitStack() as ended:
        command = there.command(sys.executable, "-S", "-c", ECHO)
        echo = ended.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        ended.callback(there.kill)
        assert echo.stdout.readline() == f"listens on {there.namespace}\n"
        words = [sys.executable, "-S", "-c", ASK, there.address, "3" if delay else "200"]
        asked = subprocess.run(here.command(*words), capture_output=True, text=True, timeout=280)
        times, count, seconds = json.loads(asked.stdout)
        assert min(times) >= 2 * delay
        assert delay or min(times) < 0.02  # the quickest of so many, on a busy machine, too
        assert not rate or seconds >= 8 * count / rate
        assert echo.wait(10) == 0


def test_a_firewall_lets_through_what_opens_a_connection_to_an_open_port_only():
    """And the other end's answers, which go to any port."""
    with hosts(2, ports="7000-7007") as (here, there), ExitStack() as ended:
        for port, connects in ((7007, True), (7008, False)):
            command = there.command(sys.executable, "-S", "-c", ECHO.replace("7007", str(port)))
            echo = ended.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            ended.callback(there.kill)
            assert echo.stdout.readline() == f"listens on {there.namespace}\n"
            ask = ASK.replace("7007", str(port)).replace("timeout=50", f"timeout={50 if connects else 1}")
            words = [sys.executable, "-S", "-c", ask, there.address, "1"]
            asked = subprocess.run(here.command(*words), capture_output=True, text=True, timeout=280)
            assert (asked.returncode == 0) is connects
            assert connects or "TimeoutError" in asked.stderr


def test_processes_end_with_their_host_also_when_the_block_fails():
    with pytest.raises(ZeroDivisionError), hosts(2, 0.001) as (here, there), ExitStack() as ended:
        sleeper = ended.enter_context(subprocess.Popen(there.command("sh", "-c", "echo runs; sleep 600"), stdout=-1))
        assert sleeper.stdout.readline() == b"runs\n"
        assert there.pids() and not here.pids()
        ended.enter_context(watched(sleeper.pid, *there.pids()))
        there.kill()
        raise ZeroDivisionError


def test_half_made_hosts_are_removed(monkeypatch):
    """The hosts are there before their links, whose name is refused here."""
    monkeypatch.setattr("exps.peers.hosts.LINK", "longer-than-a-link's-may-be")
    with pytest.raises(NoHosts, match=r"cannot be made here: .*not a valid ifname"), hosts(2):
        pass
    assert left() == []


def sleepers(host):
    """The processes of a host that sleep: not those that start them, which end at any moment."""
    return [pid for pid in host.pids() if name_of(pid) == "sleep"]


def name_of(pid):
    with suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/comm").read_text().strip()


@pytest.mark.parametrize("delay", [0.0, 0.001])
def test_hosts_end_with_the_process_that_made_them_though_it_was_killed(delay):
    """As where somebody kills the tests."""
    code = f"""
import subprocess, time
from exps.peers.hosts import hosts, ip
from tests.exps.test_hosts import sleepers
block = hosts(2, {delay})
here, there = block.__enter__()
subprocess.Popen(there.command("sleep", "600"))
while not sleepers(there):
    time.sleep(0.01)
print(*sleepers(there), flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=-1, text=True) as maker:
        try:
            pids = [*map(int, maker.stdout.readline().split()), *descendants(maker.pid)]
            with ExitStack() as stack:
                stack.enter_context(watched(*set(pids)))
                maker.kill()
        finally:
            maker.kill()
    assert f"pippy{maker.pid}-" not in ip("netns", "list")
