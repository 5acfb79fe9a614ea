"""Notes when each instruction of a worker ends, in steps that are recorded. Other steps run without it.

An instruction begins when the one before it ends, so the clock is read once for each. On an accelerator the worker does not
wait for what it starts: there an instruction ends when the stream that computes is through with it. An event after each of
them notes that, and the times are read when the step has ended. The stream is idle while the worker waits for a value, so
a receive ends when the value is on the device.
"""

import resource
import socket
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from pippy.drivers.plan.language.instructions import Add, Compute, Instruction, Payload, Receive, Send, SendExchanged
from pippy.drivers.protocol.steps import WorkerRecord
from pippy.drivers.wire.gpu.copies import DeviceCopies
from pippy.drivers.wire.received_values import ValueKey
from pippy.drivers.wire.transport import SentCount, Transport
from pippy.drivers.worker.measure.calls import BoundCall
from pippy.drivers.worker.measure.live_storages import LiveStorages
from pippy.ir.base.trees import tensors

_NOTHING = SentCount()


class Recorder:
    """Records steps of one program on one worker, one after another."""

    def __init__(
        self,
        order: Sequence[Instruction],
        ranks: Sequence[int],
        transport: Transport,
        device: torch.device,
        copies: DeviceCopies | None = None,
    ) -> None:
        self.ranks, self.transport, self.device = ranks, transport, device
        self.events = None if copies is None else StreamTimes(copies, len(order))
        self.ends = array("d", [0.0]) * len(order)
        self.sizes: dict[int, int] = {}
        self.memory = AllocatedMemory(device) if device.type == "cuda" else ProcessMemory()
        self.order = order
        early = (SendExchanged, Payload.GRADIENTS), (SendExchanged, Payload.NOTES)
        self.tail = {at for at, each in enumerate(order) if each.kind.exchange and each.key not in early}
        self.adds_up = False
        self.held: HeldMemory | None = None
        self.plain: Sequence[BoundCall] = ()
        self.code: Sequence[BoundCall] = ()  # the same, timed

    def begin(self, adds_up: bool = False) -> None:
        """Note that a step begins, which may add up gradients."""
        self.adds_up = adds_up and bool(self.tail)
        self.began, self.cpu = time.monotonic(), time.thread_time()
        self.memory.restart()

    @contextmanager
    def counting(self, there: Iterable[torch.Tensor]) -> Iterator[None]:
        """Inside, what the worker holds is noted with each instruction. These tensors are there already."""
        self.held = held = HeldMemory(self.device, len(self.order))
        with held.live:
            held.live.add(there)
            yield

    def watching(self, code: Sequence[BoundCall]) -> Sequence[BoundCall]:
        """The program's instructions, changed to note when they end. The first of them begins now."""
        if code is not self.plain:
            self.plain = code
            self.code = [self._timed(at, each, *bound) for at, (each, bound) in enumerate(zip(self.order, code))]
        self.started = time.monotonic() if self.events is None else self.events.start()
        if self.held is None:
            return self.code
        return [self._weighed(at, each, *bound) for at, (each, bound) in enumerate(zip(self.order, self.code))]

    def record(self) -> WorkerRecord:
        """What was noted. The step ends now."""
        if self.events is not None:
            self.events.read(self.ends, self.started)
        before = (end for at, end in enumerate(self.ends) if at not in self.tail)
        return WorkerRecord(
            clock(),
            self.began,
            self.started,
            self.ends[:],
            max(before, default=self.started) if self.adds_up else None,
            time.monotonic(),
            dict(self.sizes),
            self.memory.most,
            self.memory.of,
            time.thread_time() - self.cpu if self.device.type == "cpu" else None,
            self._held_then(),
        )

    def _held_then(self) -> tuple[Sequence[int], Sequence[int]] | None:
        held, self.held = self.held, None
        if held is None:
            return None
        held.note(len(self.order))
        return held.most, held.after

    def _weighed(self, at: int, instruction: Instruction, handle: Callable[..., None], operands: Any) -> BoundCall:
        held = self.held
        assert held is not None

        def adding_up(step: Any, *operands: Any) -> None:
            transport, held.live.looks_at_arguments = step.transport, True  # gradients come from other workers
            step.transport = _Unseen(transport, held.live)
            handle(step, *operands)
            step.transport = transport
            held.note(at)

        def weighed(step: Any, *operands: Any) -> None:
            # what a transport copies is its own
            with nullcontext() if isinstance(instruction, Compute | Add) else held.live.looking_away():
                handle(step, *operands)
            if isinstance(instruction, Receive):  # a transport may make tensors without an operation
                held.live.add(tensors(step.values[operands[0]]))
            held.note(at)

        return adding_up if instruction.kind.adds_up else weighed, operands

    def _timed(
        self, at: int, instruction: Instruction, handle: Callable[..., None], operands: tuple[Any, ...]
    ) -> BoundCall:
        ends, now = self.ends, time.monotonic

        def timed(*operands: Any) -> None:
            handle(*operands)
            ends[at] = now()

        noted = timed if self.events is None else self.events.noting(at, handle)
        if isinstance(instruction, Send):
            return self._counted(at, self.ranks[instruction.to], noted), operands
        return noted, operands

    def _counted(self, at: int, to: int, send: Callable[..., None]) -> Callable[..., None]:
        sent, sizes = self.transport.sent, self.sizes

        def counted(*operands: Any) -> None:
            before = sent.get(to, _NOTHING).bytes
            send(*operands)
            sizes[at] = sent[to].bytes - before

        return counted


