"""Copies of a worker's state, and of a neighbour's, in its host's memory: from them a run goes on when a worker was lost.

keep:   the own copy ──▶ the next worker       take:   a new process ◀── its own copy, from the next worker
        the worker before ──▶ its copy                               ◀── the copy of the worker before it

Where the stages are placed anew, a worker takes the copies of those that had its stages.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from pippy.drivers.protocol.state import KeepState, TakeKept, WorkerState
from pippy.drivers.worker.state.snapshots import Snapshots

RunExchange = Callable[[Any, int, Any], None]  # of instructions, in the command with a number, of what is passed on


class KeptStates:
    """The copies for one driver on one worker, by their points, and by whose they are. ``exchange`` runs instructions."""

    def __init__(self, index: int, snapshots: Snapshots, exchange: RunExchange) -> None:
        self.index, self.snapshots, self.exchange = index, snapshots, exchange
        self.kept: dict[int, dict[int, WorkerState]] = {}

    def keep(self, message: KeepState, number: int) -> None:
        """Copy what the worker holds, send the copy to a neighbour, and take another's."""
        self.kept = {point: each for point, each in self.kept.items() if point == message.before}
        own = self.kept[message.point] = {self.index: self.snapshots.whole()}
        self.exchange(message.order, number, PassedStates(own))

    def restore(self, message: TakeKept, number: int) -> None:
        """Go back to a point. What lost workers had of it comes from neighbours."""
        copies = self.kept.get(message.point, {})
        self.kept = {message.point: copies}
        self.exchange(message.order, number, PassedStates(copies))
        if message.sources:
            found = self.snapshots.of_stages([copies[source] for source in message.sources])
            random = copies[self.index].random if self.index in message.sources else None
            self.snapshots.restore(replace(found, random=random))


class PassedStates:
    """The copies of one point, by whose they are: the number of a worker is that of its copy in messages."""

    def __init__(self, states: dict[int, WorkerState]) -> None:
        self.states = states

    def leaving(self, send: Any) -> Iterable[tuple[int, WorkerState]]:
        """The copy that a send moves."""
        return [(send.of, self.states[send.of])]

    def awaited(self, receive: Any) -> Iterable[int]:
        """The number of the copy that a receive waits for."""
        return [receive.of]

    def take(self, number: int, value: WorkerState) -> None:
        """Have a copy from another worker."""
        self.states[number] = value
