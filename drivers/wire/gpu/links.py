"""Values that go from device to device of a host, past the host's memory; which do, and why others do not.

A value that finds no place goes by the host. At the end of that command its sender makes a place for another such value, puts
random bytes there, and tells the receiver, which opens the place at the end of the next command and answers whether it sees
those bytes. From then on one value after another uses it. Whatever fails is the reason why values to that worker go on
through the host's memory. So memory and events are opened and freed at the ends of commands, where a worker waits anyway.
"""

import itertools
import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from pippy.drivers.wire.gpu.accelerator import NotShared
from pippy.drivers.wire.gpu.copies import DeviceCopies
from pippy.drivers.wire.gpu.places import TRIED, Place
from pippy.drivers.wire.pickling import pickle_to_bytes
from pippy.drivers.wire.transport import Transport
from pippy.drivers.wire.value_layout import ValueLayout, aligned, rebuild, take_apart

LIMIT = 1 << 28  # bytes of a device's memory for what one worker sends to another
_FIRST = 4  # places with which that begins; it grows by one for each value that found none
_WORD = 1 << 62  # in place of a step, in the keys of what two workers tell each other of their places


class Note(NamedTuple):
    """Stands for a value that is in a place: the place, the value's number there, its layout, its leaves without tensors."""

    data: bytes


