"""How long does it take to send a tensor to another process of this host, compared with gloo?

Two processes, each pinned to a core of its own, with one thread. ping-pong: microseconds from a send until the value
has arrived, half of a round trip. pipelined: microseconds per value if 32 are sent before one answer. The other rows
are the time of a send, and of a receive of a value that has arrived, on the thread that computes.

    python exps/transport.py [--rounds 300]

Finding, on two cores shared with other work (load average 7, so only the rough order counts): a send takes its thread 13
microseconds and a receive 13 for 1 KB, 19 and 18 for 64 KB, 67 to 80 and 71 to 75 for 1 MB. Ping-pong is faster than gloo up
to 1 MB; pipelined, 4 MB values (32 of them are more than the rings hold) show no clear difference.
"""

import argparse
import os
import signal
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist

from pippy.drivers.transport.shared_memory_transport import SharedMemoryTransport

SIZES = {"1 KB": 1 << 10, "64 KB": 1 << 16, "256 KB": 1 << 18, "1 MB": 1 << 20, "4 MB": 1 << 22}
BURST = 32


class Gloo:
    """send and receive of torch.distributed, into a tensor that exists."""

    def __init__(self, rank: int, store: str) -> None:
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
        self.peer = 1 - rank

    def send(self, tensor: torch.Tensor) -> None:
        dist.send(tensor, self.peer)

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        dist.recv(like, self.peer)
        return like


class Shared:
    """The transport, with keys that count."""

    def __init__(self, rank: int, end: socket.socket) -> None:
        self.peer = 1 - rank
        self.transport = SharedMemoryTransport(rank, {self.peer: end})
        self.sent = self.received = 0

    def send(self, tensor: torch.Tensor) -> None:
        self.transport.send(self.peer, (0, 0, self.sent), tensor)
        self.sent += 1

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        self.received += 1
        return self.transport.receive((0, 0, self.received - 1), self.peer)


def answer(end: Gloo | Shared, rounds: int) -> None:
    """The other process: it answers the sends of ``measure``."""
    for size in SIZES.values():
        tensor, token = torch.ones(size // 4), torch.ones(1)
        for _ in range(rounds):
            end.send(end.receive(tensor))
        for _ in range(max(rounds // 10, 3)):
            for _ in range(BURST):
                end.receive(tensor)
            end.send(token)


def measure(end: Gloo | Shared, rounds: int) -> dict[str, tuple[float, float]]:
    """Medians in microseconds: ping-pong and pipelined."""

    def ping(tensor: torch.Tensor) -> None:
        end.send(tensor)
        end.receive(tensor)

    def burst(tensor: torch.Tensor, token: torch.Tensor) -> None:
        for _ in range(BURST):
            end.send(tensor)
        end.receive(token)

    found = {}
    for name, size in SIZES.items():
        tensor, token = torch.ones(size // 4), torch.ones(1)
        there_and_back = timed(lambda t=tensor: ping(t), rounds)  # type: ignore[misc]
        bursts = timed(lambda t=tensor, k=token: burst(t, k), max(rounds // 10, 3))  # type: ignore[misc]
        found[name] = there_and_back / 2, bursts / BURST
    return found


def timed(function: Callable[[], None], rounds: int) -> float:
    """The median time of a call in microseconds."""
    times = []
    for _ in range(rounds):
        started = perf_counter()
        function()
        times.append(perf_counter() - started)
    return statistics.median(times) * 1e6


def pinned(rank: int) -> None:
    """Keep this process on a core of its own, if there are two."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)


def between_two(make: Callable[[int], Gloo | Shared], rounds: int) -> dict[str, tuple[float, float]]:
    """Measure with a forked process as the other end."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            pinned(1)
            answer(make(1), rounds)
            code = 0
        finally:
            os._exit(code)
    before = os.sched_getaffinity(0)
    try:
        pinned(0)
        return measure(make(0), rounds)
    finally:
        os.sched_setaffinity(0, before)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def costs(rounds: int) -> dict[str, tuple[float, float]]:
    """The time of a send and of a receive on their thread, both in this process."""
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here, there = SharedMemoryTransport(0, {1: first}), SharedMemoryTransport(1, {0: second})
    found = {}
    for name, size in SIZES.items():
        tensor, sends, receives = torch.ones(size // 4), [], []
        for number in range(rounds):
            started = perf_counter()
            here.send(1, (0, 0, number), tensor)
            sent = perf_counter()
            there.receive((0, 0, number), 0)
            receives.append(perf_counter() - sent)
            sends.append(sent - started)
        found[name] = statistics.median(sends) * 1e6, statistics.median(receives) * 1e6
    here.close()
    there.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=300)
    rounds = parser.parse_args().rounds
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with tempfile.TemporaryDirectory() as folder:
        shared = between_two(lambda rank: Shared(rank, ends[rank]), rounds)
        gloo = between_two(lambda rank: Gloo(rank, f"{folder}/store"), rounds)
    pinned(0)
    own = costs(rounds)
    print(f"{'µs per value':<14}" + "".join(f"{name:>10}" for name in SIZES))
    tables = [("ping-pong", 0, shared), ("  gloo", 0, gloo), ("pipelined", 1, shared), ("  gloo", 1, gloo)]
    for label, column, table in [*tables, ("a send", 0, own), ("a receive", 1, own)]:
        print(f"{label:<14}" + "".join(f"{table[name][column]:>10.1f}" for name in SIZES))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # gloo's other end was killed, so its threads would not end
