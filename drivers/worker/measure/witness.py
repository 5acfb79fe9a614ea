"""Notes what each call of a stage takes and gives in a step, for one who wants to see where a number goes wrong.

F    the values that it takes, and its outputs
B    the gradients of its outputs, and those that it gives for its inputs
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pippy.drivers.protocol.steps import SeenCall
from pippy.ir.base.trees import map_tensors

Bound = tuple[Callable[..., None], tuple[Any, ...]]


class Witness:
    """Sees the computations of one step. ``forward`` and ``backwards`` are the handlers of an executor, and ``values`` its
    values; ``given`` has the gradients of a call's outputs."""

    def __init__(
        self,
        values: Mapping[Any, Any],
        forward: Callable[..., None],
        backwards: Sequence[Callable[..., None]],
        given: Callable[[Sequence[Any], int], Any],
    ) -> None:
        self.values, self.forward, self.backwards, self.given = values, forward, backwards, given
        self.seen: list[SeenCall] = []

    def watching(self, code: Sequence[Bound]) -> list[Bound]:
        """The instructions, changed so that computations are noted."""
        return [(handle, self._watched(operands)) for handle, operands in code]

    def _watched(self, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        if operands and operands[0] == self.forward:
            return self._see_forward, *operands[1:]
        if operands and operands[0] in self.backwards:
            return self._seeing_backward(operands[0]), *operands[1:]
        return operands

    def _see_forward(self, call: Any, microbatch: int, takes: Sequence[Any], gives: Sequence[Any]) -> None:
        taken = _copies([self.values[key] for key in takes])
        self.forward(call, microbatch, takes, gives)
        given = _copies([self.values[key] for key in gives]) if all(key in self.values for key in gives) else None
        self.seen.append(SeenCall("F", call.name, microbatch, taken, given))

    def _seeing_backward(self, handle: Callable[..., None]) -> Callable[..., None]:
        def see(call: Any, microbatch: int, takes: Sequence[Any], gives: Sequence[Any]) -> None:
            taken = _copies(self.given(takes, microbatch))
            handle(call, microbatch, takes, gives)
            given = _copies([self.values.get(key) for key in gives])
            self.seen.append(SeenCall("B", call.name, microbatch, taken, given))

        return see


def _copies(values: Any) -> Any:
    return map_tensors(lambda each: each.detach().to("cpu", copy=True), values)
