"""Values on their way to other workers by RPC. One that does not arrive is noticed by its sender."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch.futures import Future

from pippy.drivers.wire.messages import rpc
from pippy.drivers.wire.pickling import pickle_message
from pippy.drivers.wire.received_values import ValueKey
from pippy.drivers.wire.worker_transport import WorkerTransport

BEYOND = (
    2.0  # seconds beyond a cluster's timeout: the controller's pings have found a lost process by then, and say more
)
RATE = 1 << 20  # bytes that a connection must carry in a second, or it is taken for cut
_OVERSLEPT = 1.0  # so late, this process was stopped, and the others may have been, too


@dataclass(slots=True)
class _UnderWay:
    """The sizes of the values that a peer has not taken up, by number. ``since`` is when that began, or one was taken up."""

    since: float = 0.0
    sizes: dict[int, int] = field(default_factory=dict)

    def oldest(self) -> int:
        """The size of the value that was posted first."""
        return next(iter(self.sizes.values()))


class RpcValues:
    """Posts values to the peers, whose names for RPC ``name`` gives, and calls ``lost``, once, for a peer that takes none up.

    RPC raises nothing where the value is waited for: a connection that breaks fails the sender's call, and one that is cut
    without a word fails nothing. So the sender watches its calls: a peer must take up a value within ``seconds``, and a second
    more for each MiB of it, or of those that are under way before it.

    >>> from torch.futures import Future
    >>> RpcValues(str, lambda peer, how: print(peer, how), 0.01).watch(2, 8, Future()).join(1)
    2 it has not taken up a value of 8 bytes within 0.01 s
    """

    def __init__(self, name: Callable[[int], str], lost: Callable[[int, str], None], seconds: float) -> None:
        self.name, self.lost, self.seconds = name, lost, seconds
        self._changed = threading.Condition()
        self._under_way: dict[int, _UnderWay] = {}
        self.lost_peers: set[int] = set()
        self._number = 0
        self._idle = self._ended = False
        self._watcher: threading.Thread | None = None

    def post(self, to: int, key: ValueKey, value: Any) -> None:
        """Send a value; never waits."""
        pickled = pickle_message(value)
        try:
            future = rpc.deliver(self.name(to), key, pickled)
        except ConnectionError as error:
            self.note_lost(to, f"the connection broke: {_first_line(error)}")
        else:
            self.watch(to, len(pickled.data) + sum(tensor.nbytes for tensor in pickled.tensors), future)

    def watch(self, to: int, size: int, future: "Future[Any]") -> threading.Thread:
        """Watch a call that carries a value of so many bytes. Returns the thread that does."""
        with self._changed:
            under_way = self._under_way.setdefault(to, _UnderWay())
            if not under_way.sizes:
                under_way.since = time.monotonic()
            self._number += 1
            number = self._number
            under_way.sizes[number] = size
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="pippy values", daemon=True)
                self._watcher.start()
            elif self._idle:
                self._changed.notify()
        future.add_done_callback(partial(self._taken_up, to, number))
        return self._watcher

    def end(self) -> None:
        """From now on connections may break."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _taken_up(self, to: int, number: int, future: "Future[Any]") -> None:
        with self._changed:
            self._under_way[to].sizes.pop(number, None)
            self._under_way[to].since = time.monotonic()
        try:
            future.value()
        except Exception as error:  # RPC raises errors of all kinds
            self.note_lost(to, f"the connection broke: {_first_line(error)}")

    def note_lost(self, to: int, how: str) -> None:
        """Note that a peer is lost, and how that was found."""
        with self._changed:
            known = to in self.lost_peers or self._ended
            self.lost_peers.add(to)
        if not known:
            self.lost(to, how)

    def _watch(self) -> None:
        while (late := self._next_late()) is None:
            pass
        if late:
            self.note_lost(*late)

    def _next_late(self) -> tuple[int, str] | tuple[()] | None:
        """Wait for a time to look, and look: a peer that has taken nothing up in time, and how. () at the end."""
        with self._changed:
            due = {to: self._due(each) for to, each in self._under_way.items() if each.sizes}
            first = min(due, key=due.__getitem__) if due else None
            now = time.monotonic()
            if self._ended:
                return ()
            if first is None or due[first] > now:
                self._idle = first is None
                self._changed.wait(None if first is None else due[first] - now)
            elif now - due[first] > _OVERSLEPT:
                for each in self._under_way.values():
                    each.since = now
            else:
                size = self._under_way[first].oldest()
                seconds = self.seconds + size / RATE
                return first, f"it has not taken up a value of {size:,} bytes within {seconds:.3g} s"
        return None

    def _due(self, under_way: _UnderWay) -> float:
        return under_way.since + self.seconds + under_way.oldest() / RATE


def transport_by_rpc(
    index: int, name: Callable[[int], str], reports_to: str, timeout: float, **options: Any
) -> tuple[WorkerTransport, RpcValues]:
    """A worker's transport, with these options, that posts values by RPC, and what it is to call with a peer that it loses.

    The worker reports to this process, the controller, that it has lost another, and notes it itself.
    """

    def lost(peer: int, how: str) -> None:
        rpc.report_lost(reports_to, index, peer, how)  # first: it says more than that the worker cannot go on
        transport.mark_lost(peer)

    values = RpcValues(name, lost, timeout + BEYOND)
    transport = WorkerTransport(index, post=values.post, lost=values.note_lost, **options)
    return transport, values


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
