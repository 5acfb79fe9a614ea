"""One direction between two devices of a host: a block of the sender's memory that the receiver has mapped.

        sender                                              receiver
    1 a place in the block                              4 the stream "into" waits for the number
    2 the computing stream copies the value there       5 it copies the value to memory of its own
      and writes the value's number to FILLED           6 and writes to TAKEN how many it has copied
    3 a note with place and number  ── carrier ──▶      7 the host notes that as the claim of the value

Neither host waits for a device. A place is used again once its value is claimed; the sender's computing stream waits until
TAKEN is there. Both hosts can write the words themselves, so that no device waits for one that has failed.

A block is tried before it is used: the sender writes random bytes to both of its ends, as the first value, and the receiver
answers whether it has seen them.
"""

import os
import pickle
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pippy.drivers.wire.gpu.accelerator import Block
from pippy.drivers.wire.gpu.copies import DeviceCopies
from pippy.drivers.wire.gpu.cuda_driver import NotShared
from pippy.drivers.wire.gpu.shared_words import (
    ANSWER,
    CLAIM_COUNT,
    CLAIMS,
    FILLED,
    LAST,
    MAPPED,
    NOT_MAPPED,
    RETIRED,
    TAKEN,
    PageName,
    SharedWords,
)
from pippy.drivers.wire.ring import Ring
from pippy.drivers.wire.value_layout import TensorLayout, aligned

TRIED = 4096  # bytes at each end
_FIRST = 1  # the number of the value that tries the block


class BlockOffer(NamedTuple):
    """What the receiver needs to map a block."""

    number: int
    size: int
    page: PageName
    handle: bytes
    trial: bytes

    def pack(self) -> bytes:
        """The offer as bytes, to be sent."""
        return pickle.dumps(tuple(self))


@dataclass(slots=True)
class _Place:
    """A place in use, which ends at the position ``end`` of the ring."""

    number: int
    end: int
    step: int


class OutgoingBlock:
    """The sender's side. Raises NotShared if the device has no such block."""

    def __init__(self, copies: DeviceCopies, number: int, size: int) -> None:
        self.number, self.size, self._accelerator = number, size, copies.accelerator
        self.page, trial = SharedWords.create(), os.urandom(2 * TRIED)
        self._ring, self._places = Ring(size), deque[_Place]()
        self._sent, self._behind = 0, 0  # values so far; the claim behind which the next value is copied
        self.leaves = False
        with ExitStack() as opened:
            opened.callback(self.page.close)
            self._block = self._accelerator.share(size)
            opened.callback(self._block.close)
            self._words = self._accelerator.words(self.page.host)
            opened.callback(self._words.close)
            self._try(copies, trial)
            self._opened = opened.pop_all()
        self.offer = BlockOffer(number, size, self.page.name, self._block.handle, trial)

    @property
    def answer(self) -> int:
        """Whether the receiver has mapped it."""
        return self.page.words[ANSWER]

    @property
    def works(self) -> bool:
        """Whether the receiver has mapped it, and what both devices write is seen."""
        return self.answer == MAPPED and self.page.words[TAKEN] >= _FIRST

    @property
    def fault(self) -> str:
        """Why it cannot be used; nothing if it can, or if the receiver has not answered."""
        if self.answer == NOT_MAPPED:
            return self.page.text
        unseen = self.answer == MAPPED and not self.works
        return "the host does not see what the receiver's device writes to its memory" if unseen else ""

    @property
    def is_spent(self) -> bool:
        """Whether it has no more numbers for values."""
        return self._sent == LAST

    def find_place(self, size: int, step: int) -> int | None:
        """The offset of a place for a value of ``step``; None if there is none now. Then it is to be written."""
        if not self.works or len(self._places) == CLAIM_COUNT or self.is_spent:
            return None
        start = self._ring.allocate(size)
        while start is None and self._free_oldest():
            start = self._ring.allocate(size)
        if start is not None:
            self.page.words[CLAIMS + (self._sent + 1) % CLAIM_COUNT] = 0
            self._places.append(_Place(self._sent + 1, self._ring.head, step))
        return start

    def write(self, start: int, parts: Sequence[TensorLayout], tensors: Sequence[torch.Tensor]) -> int:
        """Let the device copy a value to its place. Returns the number of the value."""
        if self.page.words[TAKEN] < self._behind:
            self._words.wait(TAKEN, self._behind)
        with torch.no_grad():
            for part, tensor in zip(parts, tensors):
                self._accelerator.copy(_window(self._block, start, part), tensor.detach())
        self._sent += 1
        self._words.write(FILLED, self._sent)
        return self._sent

    def discard_before(self, step: int) -> None:
        """The receiver takes no values of earlier steps any more."""
        while self._places and self._places[0].step < step:
            if not self._free_oldest():
                self._ring.free(self._places.popleft().end)

    def release(self) -> None:
        """Let the device go on, whatever the receiver's device does. From any thread."""
        words = self.page.words
        if words[TAKEN] < self._behind:
            words[TAKEN] = self._behind

    @property
    def is_held(self) -> bool:
        """Whether the device may wait for the receiver's."""
        return self.page.words[TAKEN] < self._behind

    def retire(self) -> None:
        """Use it no more. The receiver unmaps it when it sees that; call `closed` until then."""
        self.leaves = True

    def closed(self) -> bool:
        """Whether it is freed, as it is when the receiver has unmapped it. The device has done what it was given."""
        while self._free_oldest():
            pass
        if self.leaves and not self._places:
            self.page.words[RETIRED] = 1
        if self.answer != NOT_MAPPED:
            return False
        self.free()
        return True

    def free(self) -> None:
        """Free it: no other process has it mapped. A second call does nothing."""
        self._opened.close()

    def _free_oldest(self) -> bool:
        """Whether the oldest place could be freed: the receiver has claimed its value."""
        if not self._places:
            return False
        claim = self.page.words[CLAIMS + self._places[0].number % CLAIM_COUNT]
        if claim:
            self._behind = max(self._behind, claim)
            self._ring.free(self._places.popleft().end)
        return claim > 0

    def _try(self, copies: DeviceCopies, trial: bytes) -> None:
        given = torch.frombuffer(bytearray(trial), dtype=torch.uint8)
        self.write(0, _ends(self.size), copies.to_device([given[:TRIED], given[TRIED:]]))
        copies.wait()
        if self.page.words[FILLED] != _FIRST:
            raise NotShared("the host does not see what the device writes to its memory")


