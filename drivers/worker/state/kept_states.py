"""Copies of a worker's state, and of a neighbour's, in its memory: from them a run goes on when a worker was lost.

keep:   the own copy ──▶ the next worker       take:   a new process ◀── its own copy, from the next worker
        the worker before ──▶ its copy                               ◀── the copy of the worker before it
"""

from pippy.drivers.protocol.kept_states import KeepState, TakeKept
from pippy.drivers.protocol.states import WorkerState
from pippy.drivers.wire.transport import Transport
from pippy.drivers.worker.state.snapshots import Snapshots

KEPT_NUMBER = 1 << 26  # of copies in the keys of messages; those of gradient_sums.py are smaller


class KeptStates:
    """The copies for one driver on one worker, by their points, and by whose they are."""

    def __init__(self, index: int, snapshots: Snapshots, transport: Transport) -> None:
        self.index, self.snapshots, self.transport = index, snapshots, transport
        self.kept: dict[int, dict[int, WorkerState]] = {}

    def keep(self, message: KeepState, number: int) -> None:
        """Copy what the worker holds, send the copy to a neighbour, and take another's."""
        self.kept = {point: each for point, each in self.kept.items() if point == message.before}
        own = self.kept[message.point] = {self.index: self.snapshots.whole()}
        if message.to != self.index:
            self._send(message.to, number, self.index, own[self.index])
            own[message.of] = self._receive(number, message.of, message.of)

    def take(self, message: TakeKept, number: int) -> None:
        """Go back to a point. What lost workers had of it comes from neighbours."""
        kept = self.kept = {message.point: self.kept.get(message.point, {})}
        own = kept[message.point]
        for of, to in message.sends:
            self._send(to, number, of, own[of])
        for of, source in message.receives:
            own[of] = self._receive(number, of, source)
        self.snapshots.restore(own[self.index])

    def _send(self, to: int, number: int, of: int, state: WorkerState) -> None:
        self.transport.send(to, (number, KEPT_NUMBER, of), state)

    def _receive(self, number: int, of: int, source: int) -> WorkerState:
        state: WorkerState = self.transport.receive((number, KEPT_NUMBER, of), source)
        return state
