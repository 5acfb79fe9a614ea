"""Values between workers that compute on a device: another transport carries them, from host to host.

    send ──▶ out of the device ──▶ a thread waits for that ──▶ the carrier ──▶ to the device ──▶ receive
    send ──▶ what opens a copy on the device ────────────────▶ the carrier ──▶ to the device ──▶ receive

A send waits for nothing: the worker's own thread sends what was copied between two instructions, or while it waits. Values to
the workers ``near``, of this host, go the second way. Before the first of them the sender offers random bytes, and the receiver
answers at the end of its command whether it sees them. Until then, and for good if it does not, they go the first way.
"""

import os
import sys
import threading
from collections import deque
from collections.abc import Collection
from typing import Any

import torch

from pippy.drivers.wire.gpu.copies import Accelerator, DeviceCopies, HostCopy, NotShared, Shared
from pippy.drivers.wire.received_values import ValueKey
from pippy.drivers.wire.transport import SentCount, Transport
from pippy.drivers.wire.value_layout import is_plain_tensor, layout_of
from pippy.ir.base.errors import StageError
from pippy.ir.base.trees import leaves, map_tensors, tensors

GRACE = 20.0  # seconds in which a device that waits for another one gets on, when a command was given up
_OFFER, _ANSWER = 1 << 62, (1 << 62) + 1  # in place of a step, in keys; in that of a value the worker that has sent it


def for_device(device: str, carrier: Transport, near: Collection[int] = ()) -> tuple[Transport, DeviceCopies | None]:
    """The transport of a worker that computes on a device, and the copies that it uses; on the CPU, ``carrier`` itself.

    >>> from pippy.drivers.wire.worker_transport import in_process
    >>> carrier = in_process(1)[0]
    >>> for_device("cpu", carrier) == (carrier, None)
    True
    """
    if torch.device(device).type == "cpu":
        return carrier, None
    copies = DeviceCopies(Accelerator(torch.device(device)))
    return DeviceTransport(carrier, copies, near), copies


