"""Proves that a program can run: it computes each pass once, in an order that works, and no worker waits forever.

What is refused (worker 0 on the left, worker 1 on the right; time runs down):

    (1) incomplete   (2) out of order   (3) circular wait   (4) full channels, if each holds one value
        F0.0  F1.0       B0.0  F1.0         F0.0  F1.1          send x.0 to 1       send y.0 to 0
        F0.1  F1.1       F0.0  B1.0         B0.0  F1.0          send x.1 to 1       send y.1 to 0
        B0.0  B1.0                          F0.1  B1.0          receive y.0 from 1  receive x.0 from 0
              B1.1                          B0.1  B1.1          receive y.1 from 1  receive x.1 from 0

A program that only orders computations is checked against the edges between its stages. A program that sends and receives is
checked instruction by instruction: each value is made or received before it is used, and freed after that.
"""

from pippy.drivers.plan.language.errors import ArgumentError, beginning, require
from pippy.drivers.plan.language.exchanges import ExchangeProgram
from pippy.drivers.plan.language.placement import is_count
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.proofs.computations import check_computations
from pippy.drivers.plan.proofs.faults import Faults
from pippy.drivers.plan.proofs.values import check_values
from pippy.drivers.plan.proofs.waits import check_waits


def validate(program: Program, buffer: int | None = None) -> None:
    """Raise one ProgramError that lists every fault of the program, or do nothing.

    ``buffer`` is how many values a channel from one worker to another can hold before the sender has to wait. None means
    that senders never wait. Channels deliver in order.

    >>> from pippy.drivers.plan import make_schedule
    >>> program = make_schedule("fill_drain", workers=1, chunks=1)
    >>> validate(program)
    >>> validate(program.with_orders([reversed(program.orders[0])]))
    Traceback (most recent call last):
    pippy.drivers.plan.language.errors.ProgramError: program fill_drain cannot run: 1 fault
    - worker 0, B0.0: comes before F0.0
    ...
    """
    require("program", program, Program, "make one with make_schedule, or read its text with parse_program")
    if buffer is not None and not is_count(buffer):
        raise ArgumentError(
            f"buffer={beginning(buffer)} must be a whole number of at least 1, or None for channels without a limit"
        )
    faults = Faults(program)
    check_computations(program, faults)
    if program.lowered:
        check_values(program, faults)
    check_waits(program, buffer, faults)
    faults.raise_if_any()


def validate_exchange(program: ExchangeProgram) -> None:
    """Raise one ProgramError if what workers pass on outside of a step is not received, or is waited for forever.

    >>> from pippy.drivers.plan.language.instructions import parse_instruction
    >>> validate_exchange(ExchangeProgram("states", ((parse_instruction("send state of worker 0 to 1"),), ())))
    Traceback (most recent call last):
    pippy.drivers.plan.language.errors.ProgramError: program states cannot run: 1 fault
    - worker 0, send state of worker 0 to 1: is never received by worker 1
    ...
    """
    faults = Faults(program)
    check_waits(program, None, faults)
    faults.raise_if_any()