class StreamTimes:
    """The times at which the stream that computes was through with each of ``count`` things."""

    def __init__(self, copies: DeviceCopies, count: int) -> None:
        self.copies, self.stream = copies, copies.accelerator.current_stream()
        self._start, *self._ends = (copies.accelerator.event(timed=True) for _ in range(count + 1))

    def start(self) -> float:
        """Wait for the device, and begin: now, by the clock of this process."""
        self.copies.wait()
        self._start.record(self.stream)
        return time.monotonic()

    def noting(self, at: int, handle: Callable[..., None]) -> Callable[..., None]:
        """An instruction that notes its end."""
        end, stream = self._ends[at], self.stream

        def noted(*operands: Any) -> None:
            handle(*operands)
            end.record(stream)

        return noted

    def read(self, ends: MutableSequence[float], started: float) -> None:
        """Wait for the device, and write the ends, on the clock on which it began."""
        self.copies.wait()
        for at in range(len(ends)):
            ends[at] = started + self._start.elapsed_time(self._ends[at]) / 1e3


class _Unseen:
    """A transport of which the live storages do not count the copies: how long they live depends on the receiver."""

    def __init__(self, transport: Transport, live: "LiveStorages | AllocatedMemory") -> None:
        self.transport, self.live = transport, live

    def send(self, to: int, key: ValueKey, value: Any) -> None:
        with self.live.looking_away():
            self.transport.send(to, key, value)

    def receive(self, key: ValueKey, source: int) -> Any:
        with self.live.looking_away():
            return self.transport.receive(key, source)


class HeldMemory:
    """What a worker holds after each instruction, and the most while it ran: live storages, or on a GPU what is allocated."""

    def __init__(self, device: torch.device, instructions: int) -> None:
        self.live: LiveStorages | AllocatedMemory = AllocatedMemory(device) if device.type == "cuda" else LiveStorages()
        self.most = array("q", [0]) * (instructions + 1)
        self.after = array("q", [0]) * (instructions + 1)

    def note(self, at: int) -> None:
        """Note this for an instruction that has run; with their number as ``at``, for the end of the step."""
        self.most[at], self.after[at] = self.live.most, self.live.bytes
        self.live.restart()


class AllocatedMemory:
    """As `LiveStorages`, by the allocator of a GPU: nothing has to be added."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.looks_at_arguments, self.of = device, True, f"allocated on {device}"

    def __enter__(self) -> None:
        self.restart()

    def __exit__(self, *_: object) -> None:
        pass

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """The allocator knows them."""

    def looking_away(self) -> AbstractContextManager[None]:
        """The allocator always counts."""
        return nullcontext()

    @property
    def bytes(self) -> int:
        """The bytes that are allocated now."""
        return torch.cuda.memory_allocated(self.device)

    @property
    def most(self) -> int:
        """The most since `restart`."""
        return torch.cuda.max_memory_allocated(self.device)

    def restart(self) -> int:
        """Begin to look for the most anew."""
        torch.cuda.reset_peak_memory_stats(self.device)
        return self.bytes


@cache
def clock() -> str:
    """The name of this process's monotonic clock. Processes of one running kernel share the clock and the name.

    >>> clock() == clock()
    True
    """
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


class ProcessMemory:
    """The peak of this process's resident memory in a step; or since it began, on systems that keep no other peak.

    >>> memory = ProcessMemory()
    >>> memory.restart()
    >>> memory.most > 1 << 20
    True
    """

    of = "resident"

    def restart(self) -> None:
        """Begin to look for the most anew."""
        try:
            with open("/proc/self/clear_refs", "wb", buffering=0) as file:
                file.write(b"5")  # resets the peak, and nothing else
        except OSError:
            self.of = "resident since the worker began"

    @property
    def most(self) -> int:
        """The most since `restart`, in bytes."""
        if self.of == "resident":  # getrusage would count the process that started this one too: it never begins anew
            return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
