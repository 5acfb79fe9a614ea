"""What carries values between two hosts sooner: RPC, a process group of gloo, or what pippy's workers have?

Two network namespaces, one process pinned to a core in each, one thread. All are behind pippy's transport: what is
timed is its `send` and `receive`, with the pickling of keys and layouts and the wake-up of the thread that computes. gloo: a
thread on each side has a receive posted ahead, for a message of fixed size that says what comes; a small value is inside of it.
"pippy" is what workers of two hosts use: a connection of TCP.
ping-pong: milliseconds from a send until the value has arrived, half of a round trip. in a row: milliseconds per value if
several (64 MiB, or 32) are sent before one answer. The engines take turns, round after round. Needs root, for the namespaces.

    python -m exps.engines [--rounds 20] [--delay 0.001]

Finding: small values arrive soonest by pippy, and large ones alike by pippy and RPC. Two virtual cores at a load of 6,
--rounds 2: a value of 4 KiB took 0.09 ms by pippy, 0.72 by RPC and 0.32 by gloo, 64 KiB 0.16, 0.78 and 0.71, 16 MiB 38, 29
and 51; 4 KiB in a row 0.02, 0.23 and 0.24, 64 MiB 241, 234 and 243. With 1 ms for each packet 4 KiB took 1.4, 2.1 and 1.7,
1 MiB 3.5, 4.5 and 7.4. Two other runs of large ones differ by a third from these, in both directions. Before the
processes kept freed memory, 16 MiB took 110 ms and more by RPC and gloo, on a busy machine.
"""

import argparse
import json
import os
import pickle
import signal
import statistics
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from exps.peers.hosts import LINK, hosts
from pippy.drivers.base.process import keep_freed_memory
from pippy.drivers.engines.hub.interfaces import link_named
from pippy.drivers.wire.messages import rpc
from pippy.drivers.wire.messages.doors import Door, Invitation, come_in
from pippy.drivers.wire.messages.rpc import RpcValues
from pippy.drivers.wire.messages.worker_messages import MessageQueue
from pippy.drivers.wire.pickling import pickle_message, unpickle
from pippy.drivers.wire.received_values import ValueKey
from pippy.drivers.wire.transport import Transport
from pippy.drivers.wire.worker_transport import WorkerTransport

SIZES = {"4 KiB": 1 << 12, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 1 << 24, "64 MiB": 1 << 26}
ROW = 1 << 26
PORTS = 29610, 29611
NAMES = ("controller", "worker1")


def by_rpc(rank: int) -> tuple[WorkerTransport, WorkerTransport]:
    """A transport that has nothing but RPC, and the one that workers of several hosts have. Their keys begin with 0 and 1."""
    values = RpcValues(NAMES.__getitem__, print, 60.0)
    alone, mixed = (WorkerTransport(rank, far=[1 - rank], post=values.post) for _ in range(2))
    address = link_named(LINK).address
    assert address is not None

    def invite(_: None) -> Invitation:
        return Door(address, [1 - rank], mixed.add_far, 60.0).invitation

    rpc.serve(rpc.Served(MessageQueue(), invite, lambda key, value: (alone, mixed)[key[0]].deliver(key, value)))
    os.environ["MASTER_PORT"] = str(PORTS[0])
    rpc.join(NAMES[rank], rank, 2, "env://", LINK, 60)
    if rank == 0:
        invitation = unpickle(rpc.urgent(NAMES[1], pickle_message(None)).wait())
        mixed.add_far(1, come_in(invitation, rank, 60.0))
    return alone, mixed