class IncomingBlock:
    """The receiver's side. Raises NotShared if it cannot be mapped, or other bytes are seen than the sender wrote."""

    def __init__(self, copies: DeviceCopies, offer: BlockOffer) -> None:
        self._copies, self._accelerator = copies, copies.accelerator
        self.page = SharedWords.find(PageName(*offer.page))
        self.awaited = self._claimed = 0
        try:
            with ExitStack() as opened:
                self._block = self._accelerator.open(offer.handle, offer.size)
                opened.callback(self._block.close)
                self._words = self._accelerator.words(self.page.host)
                opened.callback(self._words.close)
                self._try(offer)
                self._opened = opened.pop_all()
        except NotShared as error:
            self.page.text = str(error)
            self.page.words[ANSWER] = NOT_MAPPED
            raise
        self.page.words[ANSWER] = MAPPED

    def take(self, number: int, start: int, parts: Sequence[TensorLayout]) -> list[torch.Tensor]:
        """Let the device copy a value to memory of its own; what this thread computes comes after that."""
        accelerator = self._accelerator
        with torch.no_grad(), accelerator.using(self._copies.into):
            own = [accelerator.empty(part.shape, part.stride, part.dtype) for part in parts]
            self.awaited = max(self.awaited, number)
            self._words.wait(FILLED, number)
            for part, tensor in zip(parts, own):
                accelerator.copy(tensor, _window(self._block, start, part))
            self._claimed += 1
            self._words.write(TAKEN, self._claimed)
        self.page.words[CLAIMS + number % CLAIM_COUNT] = self._claimed
        self._copies.has_arrived(own)
        return own

    def release(self) -> None:
        """Let the device go on, whatever the sender's device does. From any thread."""
        words = self.page.words
        if words[FILLED] < self.awaited:
            words[FILLED] = self.awaited

    @property
    def is_held(self) -> bool:
        """Whether the device may wait for the sender's."""
        return self.page.words[FILLED] < self.awaited

    def closed(self, at_once: bool = False) -> bool:
        """Whether it is unmapped, as it is when the sender has retired it, or ``at_once``. The device has copied all."""
        if not (at_once or self.page.words[RETIRED]):
            return False
        self._opened.close()
        self.page.words[ANSWER] = NOT_MAPPED
        return True

    def _try(self, offer: BlockOffer) -> None:
        if self.page.words[RETIRED]:
            raise NotShared("the sender needs it no more")
        seen = self._copies.to_host(self.take(_FIRST, 0, _ends(offer.size))).wait()
        if b"".join(bytes(each.tolist()) for each in seen) != offer.trial:
            raise NotShared("the receiver's device does not see what the sender's has written")


def _window(block: Block, start: int, part: TensorLayout) -> torch.Tensor:
    """A tensor at some place of a block."""
    window = torch.empty(0, dtype=part.dtype, device=block.memory.device)
    offset = (start + part.offset) // part.dtype.itemsize
    return window.set_(block.memory.untyped_storage(), offset, part.shape, part.stride)


def _ends(size: int) -> list[TensorLayout]:
    """The bytes at both ends of a block that are tried."""
    return [TensorLayout(torch.uint8, (TRIED,), (1,), False, at) for at in (0, size - TRIED)]


def place_size(size: int) -> int:
    """What a value of so many bytes takes of a block."""
    return max(aligned(size), 64)