class DeviceLinks:
    """The places that one worker shares with the workers ``near``, which compute on devices of this host.

    ``carrier`` takes notes and words to them. All but `held` and `ways` is called by the thread that computes.
    """

    def __init__(self, carrier: Transport, copies: DeviceCopies, near: Collection[int]) -> None:
        self.carrier, self.copies, self.near = carrier, copies, frozenset(near)
        self.reasons: dict[int, str] = {}  # why values to a worker do not go this way
        self._outgoing: dict[tuple[int, int], Place] = {}  # by receiver and number
        self._incoming: dict[tuple[int, int], Place] = {}  # by sender and number
        self._wanted = defaultdict[int, list[int]](list)  # the sizes of the values to a worker that found no place
        self._numbers = itertools.count()  # of places and words

    def note(self, to: int, step: int, value: Any, layout: ValueLayout) -> Note | None:
        """Let the device copy a value to a place. Returns the note to send; None if the value has to go by the host."""
        parts, on_host = take_apart(value), self.copies.accelerator.is_on_host
        opaque = any(isinstance(leaf, torch.Tensor) for leaf in parts.rest)
        if to not in self.near or opaque or not parts.tensors or any(map(on_host, parts.tensors)):
            return None
        size = max(aligned(layout.size), 2 * TRIED)
        fits = [
            (place.memory.nbytes, place.values, number)
            for number, place in self._places(to).items()
            if place.memory.nbytes >= size and not place.leaves and self._is_free(number, place)
        ]
        if not fits:
            self._wanted[to].append(size)
            return None
        *_, number = min(fits)  # of the smallest, the one that has had fewest values
        place = self._outgoing[to, number]
        place.fill(layout.tensors, parts.tensors)
        place.step = step
        return Note(pickle_to_bytes((number, place.values, layout, parts.rest)))

    def take(self, source: int, step: int, note: Note) -> Any:
        """The value of a step for which a note has come."""
        number, value, layout, rest = pickle.loads(note.data)
        own = self._incoming[source, number].take(layout.tensors)
        self.carrier.send(source, (step, ~number, value), None)  # the place is free, unless the step was given up
        for part, tensor in zip(layout.tensors, own):
            tensor.requires_grad_(part.requires_grad)
        return rebuild(layout, own, rest)

    def settle(self) -> None:
        """Make, open and close places. The device has done all that it was given."""
        awaited = {to for (to, _), place in self._outgoing.items() if place.theirs is None}
        for peer, word, given in self._words(self.near):
            word(self, peer, *given)
        for (to, number), place in self._outgoing.items():
            if place.leaves and self._is_free(number, place):
                place.theirs = None
                self._tell(to, DeviceLinks._close, number)
        for to, sizes in self._wanted.items():
            count = len(self._places(to))
            for size in (sizes if count else sizes * _FIRST)[: max(_FIRST, count)] if to not in awaited else ():
                self._add_place(to, size)
        self._wanted.clear()

    def trim(self) -> None:
        """Give back the places of this worker, as soon as those that have opened them let go."""
        for place in self._outgoing.values():
            place.leaves = True
        self.reasons.clear()

    def discard_before(self, step: int) -> None:
        """Drop the values of earlier steps: nobody takes them any more."""
        for place in self._outgoing.values():
            if place.step is not None and place.step < step:
                place.step = None

    def forget(self, peers: Collection[int]) -> None:
        """Other processes are in the places of these peers: free what was shared with those that were there."""
        if any(to in peers for to, _ in [*self._outgoing, *self._incoming]):
            self.copies.wait()
        for known in (self._outgoing, self._incoming):
            for key in [key for key in known if key[0] in peers]:
                del known[key]
        for peer in peers:
            self.reasons.pop(peer, None)
            self._wanted.pop(peer, None)
        self._words(peers)

    def close(self) -> None:
        """Free all places: this worker sends and takes nothing any more, and its process may go on."""
        self._outgoing.clear()
        self._incoming.clear()

    def held(self) -> frozenset[tuple[int, int, int]]:
        """Where this device waits for another one, or will: the worker, the place, how many values were there."""
        places = [*self._outgoing.items(), *self._incoming.items()]
        return frozenset((*key, place.values) for key, place in places if place.is_held)

    def ways(self) -> dict[int, str]:
        """To which workers values go past the host; and to which they do not, with the reason."""
        places = [*self._outgoing.items()]
        return self.reasons | {to: "" for (to, _), place in places if place.theirs is not None and not place.leaves}

    def _places(self, to: int) -> dict[int, Place]:
        return {number: place for (receiver, number), place in self._outgoing.items() if receiver == to}

    def _is_free(self, number: int, place: Place) -> bool:
        """Whether the receiver has opened a place, and taken the last value."""
        if place.step is not None and self.carrier.ready(key := (place.step, ~number, place.values)):
            self.carrier.received.take(key)
            place.step = None
        return place.theirs is not None and place.step is None

    def _add_place(self, to: int, size: int) -> None:
        accelerator, trial = self.copies.accelerator, os.urandom(2 * TRIED)
        if to in self.reasons or size > LIMIT - sum(place.memory.nbytes for place in self._places(to).values()):
            return
        try:
            (memory, handle), (filled, event_handle) = accelerator.share(size), accelerator.shared_event()
        except NotShared as error:
            self.reasons[to] = str(error)
            return
        number = next(self._numbers)
        place = self._outgoing[to, number] = Place(self.copies, memory, filled)
        given = torch.frombuffer(bytearray(trial), dtype=torch.uint8).view(2, TRIED)
        place.fill([place.ends], [self.copies.to_device(given)])
        self._tell(to, DeviceLinks._open, number, handle, event_handle, trial)

    # -- words: what a worker tells another to do at the end of a command

    def _tell(self, peer: int, word: Callable[..., None], *given: Any) -> None:
        self.carrier.send(peer, (_WORD, self.carrier.index, next(self._numbers)), pickle.dumps((word, given)))

    def _words(self, peers: Collection[int]) -> list[Any]:
        """Take what these workers have told, in their order."""
        self.carrier.ready((_WORD, -1, 0))  # takes in what is there
        values = self.carrier.received.values
        keys = sorted(key for key in list(values) if key[0] == _WORD and key[1] in peers)
        return [(key[1], *pickle.loads(values.pop(key))) for key in keys]

    def _open(self, source: int, number: int, handle: bytes, event_handle: bytes, trial: bytes) -> None:
        accelerator = self.copies.accelerator
        try:
            memory, filled = accelerator.open(handle), accelerator.open_event(event_handle)
            taken, event_handle = accelerator.shared_event()
            place = self._incoming[source, number] = Place(self.copies, memory, taken, filled)
            (seen,) = self.copies.to_host(place.take([place.ends])).wait()
            if bytes(seen.flatten().tolist()) != trial:
                raise NotShared("the receiver's device does not see what the sender's has written")
            self._tell(source, DeviceLinks._was_opened, number, event_handle)
        except NotShared as error:
            self._close(source, number, str(error))

    def _was_opened(self, to: int, number: int, event_handle: bytes) -> None:
        try:
            self._outgoing[to, number].theirs = self.copies.accelerator.open_event(event_handle)
        except NotShared as error:
            self.reasons[to] = str(error)
            self._tell(to, DeviceLinks._close, number)

    def _close(self, source: int, number: int, why: str = "") -> None:
        self._incoming.pop((source, number), None)
        self._tell(source, DeviceLinks._was_closed, number, why)

    def _was_closed(self, to: int, number: int, why: str) -> None:
        del self._outgoing[to, number]
        if why:
            self.reasons[to] = why
