"""What a program of `torch.export` fixes: the kinds of its arguments, conditions on their sizes, the dtypes, and the mode."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree

from pippy.ir.base.errors import InputError, TracingError
from pippy.ir.base.modes import ModelModes
from pippy.ir.base.names import named_state
from pippy.ir.base.node_notes import FAKE_VALUE
from pippy.ir.call.guards import Condition, Guards
from pippy.ir.call.kinds import ConstantKind, TensorKind, kind_of
from pippy.ir.trace.arguments import Example, signature_of
from pippy.ir.trace.exported import ExportedModel

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_REMEDY = (
    "export the model again, with such arguments, and with dynamic_shapes for the sizes that change: "
    "torch.export.export(model, args, dynamic_shapes={'x': {0: torch.export.Dim.AUTO}})"
)
_FLAT = re.compile(r"\bL\['flat_args'\]\[(\d+)\]")  # what a program of strict=True calls the leaves of its arguments
_LEAST = 2  # torch keeps sizes of 0 and 1 apart, and says that of each size that is free


def guards_of(model: ExportedModel) -> Guards:
    """The guards of a program."""
    program = model.program
    placeholders = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    leaves = [
        _value_of(placeholders[spec.arg.name], spec.arg)
        for spec in program.graph_signature.input_specs
        if spec.kind.name == "USER_INPUT"
    ]
    spec: Any = program.call_spec.in_spec
    args, kwargs = _pytree.tree_unflatten(leaves, spec)
    inputs = dict(zip(signature_of(model).parameters, [*args, *kwargs.values()]))
    kinds = {
        name: kind_of(value, _of_tensor, lambda each: ConstantKind(type(each), each)) for name, value in inputs.items()
    }
    inputs_by_number = [f"L{_pytree.keystr(path)}" for path, _ in _pytree.tree_flatten_with_path(inputs)[0]]
    conditions = [
        Condition(_FLAT.sub(lambda match: inputs_by_number[int(match[1])], code)) for code in program._guards_code
    ]
    conditions += map(Condition, _ranges(program, inputs))
    for condition in conditions:
        _check_condition(condition, inputs)
    dtypes = {name: each.dtype for name, each in named_state(model) if each.is_floating_point() or each.is_complex()}
    return Guards(kinds, conditions=tuple(dict.fromkeys(conditions)), dtypes=dtypes, remedy=_REMEDY)


def _value_of(node: fx.Node, argument: object) -> Any:
    return FAKE_VALUE.of(node) if FAKE_VALUE.is_at(node) else getattr(argument, "value", None)


def exported_modes(model: ExportedModel) -> ModelModes:
    """The mode in which a program was exported, as far as its operations say so. It cannot follow the other."""
    if model.mode_line is None:
        return ModelModes()
    return ModelModes(traced={"": model.training}, refused={not model.training: model.mode_line})


def check_example(model: ExportedModel, guards: Guards, example: Example | None) -> None:
    """Refuse an example that the program was not exported for."""
    if example is None:
        return
    signature = signature_of(model)
    args, kwargs = example.of_model(signature)
    try:
        arguments = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise example.unfit(signature, error, {}) from None
    for fault in guards.other_kinds(arguments):
        raise InputError(fault)
    guards.check(arguments)


def _of_tensor(tensor: torch.Tensor) -> TensorKind:
    sizes = tuple(None if isinstance(size, torch.SymInt) else size for size in tensor.shape)
    return TensorKind(tensor.dim(), tensor.dtype, sizes)


def _ranges(program: "ExportedProgram", inputs: dict[str, Any]) -> Iterator[str]:
    """Conditions for the ranges of sizes, and for sizes that are the same."""
    first: dict[Any, str] = {}
    for path, leaf in _pytree.tree_flatten_with_path(inputs)[0]:
        for dim, size in enumerate(leaf.shape) if isinstance(leaf, torch.Tensor) else ():
            if not isinstance(size, torch.SymInt):
                continue
            code, expression = f"L{_pytree.keystr(path)}.size()[{dim}]", size.node.expr
            if not expression.is_symbol:
                raise TracingError(
                    f"this ExportedProgram was exported for {code[1:]} == {expression}, a size that follows from another\n"
                    "What to do: export it with torch.export.Dim.AUTO for this size"
                )
            if expression in first:
                yield f"{code} == {first[expression]}"
                continue
            first[expression] = code
            bounds = program.range_constraints.get(expression)
            if bounds is not None and bounds.lower > _LEAST:
                yield f"{code} >= {bounds.lower}"
            if bounds is not None and re.fullmatch(r"\d+", str(bounds.upper)):
                yield f"{code} <= {bounds.upper}"


def _check_condition(condition: Condition, inputs: dict[str, Any]) -> None:
    """Refuse a condition that Python cannot compute."""
    example = _pytree.tree_map_only(torch.Tensor, _hinted, inputs)
    try:
        condition.holds(example)
    except Exception as error:
        raise TracingError(
            f"this ExportedProgram is right for {condition} alone, which cannot be checked ({type(error).__name__}: {error})\n"
            "What to do: give pipeline() the model itself"
        ) from error


def _hinted(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the sizes of the example."""
    return torch.empty(
        [int(size.node.hint) if isinstance(size, torch.SymInt) else size for size in tensor.shape], device="meta"
    )
