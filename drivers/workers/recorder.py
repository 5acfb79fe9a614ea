"""Notes when each instruction of a worker ends, in steps that are recorded. Other steps run without it.

An instruction begins when the one before it ends, so the clock is read once for each. On an accelerator, the worker waits for
a computation before it notes its end. Otherwise its time would be counted for the next instruction that waits for it.
"""

import os
import resource
import socket
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from pippy.drivers.control.messages import WorkerRecord
from pippy.drivers.schedules.programs.instructions import Compute, Instruction, Send
from pippy.drivers.transport.transport import SentCount, Transport

Bound = tuple[Callable[..., None], tuple[Any, ...]]  # an instruction: its handler and the arguments
_NOTHING = SentCount()


class Recorder:
    """Records steps of one program on one worker, one after another."""

    def __init__(
        self,
        order: Sequence[Instruction],
        code: Sequence[Bound],
        ranks: Sequence[int],
        transport: Transport,
        device: torch.device,
    ) -> None:
        self.ranks, self.transport, self.device = ranks, transport, device
        self.ends = array("d", [0.0]) * len(order)
        self.sizes: dict[int, int] = {}
        self.memory = DeviceMemory(device) if device.type == "cuda" else ProcessMemory()
        self.code = [self._timed(at, each, *bound) for at, (each, bound) in enumerate(zip(order, code))]

    def begin(self) -> None:
        """Note that a step begins."""
        self.began, self.cpu = time.monotonic(), time.thread_time()
        self.adding: float | None = None
        self.memory.begin()

    def timed(self) -> Sequence[Bound]:
        """The program's instructions, changed to note when they end. The first of them begins now."""
        self.started = time.monotonic()
        return self.code

    def note_adding(self) -> None:
        """Note that the worker begins to add up the gradients of replicated parameters."""
        self.adding = time.monotonic()

    def record(self) -> WorkerRecord:
        """What was noted. The step ends now."""
        return WorkerRecord(
            clock(),
            self.began,
            self.started,
            self.ends[:],
            self.adding,
            time.monotonic(),
            dict(self.sizes),
            self.memory.peak(),
            self.memory.of,
            time.thread_time() - self.cpu if self.device.type == "cpu" else None,
        )

    def _timed(
        self, at: int, instruction: Instruction, handle: Callable[..., None], operands: tuple[Any, ...]
    ) -> Bound:
        ends, now = self.ends, time.monotonic

        def timed(*operands: Any) -> None:
            handle(*operands)
            ends[at] = now()

        if isinstance(instruction, Send):
            return self._counted(at, self.ranks[instruction.to], timed), operands
        if isinstance(instruction, Compute) and self.device.type != "cpu":
            return self._awaited(at, handle), operands
        return timed, operands

    def _counted(self, at: int, to: int, send: Callable[..., None]) -> Callable[..., None]:
        sent, sizes = self.transport.sent, self.sizes

        def counted(*operands: Any) -> None:
            before = sent.get(to, _NOTHING).bytes
            send(*operands)
            sizes[at] = sent[to].bytes - before

        return counted

    def _awaited(self, at: int, compute: Callable[..., None]) -> Callable[..., None]:
        def awaited(*operands: Any) -> None:
            compute(*operands)
            torch.accelerator.synchronize(self.device)
            self.ends[at] = time.monotonic()

        return awaited


@cache
def clock() -> str:
    """The name of this process's monotonic clock. Processes of one running kernel share the clock and the name.

    >>> clock() == clock()
    True
    """
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


class DeviceMemory:
    """The peak of the memory that torch has allocated on a GPU in a step."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.of = device, f"allocated on {device}"

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)


class ProcessMemory:
    """The peak of this process's resident memory in a step; or since it began, on systems that keep no other peak.

    >>> memory = ProcessMemory()
    >>> memory.begin()
    >>> memory.peak() > 1 << 20
    True
    """

    of = "resident"

    def begin(self) -> None:
        try:
            file = os.open("/proc/self/clear_refs", os.O_WRONLY)
        except OSError:
            self.of = "resident since the worker began"
            return
        try:
            os.write(file, b"5")  # resets the peak, and nothing else
        except OSError:
            self.of = "resident since the worker began"
        finally:
            os.close(file)

    def peak(self) -> int:
        if self.of == "resident":  # getrusage would count the process that started this one too: it never begins anew
            return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
