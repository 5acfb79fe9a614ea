"""A worker's connections of TCP to workers of other hosts, one for each that it passes values to or takes them from."""

import logging
import socket
import threading
from collections.abc import Callable, Collection

from pippy.drivers.protocol.commands import Invite
from pippy.drivers.wire.messages import rpc
from pippy.drivers.wire.messages.doors import Door, Invitation, come_in
from pippy.drivers.wire.messages.message_queue import DeliveryFailure
from pippy.drivers.wire.messages.rpc_values import BEYOND
from pippy.drivers.wire.messages.silent_connections import break_when_silent
from pippy.drivers.wire.pickling import pickle_message, unpickle

_log = logging.getLogger(__name__)


class FarPeers:
    """Connects worker ``index`` with its ``peers`` of other hosts. ``name`` gives their names for RPC.

    ``address`` is the address by which others reach this host; without it there are no connections. ``take`` gets each
    connection, with the peer's number. Values for a peer that cannot be connected go by RPC, and a warning is logged.
    Neither method takes longer than ``timeout``.

    >>> FarPeers(0, str, [1], None, 5.0, print).invite(1)
    """

    def __init__(
        self,
        index: int,
        name: Callable[[int], str],
        peers: Collection[int],
        address: str | None,
        timeout: float,
        take: Callable[[int, socket.socket], None],
    ) -> None:
        self.index, self.name, self.peers = index, name, frozenset(peers)
        self.address, self.within, self.silence, self._taken = address, timeout / 2, timeout + BEYOND, take
        self._lock = threading.Lock()
        self._dialled: set[int] = set()

    def invite(self, guest: int) -> Invitation | None:
        """Open a door for a peer, and return its place; None if it cannot be opened."""
        if self.address is None:
            return None
        return Door(self.address, [guest], self._take, 2 * self.within).invitation

    def dial(self, peer: int) -> None:
        """Connect with a peer, unless that is done, or cannot be done."""
        with self._lock:
            if self.address is None or peer in self._dialled:
                return
            self._dialled.add(peer)
            try:
                invitation = self._invitation(peer)
                if invitation is not None:
                    self._take(peer, come_in(invitation, self.index, self.within))
            except OSError as error:
                _log.warning(
                    "worker %d passes all values to and from worker %d by RPC, which takes longer: it got no connection of its "
                    "own with it: %s",
                    self.index,
                    peer,
                    error,
                )

    def _take(self, peer: int, end: socket.socket) -> None:
        break_when_silent(end, self.silence / 3, self.silence)
        self._taken(peer, end)

    def _invitation(self, peer: int) -> Invitation | None:
        asked = rpc.urgent(self.name(peer), pickle_message(Invite(self.index)))
        rpc.wait_all([asked], self.within)
        if not asked.done():
            raise TimeoutError(f"it did not answer within {self.within:g} s")
        try:
            answer = unpickle(asked.value())
        except Exception as error:  # RPC raises errors of all kinds
            raise ConnectionError(str(error)) from error
        if isinstance(answer, DeliveryFailure):
            raise ConnectionError(f"it could not open a port:\n{answer.text}")
        invitation: Invitation | None = answer
        return invitation
