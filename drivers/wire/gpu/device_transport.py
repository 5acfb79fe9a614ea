"""Values between workers that compute on a device: another transport carries them, from host to host.

A send starts a copy to the host and returns. A thread sleeps until the copy is there, and wakes the worker's own thread, which
sends it: between two instructions, or while it waits for a value or a command. Until then the worker goes on, and the device
computes what it was given.

    send ──▶ DeviceCopies.to_host ──▶ the thread waits ──▶ the other transport ──▶ DeviceCopies.to_device ──▶ receive
             in the stream "out"                                                  in the stream "into"

Between two devices of a host that can use the same memory, a value stays out of the host's, no thread waits, and the other
transport takes a note of where the value is:

    send ──▶ DeviceLinks.note ──────────────────────────▶ the other transport ──▶ DeviceLinks.take ──▶ receive
"""

import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pippy.drivers.wire.gpu.accelerator import accelerator_of
from pippy.drivers.wire.gpu.copies import DeviceCopies, HostCopy
from pippy.drivers.wire.gpu.links import DeviceLinks, Note
from pippy.drivers.wire.received_values import ValueKey
from pippy.drivers.wire.transport import SentCount, Transport
from pippy.drivers.wire.value_layout import layout_of
from pippy.ir.base.errors import StageError


@dataclass(slots=True)
class _Leaving:
    """A value that is being copied to the host, to be sent. ``error`` is why it was not copied."""

    to: int
    key: ValueKey
    copy: HostCopy
    there: bool = False
    error: Exception | None = None


GRACE = (
    20.0  # seconds in which a device that waits for others gets on, when a command was given up, unless they are gone
)


def for_device(device: str, carrier: Transport, near: Collection[int] = ()) -> tuple[Transport, DeviceCopies | None]:
    """The transport of a worker that computes on a device, and the copies that it uses; on the CPU, ``carrier`` itself.

    The workers ``near`` compute on devices of this host, and may see this one's memory. Raises if the device does not work.

    >>> from pippy.drivers.wire.in_process import in_process
    >>> carrier = in_process(1)[0]
    >>> for_device("cpu", carrier) == (carrier, None)
    True
    """
    accelerator = accelerator_of(device)
    if accelerator is None:
        return carrier, None
    copies = DeviceCopies(accelerator)
    return DeviceTransport(carrier, copies, near), copies


class DeviceTransport(Transport):
    """The transport of a worker that computes on a device: ``carrier`` takes values, or notes of them, from host to host."""

    def __init__(self, carrier: Transport, copies: DeviceCopies, near: Collection[int] = ()) -> None:
        self.carrier, self.copies, self.received, self.index = carrier, copies, carrier.received, carrier.index
        self.links = DeviceLinks(carrier, copies, near)
        self._closed = threading.Event()
        self.sent: dict[int, SentCount] = {}
        self._leaving: deque[_Leaving] = deque()
        self._awaited: queue.SimpleQueue[_Leaving | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.received.when_woken = self._send_copied

    def send(self, to: int, key: ValueKey, value: Any) -> None:
        sent = self.sent.setdefault(to, SentCount())
        sent.values += 1
        layout = layout_of(value)
        sent.bytes += layout.payload
        note = self.links.note(to, key[0], value, layout)
        if note is not None:
            self.carrier.send(to, key, note)
            return
        leaving = _Leaving(to, key, self.copies.to_host(value))
        self._leaving.append(leaving)
        if self._thread is None:
            self._thread = threading.Thread(target=self._await_copies, name="pippy copies", daemon=True)
            self._thread.start()
        self._awaited.put(leaving)
        self._send_copied()

    def receive(self, key: ValueKey, source: int) -> Any:
        self._send_copied()
        value = self.carrier.receive(key, source)
        if type(value) is Note:
            return self.links.take(source, key[0], value)
        return self.copies.to_device(value)

    def ready(self, key: ValueKey) -> bool:
        self._send_copied()
        return self.carrier.ready(key)

    def wait_any(self, wanted: Sequence[tuple[ValueKey, int]], seconds: float | None = None) -> None:
        self.carrier.wait_any(wanted, seconds)

    def wait_for(self, fd: int) -> None:
        self.carrier.wait_for(fd)

    def finish(self) -> None:
        self.copies.wait()
        for leaving in self._leaving:
            leaving.copy.wait()
            leaving.there = True
        self._send_copied()
        self.links.settle()

    def interrupt(self) -> None:
        super().interrupt()
        if self.links.near:
            threading.Thread(target=self._watch, name="pippy watch", daemon=True).start()

    def drop_unsent(self) -> None:
        self._leaving.clear()

    def discard_before(self, step: int) -> None:
        self._leaving = deque(each for each in self._leaving if each.key[0] >= step)
        self.carrier.discard_before(step)
        self.links.discard_before(step)

    def trim(self) -> None:
        self.carrier.trim()
        self.links.trim()

    def forget(self, peers: Collection[int]) -> None:
        self.links.forget(peers)
        self.carrier.forget(peers)

    def ways(self) -> dict[int, str]:
        return self.links.ways()

    def close(self) -> None:
        self._leaving.clear()
        self._awaited.put(None)
        self._closed.set()
        self.carrier.close()
        self.links.close()

    def _wait_for_traffic(self, seconds: float | None) -> None:
        self.carrier._wait_for_traffic(seconds)

    def _send_copied(self) -> None:
        """Send the values that have been copied. They are copied in the order of the sends."""
        while self._leaving and self._leaving[0].there:
            leaving = self._leaving.popleft()
            step, number, microbatch = leaving.key
            try:
                if leaving.error is not None:
                    raise leaving.error
                self.carrier.send(leaving.to, leaving.key, leaving.copy.wait())
            except Exception as error:
                raise StageError(
                    f"value {number} of micro-batch {microbatch} of step {step} could not be sent to worker {leaving.to}: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def _watch(self) -> None:
        """End this process if its device waits for one that is gone: nothing else ends that, and its worker must answer."""
        self.copies.accelerator.set_current()
        held, before = self.links.held(), None
        while (held or self.received.interrupted) and not self._closed.wait(GRACE):
            held, before = self.links.held(), held
            if held and held == before:
                end_process(sorted({peer for peer, *_ in held}))

    def _await_copies(self) -> None:
        self.copies.accelerator.set_current()
        while (leaving := self._awaited.get()) is not None:
            try:
                leaving.copy.wait()
            except Exception as error:  # what the device failed with; the worker's own thread raises it
                leaving.error = error
            leaving.there = True
            self.received.wakeup.set()


def end_process(peers: Sequence[int]) -> None:
    """End this process, whose device waits for those of these workers."""
    who = ", ".join(map(str, peers))
    sys.stderr.write(
        f"pippy: this worker ends: for {GRACE:g} s its GPU has waited for what worker {who} may never do\n"
    )
    sys.stderr.flush()
    os._exit(1)