class GlooValues:
    """Posts values to the other process, and delivers what comes from there. The group is for this alone."""

    INSIDE = 8192  # bytes of the message that says what comes

    def __init__(self, rank: int) -> None:
        os.environ |= {"MASTER_PORT": str(PORTS[1]), "GLOO_SOCKET_IFNAME": LINK}
        dist.init_process_group("gloo", rank=rank, world_size=2)
        self.peer = 1 - rank
        self.transport = WorkerTransport(rank, far=[self.peer], post=self.post)
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()
        threading.Thread(target=self._receive, daemon=True).start()

    def post(self, to: int, key: ValueKey, value: Any) -> None:
        data, tensors = pickle_message(value)
        said = pickle.dumps((key, data, [(each.dtype, each.shape, each.stride()) for each in tensors]))
        parts = [each.as_strided((each.numel(),), (1,)).view(torch.uint8) for each in tensors if each.numel()]
        inside = sum(part.numel() for part in parts) + len(said) + 4 <= self.INSIDE
        first = torch.empty(self.INSIDE, dtype=torch.uint8)
        words = struct.pack("i", len(said) if inside else -len(said)) + said
        first[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        if inside:
            at = len(words)
            for part in parts:
                first[at : at + part.numel()] = part
                at += part.numel()
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        for each in [first, *([] if inside else parts)]:
            self._sending.append((dist.isend(each, to), each))

    def _receive(self) -> None:
        def posted() -> tuple[Any, torch.Tensor]:
            buffer = torch.empty(self.INSIDE, dtype=torch.uint8)
            return dist.irecv(buffer, self.peer), buffer

        ahead = posted()
        while True:
            work, first = ahead
            work.wait()
            length = struct.unpack("i", first[:4].numpy().tobytes())[0]
            at = 4 + abs(length)
            key, data, layouts = pickle.loads(first[4:at].numpy().tobytes())
            tensors = [torch.empty_strided(shape, stride, dtype=dtype) for dtype, shape, stride in layouts]
            for tensor in tensors:
                flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
                if length < 0:
                    dist.recv(flat, self.peer)
                else:
                    flat[:] = first[at : at + flat.numel()]
                    at += flat.numel()
            ahead = posted()
            self.transport.deliver(key, unpickle((data, tensors)))


def counted(size: int, rounds: int) -> tuple[int, int]:
    """How many round trips of a size there are in a turn, and how many values in a row."""
    return max(1, min(10, ROW // 8 // size)), max(1, min(32, ROW // size))


def both(rank: int, rounds: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Medians in milliseconds by engine and size, of ping-pong and in a row; what rank 0 finds."""
    torch.set_num_threads(1)
    alone, mixed = by_rpc(rank)
    engines: dict[str, Transport] = {"RPC": alone, "pippy": mixed, "gloo": GlooValues(rank).transport}
    numbers = dict.fromkeys(engines, 0)
    times: dict[str, dict[str, tuple[list[float], list[float]]]] = {name: {} for name in engines}

    def turn(name: str, label: str, size: int) -> None:
        transport, tensor, token = engines[name], torch.ones(size // 4), torch.ones(1)
        trips, row = counted(size, rounds)

        def send(value: torch.Tensor) -> None:
            transport.send(1 - rank, (int(transport is mixed), rank, numbers[name]), value)

        def receive() -> torch.Tensor:
            return transport.receive((int(transport is mixed), 1 - rank, numbers[name]), 1 - rank)

        def there_and_back() -> None:
            if rank == 0:
                send(tensor)
                receive()
            else:
                send(receive())
            numbers[name] += 1

        def in_a_row() -> None:
            for _ in range(row):
                send(tensor) if rank == 0 else receive()
                numbers[name] += 1
            receive() if rank == 0 else send(token)
            numbers[name] += 1

        singles, rows = times[name].setdefault(label, ([], []))
        singles += [timed(there_and_back) / 2 for _ in range(trips)]
        rows.append(timed(in_a_row) / row)

    for number in range(rounds + 1):
        for label, size in SIZES.items():
            for name in engines:
                turn(name, label, size)
        if number == 0:
            times = {name: {} for name in engines}  # connections stand, and memory is mapped
    return {
        name: {label: (statistics.median(singles), statistics.median(rows)) for label, (singles, rows) in found.items()}
        for name, found in times.items()
    }


def timed(function: Callable[[], None]) -> float:
    """The milliseconds of a call."""
    started = perf_counter()
    function()
    return (perf_counter() - started) * 1e3


def process(rank: int, rounds: int) -> None:
    """What runs on each host."""
    keep_freed_memory()  # as `cluster()` does
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    found = both(rank, rounds)
    if rank == 0:
        print(json.dumps(found))
        sys.stdout.flush()
    os._exit(0)  # the other end of gloo may be gone, so that its threads do not end


def between(delay: float, rounds: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Measure between two hosts."""
    with hosts(2, delay) as both_hosts:
        address = {"MASTER_ADDR": both_hosts[0].address, "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "exps.engines", "--rounds", str(rounds), "--rank"]
        first, second = (
            subprocess.Popen(host.command(*words, str(rank)), env=os.environ | address, stdout=subprocess.PIPE)
            for rank, host in enumerate(both_hosts)
        )
        out, _ = first.communicate(timeout=1800)
        second.wait(30)
    return json.loads(out)


def rows(found: dict[str, dict[str, tuple[float, float]]]) -> str:
    """What `between` has found, as a table."""
    lines = [f"{'':20}" + "".join(f"{name:>10}" for name in SIZES)]
    for column, label in enumerate(("ping-pong", "in a row")):
        for name, table in found.items():
            lines.append(f"{label + ', ' + name:20}" + "".join(f"{table[size][column]:>10.2f}" for size in SIZES))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--delay", type=float, nargs="+", default=[0.0, 0.001], help="seconds that a packet takes")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        process(options.rank, options.rounds)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the hosts are to be removed
    for delay in options.delay:
        found = between(delay, options.rounds)
        print(f"\n{delay * 1e3:g} ms for each packet; ms per value; load {os.getloadavg()[0]:.1f}")
        print(rows(found))


if __name__ == "__main__":
    main()
