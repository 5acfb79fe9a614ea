"""Values that go from device to device of a host, past the host's memory; which do, and why others do not.

    sends a value without a place ──▶ at the end of the command: shares a block, tries it
    sends the next by the host, with the offer ──▶ at the end of its command: maps the block, tries it, answers
    has seen the answer: copies values to the block, sends notes ──▶ copies them out

So a worker maps and tries blocks at the ends of commands only, where it waits for its device anyway. Whatever fails there is
the reason why values to that worker go on through the host's memory. A worker has several blocks for another one, if the
first is too small: up to ``LIMIT`` bytes. They are given back when a driver is dropped.
"""

import pickle
import struct
from collections.abc import Collection, Hashable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from pippy.drivers.wire.gpu.blocks import BlockOffer, IncomingBlock, OutgoingBlock, place_size
from pippy.drivers.wire.gpu.copies import DeviceCopies
from pippy.drivers.wire.gpu.cuda_driver import NotShared
from pippy.drivers.wire.gpu.shared_words import NOT_MAPPED
from pippy.drivers.wire.pickling import pickle_to_bytes
from pippy.drivers.wire.value_layout import (
    ValueLayout,
    layout_of,
    rebuild,
    rest_from_bytes,
    rest_to_bytes,
    take_apart,
)

LIMIT = 1 << 28  # bytes of a device's memory for what one worker sends to another
_SMALLEST = 1 << 21  # a device hands out no less
_VALUES = 4  # places in the first block
_LAYOUTS = 1024
_NOTE = struct.Struct("<IIQI")  # the block, the value's number in it, its place, the size of its layout


class Note(NamedTuple):
    """Stands for a value that is in a block: where it is, and its layout."""

    data: bytes


class Offering(NamedTuple):
    """A value that goes by the host, and the blocks that its sender offers."""

    value: Any
    offers: bytes


