"""What workers exchange beside the edges of a program.

In a step these are sums of gradients, and notes:

    a worker with copies    send gradients ──▶  the owner: receive gradients of each, reduce, send sum to each  ──▶ receive sum
    a worker with norms     send notes to each twin ──▶  receive notes from each twin

A copy whose stage has no backward has no gradient, and is sent the sum. What workers pass to one another outside of a step is a
program without computations, for the workers of a cluster.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pippy.drivers.plan.language.edges import GradientSum
from pippy.drivers.plan.language.instructions import Instruction, Payload, ReceiveExchanged, Reduce, SendExchanged
from pippy.drivers.plan.language.program import INDENT, Program


@dataclass(frozen=True)
class ExchangeProgram:
    """The sends and receives of all workers, by their numbers in the cluster. ``schedule`` says what is passed on.

    >>> from pippy.drivers.plan.language.instructions import parse_instruction
    >>> texts = "send state of worker 0 to 1", "receive state of worker 0 from 0"
    >>> print(ExchangeProgram("states", tuple((parse_instruction(text),) for text in texts)))
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


def sum_work(program: Program, each: GradientSum, worker: int) -> list[Instruction]:
    """What a worker does for a sum, in order.

    >>> from pippy.drivers.plan import make_schedule
    >>> program = make_schedule("1f1b", workers=2, chunks=2, replicas=2)
    >>> [str(instruction) for instruction in sum_work(program, program.sums[0], worker=0)]
    ['receive gradients of stage 0 part 0 from 2', 'reduce stage 0 part 0', 'send sum of stage 0 part 0 to 2']
    """
    name, owner, holders = each.name, each.owner, program.holders(each)
    others = [holder for holder in holders if holder != owner]
    if worker == owner:
        giving = [other for other in others if stages_with_gradients(program, each, other)]
        received = [ReceiveExchanged(Payload.GRADIENTS, other, name) for other in giving]
        return [*received, Reduce(name), *(SendExchanged(Payload.SUM, other, name) for other in others)]
    if worker not in holders:
        return []
    gives = bool(stages_with_gradients(program, each, worker))
    return [*[SendExchanged(Payload.GRADIENTS, owner, name)] * gives, ReceiveExchanged(Payload.SUM, owner, name)]


def notes_work(program: Program, worker: int) -> list[Instruction]:
    """What a worker does for the notes of batch norms, in order: it tells its twins, and is told by them.

    >>> from dataclasses import replace
    >>> from pippy.drivers.plan import make_schedule
    >>> program = replace(make_schedule("1f1b", workers=2, chunks=2, replicas=2), notes=(1,))
    >>> [[str(instruction) for instruction in notes_work(program, worker)] for worker in (2, 3)]
    [[], ['send notes to 1', 'receive notes from 1']]
    """
    twins = program.twins(worker) if program.noting(worker) else []
    return [made(Payload.NOTES, twin) for made in (SendExchanged, ReceiveExchanged) for twin in twins]


def stages_with_gradients(program: Program, each: GradientSum, worker: int) -> set[int]:
    """The stages of a worker whose backwards give gradients that are a part of a sum."""
    return set(each.stages).intersection(program.stages_of(worker), program.backward)
