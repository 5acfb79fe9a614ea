"""What the calls of computations do, changed in a worker's bound instructions.

`SeenCalls` notes what a call of a stage takes and gives in a step, for one who wants to see where a number goes wrong.

F    the values that it takes, and its outputs
B    the gradients of its outputs, and those that it gives for its inputs
"""

from collections.abc import Callable, Container, Sequence
from typing import Any

from pippy.drivers.plan.language.instructions import Compute, Instruction, Op
from pippy.drivers.protocol.steps import SeenCall
from pippy.ir.base.trees import map_tensors

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


class SeenCalls:
    """Sees the computations of one step of a program. ``given`` has the gradients of a call's outputs."""

    def __init__(self, order: Sequence[Instruction], given: Callable[[Any, Sequence[Any], int], Any]) -> None:
        self.order, self.given = order, given
        self.seen: list[SeenCall] = []

    def watching(self, code: Sequence[BoundCall]) -> list[BoundCall]:
        """The instructions, changed so that computations are noted."""
        code = with_calls(self.order, code, (Op.FORWARD,), self._seeing_forward)
        return with_calls(self.order, code, (Op.BACKWARD, Op.BACKWARD_INPUT), self._seeing_backward)

    def _seeing_forward(self, handle: Callable[..., None]) -> Callable[..., None]:
        def see(step: Any, call: Any, microbatch: int, takes: Sequence[Any], gives: Sequence[Any]) -> None:
            taken = _copies([step.values[key] for key in takes])
            handle(step, call, microbatch, takes, gives)
            given = _copies([step.values[key] for key in gives]) if all(key in step.values for key in gives) else None
            self.seen.append(SeenCall("F", call.name, microbatch, taken, given))

        return see

    def _seeing_backward(self, handle: Callable[..., None]) -> Callable[..., None]:
        def see(step: Any, call: Any, microbatch: int, takes: Sequence[Any], gives: Sequence[Any]) -> None:
            taken = _copies(self.given(step, takes, microbatch))
            handle(step, call, microbatch, takes, gives)
            given = _copies([step.values.get(key) for key in gives])
            self.seen.append(SeenCall("B", call.name, microbatch, taken, given))

        return see


def _copies(values: Any) -> Any:
    return map_tensors(lambda each: each.detach().to("cpu", copy=True), values)
