"""What the calls of computations do, changed in a worker's bound instructions.

`SeenCalls` notes what a call of a stage takes and gives in a step, for one who wants to see where a number goes wrong.

F    the values that it takes, and its outputs
B    the gradients of its outputs, and those that it gives for its inputs

`OutputProbe` finds outputs that have as many rows as a micro-batch by chance: a matrix of rows by rows, a number for each
feature. In a first step, a stage that returns something runs once more, with one row more than the first micro-batch has. What
has the rows of the micro-batch in front has one row more then, and is otherwise of the same shape.
"""

from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from pippy.drivers.batch.division import CutTensor, DividedValue, Division, PerMicrobatch
from pippy.drivers.plan.language.instructions import Compute, Instruction, Op
from pippy.drivers.protocol.steps import SeenCall
from pippy.drivers.worker.measure.leave_unchanged import left_unchanged
from pippy.ir.base.names import LOSS
from pippy.ir.base.trees import cat, children, has_rows, leaves, map_leaves, map_tensors, narrow

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


# Outputs that have the rows of a micro-batch by chance.


@dataclass(frozen=True)
class Sample:
    """Inputs of a stage. Each tensor has its rows, or several values for each, along its ``dims``; None if it has none."""

    inputs: tuple[Any, ...]
    dims: tuple[int | None, ...]
    rows: int

    def longer(self) -> tuple[Any, ...]:
        """The inputs with one row more: the last one twice, in tensors of their own."""
        dims = iter(self.dims)

        def longer(leaf: Any) -> Any:
            dim = next(dims)
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if dim is None:
                return leaf.clone()
            size = leaf.shape[dim]
            each = size // self.rows
            return cat([leaf, narrow(leaf, dim, size - each, each)], dim)

        return tuple(map_leaves(longer, value) for value in self.inputs)


def sample_of(inputs: Sequence[Any], names: Sequence[str], given: Collection[str], division: Division) -> Sample:
    """A sample of the first micro-batch. ``names`` are those of the inputs, and ``given`` those that the user gave."""
    rows = division.rows_of(0)
    known = {
        name: list(_dims_given(division.arguments[name], value)) for name, value in zip(names, inputs) if name in given
    }
    likely = [*(dim for dims in known.values() for dim in dims if dim is not None), 0]
    dims: list[int | None] = []
    for name, value in zip(names, inputs):
        dims += known[name] if name in known else [_dim_of(leaf, rows, likely) for leaf in leaves(value)]
    return Sample(tuple(inputs), tuple(dims), rows)


def _dims_given(divided: Any, value: Any) -> Iterator[int | None]:
    """Where each tensor of an input has its rows."""
    if isinstance(divided, CutTensor):
        yield divided.dim
    elif isinstance(divided, PerMicrobatch):
        fits = [
            isinstance(leaf, torch.Tensor) and divided.dim is not None and leaf.dim() > divided.dim
            for leaf in leaves(value)
        ]
        yield from (divided.dim if each else None for each in fits)
    elif isinstance(divided, DividedValue) or children(value) is None:
        yield from (None for _ in leaves(value))
    else:
        for item, its in zip(children(divided) or (), children(value) or ()):
            yield from _dims_given(item, its)


def _dim_of(leaf: Any, rows: int, likely: Sequence[int]) -> int | None:
    """Where a computed tensor has its rows, or several values for each row."""
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or not has_rows(leaf):
        return None
    exact = [dim for dim in likely if dim < leaf.dim() and leaf.shape[dim] == rows]
    if exact:
        return exact[0]
    return 0 if leaf.shape[0] and leaf.shape[0] % rows == 0 else None


class OutputProbe:
    """One check, in one step. ``by_chance`` has the values that it found, and the numbers of the tensors in them."""

    def __init__(self, order: Sequence[Instruction], division: Division) -> None:
        self.order, self.division = order, division
        self.by_chance: list[tuple[str, int]] = []

    def watching(self, code: Sequence[BoundCall]) -> list[BoundCall]:
        """The instructions, changed so that this sees what each stage takes and gives of the first micro-batch."""
        return with_calls(self.order, code, (Op.FORWARD,), self._probing, microbatch=0)

    def _probing(self, handle: Callable[..., None]) -> Callable[..., None]:
        def probing(step: Any, call: Any, microbatch: int, takes: Sequence[Any], gives: Sequence[Any]) -> None:
            handle(step, call, microbatch, takes, gives)
            if call.name != LOSS:
                inputs, outputs = [step.values[key] for key in takes], {name: step.values[name, 0] for name, _ in gives}
                self._see(call, [name for name, _ in takes], inputs, outputs, step.returned)

        return probing

    def _see(
        self, call: Any, names: Sequence[str], inputs: Sequence[Any], outputs: dict[str, Any], returned: Collection[str]
    ) -> None:
        if self.division.sizes is None or not any(name in returned for name in outputs):
            return
        detached = tuple(
            map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, v) for v in inputs
        )
        given = [name for name in names if name in self.division.arguments]
        sample = sample_of(detached, names, given, self.division)
        if not _says_its_rows(sample):
            return
        with suppress(Exception), torch.no_grad(), left_unchanged(call.module):
            more = call.run(sample.longer())
            longer = dict(zip(outputs, [more] if len(outputs) == 1 else more, strict=True))
            self.by_chance += [
                (name, number)
                for name, value in outputs.items()
                if name in returned
                for number in _by_chance(value, longer[name], sample.rows)
            ]


def _says_its_rows(sample: Sample) -> bool:
    """Whether all that depends on the number of rows is known: a tensor's dimension is; a number may be anything."""
    found = [*zip(leaves(list(sample.inputs)), sample.dims, strict=True)]
    values = [leaf for leaf, _ in found if not isinstance(leaf, torch.Tensor)]
    if any(leaf is not None and not isinstance(leaf, (bool, str)) for leaf in values):
        return False
    unknown = [leaf for leaf, dim in found if dim is None and isinstance(leaf, torch.Tensor)]
    return any(dim is not None for dim in sample.dims) and not any(
        size % sample.rows == 0 for leaf in unknown for size in leaf.shape
    )


def _by_chance(value: Any, longer: Any, rows: int) -> Iterator[int]:
    for number, (one, more) in enumerate(zip(leaves(value), leaves(longer), strict=True)):
        has_rows = isinstance(one, torch.Tensor) and one.dim() and one.shape[0] == rows
        if has_rows and tuple(more.shape) != (rows + 1, *one.shape[1:]):
            yield number
