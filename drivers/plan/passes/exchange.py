"""Makes a program of what workers pass to one another outside of a step, and proves it."""

from collections import defaultdict
from collections.abc import Iterable

from pippy.drivers.plan.language.exchange_program import ExchangeProgram
from pippy.drivers.plan.language.instructions import Instruction
from pippy.drivers.plan.proofs.validate import validate_exchange

Move = tuple[Instruction, Instruction]  # a send, and its receive


def exchange(what: str, moves: Iterable[Move]) -> ExchangeProgram:
    """The program with these sends and receives. Each worker sends all that it has to send, and then receives.

    >>> from pippy.drivers.plan.language.instructions import ReceiveState, SendState
    >>> there, back = ((SendState(one, to=two), ReceiveState(one, source=one)) for one, two in ((0, 1), (1, 0)))
    >>> [list(map(str, order)) for order in exchange("states", [there, back]).orders]
    [['send state of worker 0 to 1', 'receive state of worker 1 from 1'], ['send state of worker 1 to 0', 'receive state of ...
    """
    sends, receives = defaultdict(list), defaultdict(list)
    for send, receive in moves:
        assert send.kind.sends_to is not None and receive.kind.receives_from is not None
        sends[receive.kind.receives_from(receive)].append(send)
        receives[send.kind.sends_to(send)].append(receive)
    workers = range(max([-1, *sends, *receives]) + 1)
    program = ExchangeProgram(what, tuple((*sends[worker], *receives[worker]) for worker in workers))
    validate_exchange(program)
    return program
