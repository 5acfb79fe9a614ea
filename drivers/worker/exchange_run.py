"""Runs what a worker does of an exchange outside of a step: it sends what is here, and takes what others send."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from pippy.drivers.plan.language.instructions import Instruction
from pippy.drivers.wire.transport import Transport
from pippy.drivers.worker.measure.profiler import named


class Passed(Protocol):
    """What is passed on: the values that an instruction moves, each with its number in the keys of messages."""

    def leaving(self, send: Instruction) -> Iterable[tuple[int, Any]]:
        """What a send moves."""

    def awaited(self, receive: Instruction) -> Iterable[int]:
        """The numbers of what a receive waits for."""

    def take(self, number: int, value: Any) -> None:
        """Take what another worker has sent."""


class ExchangeRun:
    """A worker's instructions of one exchange. ``at`` is the number of the one that runs now."""

    def __init__(self, order: Sequence[Instruction], transport: Transport) -> None:
        self.order, self.transport = order, transport
        self.at = 0

    def run(self, command: int, passed: Passed) -> None:
        """Run all instructions, in the command with this number."""
        order = self.order
        for self.at, each in enumerate(order):
            with named(each):
                if to := each.kind.sends_to:
                    for number, value in passed.leaving(each):
                        self.transport.send(to(each), (command, number, 0), value)
                elif source := each.kind.receives_from:
                    for number in passed.awaited(each):
                        passed.take(number, self.transport.receive((command, number, 0), source(each)))

    def current(self) -> Instruction:
        """The instruction that runs now."""
        return self.order[self.at]

    def source(self) -> int | None:
        """The worker that the instruction takes a value from."""
        source = self.current().kind.receives_from
        return None if source is None else source(self.current())
