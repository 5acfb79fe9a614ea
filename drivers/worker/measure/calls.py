"""Changes what the calls of computations do, in a worker's bound instructions."""

from collections.abc import Callable, Container, Sequence
from typing import Any

from pippy.drivers.plan.language.instructions import Compute, Instruction, Op

Handle = Callable[..., None]  # it takes the step, and what the instruction is bound to
BoundCall = tuple[Handle, tuple[Any, ...]]


def with_calls(
    order: Sequence[Instruction],
    code: Sequence[BoundCall],
    ops: Container[Op],
    changed: Callable[[Handle], Handle],
    microbatch: int | None = None,
) -> list[BoundCall]:
    """The code of ``order``, with other handlers of the calls in these computations, of one micro-batch or of all.

    >>> from pippy.drivers.plan.language.instructions import parse_instruction
    >>> code = [(print, ([(print, ("F",))], 0)), (print, ([(print, ("B",))], 0))]
    >>> order = [parse_instruction("F0.0"), parse_instruction("B0.0")]
    >>> with_calls(order, code, [Op.BACKWARD], lambda handle: min)[1]
    (<built-in function print>, ([(<built-in function min>, ('B',))], 0))
    """

    def wanted(each: Instruction) -> bool:
        return isinstance(each, Compute) and each.op in ops and microbatch in (None, each.microbatch)

    return [
        (handle, ([(changed(inner), given) for inner, given in operands[0]], *operands[1:]))
        if wanted(each) and operands
        else (handle, operands)
        for each, (handle, operands) in zip(order, code, strict=True)
    ]
