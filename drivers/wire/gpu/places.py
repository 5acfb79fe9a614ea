"""A place for one value at a time: memory of the sender's device that the receiver has opened, and two events.

        sender                                              receiver
    1 the computing stream waits for TAKEN              4 the stream "into" waits for FILLED
    2 it copies the value to the place                  5 it copies the value to memory of its own
      and records FILLED                                  and records TAKEN
    3 a note with the place  ── carrier ──▶             6 word that the place is free  ── carrier ──▶

Neither host waits for a device. A device waits only for what another one was given before: 4 is started when the note is
here, and the next 1 when the word is. So no two devices wait for each other.
"""

from collections.abc import Sequence

import torch

from pippy.drivers.wire.gpu.accelerator import Event
from pippy.drivers.wire.gpu.copies import DeviceCopies
from pippy.drivers.wire.value_layout import TensorLayout

TRIED = 512  # bytes at each end, by which a place is tried


class Place:
    """A place, as one of its two workers sees it: ``mine`` is the event that this one records, ``theirs`` the other."""

    def __init__(self, copies: DeviceCopies, memory: torch.Tensor, mine: Event, theirs: Event | None = None) -> None:
        self.memory, self.mine, self.theirs, self._copies = memory, mine, theirs, copies
        self.values = 0  # that were here so far
        self.step: int | None = None  # of the value that is here, as far as the sender knows
        self.leaves = False  # no value comes here any more

    @property
    def ends(self) -> TensorLayout:
        """The bytes that are tried, as two rows."""
        return TensorLayout(torch.uint8, (2, TRIED), (self.memory.nbytes - TRIED, 1), False, 0)

    @property
    def is_held(self) -> bool:
        """Whether this device waits here for the other one, or will."""
        return self.theirs is not None and not self.mine.query() and not self.theirs.query()

    def fill(self, parts: Sequence[TensorLayout], tensors: Sequence[torch.Tensor]) -> None:
        """Let the sender's device copy a value here."""
        accelerator = self._copies.accelerator
        computing = accelerator.current_stream()
        if self.theirs is not None:
            computing.wait_event(self.theirs)
        with torch.no_grad():
            for part, tensor in zip(parts, tensors):
                accelerator.copy(self._window(part), tensor.detach())
        self.mine.record(computing)
        self.values += 1

    def take(self, parts: Sequence[TensorLayout]) -> list[torch.Tensor]:
        """Let the receiver's device copy the value to memory of its own; what this thread computes comes after that."""
        accelerator, into = self._copies.accelerator, self._copies.into
        with torch.no_grad(), accelerator.using(into):
            own = [accelerator.empty(part.shape, part.stride, part.dtype) for part in parts]
            into.wait_event(self.theirs)
            for part, tensor in zip(parts, own):
                accelerator.copy(tensor, self._window(part))
        self.mine.record(into)
        self.values += 1
        self._copies.has_arrived(own)
        return own

    def _window(self, part: TensorLayout) -> torch.Tensor:
        window = torch.empty(0, dtype=part.dtype, device=self.memory.device)
        return window.set_(self.memory.untyped_storage(), part.offset // part.dtype.itemsize, part.shape, part.stride)
