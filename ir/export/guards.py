"""The guards of an exported program: what its example has fixed."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import nn
from torch.utils._sympy.printers import PythonPrinter

from pippy.ir.base import source
from pippy.ir.base.names import named_state
from pippy.ir.base.trees import tensors
from pippy.ir.call.guards import Condition, Guards
from pippy.ir.call.kinds import ConstantKind, TensorKind, kind_of
from pippy.ir.export.program import Program


def guards_of(model: nn.Module, program: Program) -> Guards:
    """The guards that the sizes of the example, and forward's questions about them, make."""
    inputs = {name: value for name, value in program.inputs.items() if name not in program.constants}
    kinds = {name: kind_of(value, partial(_of_tensor, program), _of_constant) for name, value in inputs.items()}
    free = Guards(kinds).free_sizes(program.example)
    texts = {size: f"{path}.size({dim})" for path, dim, size, _ in free}
    sizes = {size: given for _, _, size, given in free}
    env = next((each.fake_mode.shape_env for each in tensors(list(inputs.values()))), None)  # type: ignore[attr-defined]
    conditions = tuple(_conditions(program, env, texts, sizes)) if texts else ()
    state = {name: tensor for name, tensor in named_state(model) if tensor.is_floating_point() or tensor.is_complex()}
    dtypes = {name: tensor.dtype for name, tensor in state.items()}
    return Guards(kinds, conditions=conditions, dtypes=dtypes, asked_autocast=program.kept.asked_autocast)


def _of_tensor(program: Program, tensor: torch.Tensor) -> TensorKind:
    return TensorKind(tensor.dim(), tensor.dtype, program.sizes[id(tensor)])


def _of_constant(value: Any) -> ConstantKind:
    return ConstantKind(type(value), value)


def _conditions(program: Program, env: Any, texts: Mapping[str, str], sizes: Mapping[str, int]) -> list[Condition]:
    """What torch knows of the sizes. Where that is no code that Python runs, the sizes in it are those of the example."""
    found: dict[str, Condition] = {}

    def add(expression: Any, where: source.Source | None) -> None:
        free = {str(each) for each in getattr(expression, "free_symbols", ())}
        if free and free <= set(texts):  # what depends on values is checked by the graph itself
            code = PythonPrinter().doprint(expression)
            readable = expression.xreplace({each: sympy.Symbol(texts[str(each)]) for each in expression.free_symbols})
            condition = Condition(code, PythonPrinter().doprint(readable), where)
            try:
                condition.holds(sizes)
            except Exception:  # sympy has functions of its own
                for name in free:
                    text = f"{texts[name]} == {sizes[name]}"
                    found.setdefault(text, Condition(f"{name} == {sizes[name]}", text, where))
            else:
                found.setdefault(code, condition)

    for number, guard in enumerate(env.guards):
        if number not in program.kept.asked_again or not isinstance(guard.expr, sympy.Ne):
            add(guard.expr, _line(guard.sloc))
    for symbol, value in env.replacements.items():
        add(sympy.Eq(symbol, value, evaluate=False), None)
    asked = [set(each.expr.free_symbols) for each in env.guards]
    for symbol, bounds in env.var_to_range.items():
        if {symbol} in asked:  # the bound comes from there
            continue
        if isinstance(bounds.lower, (int, sympy.Integer)) and bounds.lower > 0:
            add(sympy.Ge(symbol, bounds.lower, evaluate=False), None)
        if isinstance(bounds.upper, (int, sympy.Integer)):
            add(sympy.Le(symbol, bounds.upper, evaluate=False), None)
    return list(found.values())


def _line(place: Any) -> source.Source | None:
    """The user's line of a guard of torch's."""
    for frame in (place.maybe_user_loc, place.framework_loc):
        if hasattr(frame, "filename") and source.is_users(frame.filename):
            return source.Source(frame.filename, frame.lineno, frame.name)
    return None
