"""What workers pass to one another outside of a step: a program without computations, for the workers of a cluster."""

from collections.abc import Iterator
from dataclasses import dataclass

from pippy.drivers.plan.language.instructions import Instruction
from pippy.drivers.plan.language.program import INDENT


@dataclass(frozen=True)
class ExchangeProgram:
    """The sends and receives of all workers, by their numbers in the cluster. ``schedule`` says what is passed on.

    >>> from pippy.drivers.plan.language.instructions import ReceiveState, SendState
    >>> print(ExchangeProgram("states", ((SendState(of=0, to=1),), (ReceiveState(of=0, source=0),))))
    exchange states
    worker 0
      send state of worker 0 to 1
    worker 1
      receive state of worker 0 from 0
    """

    schedule: str
    orders: tuple[tuple[Instruction, ...], ...]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The lines of its text. A worker that does nothing has none."""
        yield from self.header()
        for worker, order in enumerate(self.orders):
            if order:
                yield f"worker {worker}"
                yield from (f"{INDENT}{instruction}" for instruction in order)

    def header(self) -> Iterator[str]:
        """The lines before the first worker's."""
        yield f"exchange {self.schedule}"

    @property
    def workers(self) -> int:
        return len(self.orders)

    def order_of(self, worker: int) -> tuple[Instruction, ...]:
        """The instructions of a worker."""
        return self.orders[worker] if worker < self.workers else ()