class DeviceTransport(Transport):
    """The transport of a worker that computes on a device. The workers ``near`` do so too, and may open its memory."""

    def __init__(self, carrier: Transport, copies: DeviceCopies, near: Collection[int] = ()) -> None:
        self.carrier, self.copies, self.received, self.index = carrier, copies, carrier.received, carrier.index
        self.near, self.sent = frozenset(near), dict[int, SentCount]()
        self._reasons: dict[int, str | None] = {}  # why values to a worker do not stay on devices; "" if they do
        self._leaving: deque[tuple[int, ValueKey, HostCopy]] = deque()
        self._closed = threading.Event()
        self.received.when_woken, self.received.when_dropped = self._send_copied, self._let_go

    @property
    def on_host(self) -> Transport:
        return self.carrier

    def send(self, to: int, key: ValueKey, value: Any) -> None:
        sent = self.sent.setdefault(to, SentCount())
        sent.values += 1
        sent.bytes += layout_of(value).payload
        own = self.copies.own(value)
        if self._stays(to, own):
            self.carrier.send(to, key, map_tensors(self.copies.accelerator.share, own))
            return
        copy = self.copies.own_to_host(own)
        self._leaving.append((to, key, copy))
        copy.add_done_callback(lambda _: self.received.wakeup.set())
        self._send_copied()

    def receive(self, key: ValueKey, source: int) -> Any:
        self._send_copied()
        self.copies.let_go()
        return self.copies.to_device(self.carrier.receive(key, source), source)

    def ready(self, key: ValueKey) -> bool:
        self._send_copied()
        return self.carrier.ready(key)

    def wait_for(self, fd: int) -> None:
        self.carrier.wait_for(fd)

    def finish(self) -> None:
        self.copies.wait()
        for _, _, copy in self._leaving:
            copy.exception()  # waits for it
        self._send_copied()
        self.copies.let_go()
        self._answer()

    def interrupt(self) -> None:
        super().interrupt()
        if self.near:
            threading.Thread(target=self._watch, name="pippy watch", daemon=True).start()

    def drop_unsent(self) -> None:
        self._leaving.clear()

    def discard_before(self, step: int) -> None:
        self._leaving = deque(each for each in self._leaving if each[1][0] >= step)
        self.carrier.discard_before(step)

    def trim(self) -> None:
        self.carrier.trim()

    def forget(self, peers: Collection[int]) -> None:
        self.carrier.forget(peers)
        for peer in peers:
            self._reasons.pop(peer, None)
            for word in (_OFFER, _ANSWER):
                self.received.values.pop((word, peer, 0), None)

    def ways(self) -> dict[int, str]:
        return {to: why for to, why in tuple(self._reasons.items()) if why is not None}

    def close(self) -> None:
        self._leaving.clear()
        self._closed.set()
        self.copies.close()
        self.carrier.close()

    def _wait_for_traffic(self, seconds: float | None) -> None:
        self.carrier._wait_for_traffic(seconds)

    def _send_copied(self) -> None:
        """Send the values that have been copied. They are copied in the order of the sends."""
        while self._leaving and self._leaving[0][2].done():
            to, (step, number, microbatch), copy = self._leaving.popleft()
            try:
                self.carrier.send(to, (step, number, microbatch), copy.result())
            except Exception as error:
                raise StageError(
                    f"value {number} of micro-batch {microbatch} of step {step} could not be sent to worker {to}: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def _stays(self, to: int, own: Any) -> bool:
        """Whether the tensors of a value stay on devices on their way to a worker."""
        if to in self.near and to not in self._reasons:
            self._offer(to)
        is_here = self.copies.accelerator.is_here
        return self._reasons.get(to) == "" and all(is_plain_tensor(each) and is_here(each) for each in tensors(own))

    def _offer(self, to: int) -> None:
        expected = torch.frombuffer(bytearray(os.urandom(1024)), dtype=torch.uint8)
        self._reasons[to] = None
        try:
            shared = self.copies.accelerator.share(self.copies.to_device(expected))
        except NotShared as error:
            self._reasons[to] = str(error)
        else:
            self.carrier.send(to, (_OFFER, self.index, 0), (shared, expected))

    def _answer(self) -> None:
        """Answer offers, and take answers. The device has done all that it was given."""
        self.carrier.ready((_OFFER, self.index, 0))  # takes in what is there
        for peer in self.near:
            if self.received.has(answer := (_ANSWER, peer, 0)):
                self._reasons[peer] = self.received.take(answer)
            if self.received.has(offer := (_OFFER, peer, 0)):
                self.carrier.send(peer, (_ANSWER, self.index, 0), self._tried(peer, *self.received.take(offer)))

    def _tried(self, peer: int, shared: Shared, expected: torch.Tensor) -> str:
        """Why this device cannot use what another worker shares; "" if it can."""
        try:
            seen = self.copies.to_host(self.copies.to_device(shared, peer)).result()
        except NotShared as error:
            self._let_go(shared)
            return str(error)
        self.copies.let_go()
        return "" if torch.equal(seen, expected) else "the receiver's device does not see what the sender's has written"

    def _let_go(self, dropped: Any) -> None:
        """Nobody takes a value that has arrived: its sender may use the memory again."""
        for leaf in leaves(dropped):
            if type(leaf) is Shared:
                self.copies.accelerator.let_go(leaf)

    def _watch(self) -> None:
        """End this process if its device waits for one that is gone: nothing else ends that, and its worker must answer."""
        self.copies.accelerator.set_current()
        awaited = self.copies.awaited()
        while (awaited or self.received.interrupted) and not self._closed.wait(GRACE):
            before, awaited = awaited, self.copies.awaited()
            if awaited and before and awaited[0] is before[0]:
                end_process(awaited[1])


def end_process(peer: int) -> None:
    """End this process, whose device waits for that of a worker."""
    sys.stderr.write(
        f"pippy: this worker ends: for {GRACE:g} s its GPU has waited for what worker {peer} may never do\n"
    )
    sys.stderr.flush()
    os._exit(1)
