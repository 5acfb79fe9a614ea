"""How long does it take to send a tensor to another worker, for each way that there is, compared with gloo?

Two processes of this host, each pinned to a core of its own, with one thread: through shared memory, by RPC as between hosts
(but over the loopback interface), and by gloo. ping-pong: microseconds from a send until the value has arrived, half of a
round trip. pipelined: microseconds per value if 32 are sent before one answer. "to itself" is what a worker takes to pass a
value to itself. The last rows are the time of a send, and of a receive of a value that has arrived, through shared memory, on
the thread that computes.

Then, in milliseconds, between two network namespaces, without and with 1 ms for each packet: what workers of two hosts use
("pippy": TCP), RPC alone and gloo, by exps/engines.py, which says more. Needs root.

    python -m exps.transport [--rounds 300]

Finding, on two cores shared with other work (load average 7, so only the rough order counts): a send takes its thread 13
microseconds and a receive 13 for 1 KB, 19 and 18 for 64 KB, 67 to 80 and 71 to 75 for 1 MB. Ping-pong is faster than gloo up
to 1 MB; pipelined, 4 MB values (32 of them are more than the rings hold) show no clear difference.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import tempfile
import traceback
from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist

from exps import engines
from exps.peers.hosts import NoHosts
from pippy.drivers.wire.messages import rpc
from pippy.drivers.wire.messages.rpc import transport_by_rpc
from pippy.drivers.wire.messages.worker_messages import MessageQueue
from pippy.drivers.wire.worker_transport import WorkerTransport

SIZES = {"1 KB": 1 << 10, "64 KB": 1 << 16, "256 KB": 1 << 18, "1 MB": 1 << 20, "4 MB": 1 << 22}
BURST = 32
Found = dict[str, tuple[float, float]]


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


class Keyed:
    """A transport of pippy's, with keys that count."""

    def __init__(self, rank: int, transport: WorkerTransport) -> None:
        self.peer, self.transport = 1 - rank, transport
        self.sent = self.received = 0

    def send(self, tensor: torch.Tensor) -> None:
        self.transport.send(self.peer, (0, 0, self.sent), tensor)
        self.sent += 1

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        self.received += 1
        return self.transport.receive((0, 0, self.received - 1), self.peer)


def shared(rank: int, end: socket.socket) -> Keyed:
    """Two processes that share memory."""
    return Keyed(rank, WorkerTransport(rank, {1 - rank: end}))


def by_rpc(rank: int, store: str) -> Keyed:
    """Two processes that share no memory, as of two hosts, but over the loopback interface."""
    transport = transport_by_rpc(rank, str, "0", 5.0, far=[1 - rank])
    rpc.serve(rpc.Served(MessageQueue(), urgent=lambda message: None, deliver=transport.deliver))
    rpc.join(str(rank), rank, 2, f"file://{store}", "lo")
    return Keyed(rank, transport)


class ToItself:
    """A worker that sends to itself: the copy of a value within its process."""

    def __init__(self) -> None:
        self.end = Keyed(0, WorkerTransport(0))
        self.end.peer = 0

    def send(self, tensor: torch.Tensor) -> None:
        self.end.send(tensor)
        self.end.receive(tensor)

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        return like


End = Gloo | Keyed | ToItself


def answer(end: End, rounds: int) -> None:
    """The other process: it answers the sends of ``measure``."""
    for size in SIZES.values():
        tensor, token = torch.ones(size // 4), torch.ones(1)
        for _ in range(rounds):
            end.send(end.receive(tensor))
        for _ in range(max(rounds // 10, 3)):
            for _ in range(BURST):
                end.receive(tensor)
            end.send(token)


def measure(end: End, rounds: int) -> Found:
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


def between_two(make: Callable[[int], End], rounds: int) -> Found:
    """Measure between two forked processes: this one stays free of threads, and can fork the next two."""
    reading, writing = os.pipe()
    pids = [forked(rank, make, rounds, writing) for rank in (0, 1)]
    os.close(writing)
    with open(reading) as found:
        text = found.read()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    return {name: (one, other) for name, (one, other) in json.loads(text or "{}").items()}


def forked(rank: int, make: Callable[[int], End], rounds: int, writing: int) -> int:
    """Start one of the two. The first writes what it finds; both wait for their end, so that no connection breaks before."""
    if pid := os.fork():
        return pid
    try:
        pinned(rank)
        if rank == 0:
            os.write(writing, json.dumps(measure(make(rank), rounds)).encode())
        os.close(writing)
        if rank == 1:
            answer(make(rank), rounds)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    signal.pause()
    os._exit(0)


def costs(rounds: int) -> Found:
    """The time of a send and of a receive on their thread, both in this process."""
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here, there = WorkerTransport(0, {1: first}), WorkerTransport(1, {0: second})
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
        memory = between_two(lambda rank: shared(rank, ends[rank]), rounds)
        messages = between_two(lambda rank: by_rpc(rank, f"{folder}/rpc"), rounds)
        gloo = between_two(lambda rank: Gloo(rank, f"{folder}/gloo"), rounds)
    pinned(0)
    itself = measure(ToItself(), rounds)
    own = costs(rounds)
    print(f"{'µs per value':<22}" + "".join(f"{name:>10}" for name in SIZES))
    tables = [
        (f"{label}{kind}", column, table)
        for column, label in enumerate(("ping-pong, ", "pipelined, "))
        for kind, table in (("memory", memory), ("RPC", messages), ("gloo", gloo))
    ]
    for label, column, table in [("to itself", 1, itself), *tables, ("a send", 0, own), ("a receive", 1, own)]:
        print(f"{label:<22}" + "".join(f"{table[name][column]:>10.1f}" for name in SIZES if name in table))
    for delay in (0.0, 0.001):
        try:
            found = engines.between(delay, max(1, rounds // 60))
        except NoHosts as error:
            print(f"\ntwo hosts: not measured: {error}")
            return
        print(f"\ntwo hosts, {delay * 1e3:g} ms for each packet; ms per value\n{engines.rows(found)}")


if __name__ == "__main__":
    main()