class DeviceLinks:
    """The blocks of one worker, with those of the workers ``near`` that compute on devices of this host.

    All but `release` is called by the thread that computes.
    """

    def __init__(self, copies: DeviceCopies, near: Collection[int]) -> None:
        self.copies, self.near = copies, frozenset(near)
        self.reasons: dict[int, str] = {}  # why values to a worker do not go this way
        self._outgoing: dict[int, list[OutgoingBlock]] = {}
        self._incoming: dict[tuple[int, int], IncomingBlock] = {}  # by sender and number
        self._offered: dict[tuple[int, int], BlockOffer] = {}
        self._wanted: dict[int, int] = {}  # the largest value to a worker that found no place
        self._made = 0
        self._layouts: dict[Hashable, tuple[ValueLayout, bytes]] = {}
        self._known: dict[bytes, ValueLayout] = {}  # by their bytes

    # -- the sender

    def note(self, to: int, step: int, value: Any) -> Note | None:
        """Let the device copy a value to a block. Returns the note to send; None if the value has to go by the host."""
        if to not in self.near:
            return None
        parts = take_apart(value)
        on_host = self.copies.accelerator.is_on_host
        if not parts.tensors or any(map(on_host, parts.tensors)) or any(map(_is_tensor, parts.rest)):
            return None
        layout, code = self._layouts.get(parts.signature) or self._add_layout(parts.signature, value)
        size = place_size(layout.size)
        for block in self._outgoing.get(to, ()):
            start = block.find_place(size, step)
            if start is not None:
                number = block.write(start, layout.tensors, parts.tensors)
                head = _NOTE.pack(block.number, number, start, len(code))
                return Note(head + code + rest_to_bytes(parts.rest))
        self._wanted[to] = max(self._wanted.get(to, 0), size)
        return None

    def with_offers(self, to: int, value: Any) -> Any:
        """A value that goes by the host, and beside it the blocks that the receiver has not answered for."""
        offers = [block.offer.pack() for block in self._outgoing.get(to, ()) if not block.answer]
        return Offering(value, pickle.dumps(offers)) if offers else value

    # -- the receiver

    def take(self, source: int, note: Note) -> Any:
        """The value for which a note has come."""
        number, value, start, size = _NOTE.unpack_from(note.data)
        code = note.data[_NOTE.size : _NOTE.size + size]
        layout = self._known.get(code)
        if layout is None:
            if len(self._known) == _LAYOUTS:
                self._known.clear()
            layout = self._known[code] = pickle.loads(code)
        own = self._incoming[source, number].take(value, start, layout.tensors)
        for part, tensor in zip(layout.tensors, own):
            tensor.requires_grad_(part.requires_grad)
        return rebuild(layout, own, rest_from_bytes(layout, memoryview(note.data)[_NOTE.size + size :]))

    def without_offers(self, source: int, offering: Offering) -> Any:
        """The value; what is offered beside it is looked at when the command ends."""
        for each in pickle.loads(offering.offers):
            offer = BlockOffer(*pickle.loads(each))
            if (source, offer.number) not in self._incoming:
                self._offered[source, offer.number] = offer
        return offering.value

    # -- both

    def settle(self) -> None:
        """Offer blocks, and answer for those that are offered. The device has done all that it was given."""
        for key, offer in self._offered.items():
            with suppress(NotShared):  # the sender is told
                self._incoming[key] = IncomingBlock(self.copies, offer)
        self._offered.clear()
        for key in [key for key, block in self._incoming.items() if block.closed()]:
            del self._incoming[key]
        for to, blocks in self._outgoing.items():
            self._review(to, blocks)
        for to, size in self._wanted.items():
            if to not in self.reasons:
                self._add_block(to, size)
        self._wanted.clear()

    def trim(self) -> None:
        """Give back all blocks of this worker, as soon as those that have mapped them let go."""
        for blocks in self._outgoing.values():
            for block in blocks:
                block.retire()
        self.reasons.clear()
        self.settle()

    def discard_before(self, step: int) -> None:
        """Drop the values of earlier steps."""
        for blocks in self._outgoing.values():
            for block in blocks:
                block.discard_before(step)

    def forget(self, peers: Collection[int]) -> None:
        """Other processes are in the places of these peers: free what was shared with those that were there."""
        mine = [block for to in peers for block in self._outgoing.get(to, ())]
        theirs = [key for key in self._incoming if key[0] in peers]
        if mine or theirs:
            for block in mine:
                block.release()
            for key in theirs:
                self._incoming[key].release()
            self.copies.wait()
        for key in theirs:
            self._incoming.pop(key).closed(at_once=True)
        for block in mine:
            block.free()
        for peer in peers:
            self._outgoing.pop(peer, None)
            self.reasons.pop(peer, None)
            self._wanted.pop(peer, None)

    def release(self) -> None:
        """Let the device go on, whatever other devices do. From any thread."""
        for block in self._all():
            block.release()

    @property
    def is_held(self) -> bool:
        """Whether the device may wait for another one."""
        return any(block.is_held for block in self._all())

    def ways(self) -> dict[int, str]:
        """To which workers values go past the host; and to which they do not, with the reason."""
        return {
            to: "" for to, blocks in [*self._outgoing.items()] if any(block.works for block in blocks)
        } | self.reasons

    def close(self) -> None:
        """Unmap what is mapped. What is shared ends with this process, or is freed if nobody has it mapped."""
        for incoming in self._incoming.values():
            incoming.closed(at_once=True)
        for blocks in self._outgoing.values():
            for block in blocks:
                if block.answer == NOT_MAPPED:
                    block.free()
        self._incoming.clear()
        self._outgoing.clear()

    def _all(self) -> list[OutgoingBlock | IncomingBlock]:
        found: list[OutgoingBlock | IncomingBlock] = [*self._incoming.values()]
        for blocks in [*self._outgoing.values()]:
            found.extend(blocks)
        return found

    def _add_layout(self, signature: Hashable, value: Any) -> tuple[ValueLayout, bytes]:
        if len(self._layouts) == _LAYOUTS:
            self._layouts.clear()
        layout = layout_of(value)
        found = self._layouts[signature] = layout, pickle_to_bytes(layout)
        return found

    def _review(self, to: int, blocks: list[OutgoingBlock]) -> None:
        """Retire the blocks that cannot be used any more, and free those that the receiver has unmapped."""
        for block in blocks:
            if block.fault and not block.leaves:
                self.reasons[to] = block.fault
            if block.fault or block.is_spent:
                block.retire()
        blocks[:] = [block for block in blocks if not block.closed()]

    def _add_block(self, to: int, value: int) -> None:
        """Share another block for values to a worker, unless it has not answered for the last one."""
        blocks = self._outgoing.setdefault(to, [])
        if not all(block.works or block.leaves for block in blocks):
            return
        before = sum(block.size for block in blocks)
        size = min(max(_SMALLEST, _VALUES * value if not before else max(before, value)), LIMIT - before)
        if size < value:
            return
        try:
            blocks.append(OutgoingBlock(self.copies, self._made, size))
            self._made += 1
        except NotShared as error:
            self.reasons[to] = str(error)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)
