"""Facts of operations: what each changes in place, what its result may share memory with, and whether it draws random numbers.

operation                              who says so
─────────────────────────────────────────────────────────────────────────────────────────────────────────────
an operator of torch, also a method    its schemas: ``view(Tensor(a) self, …) -> Tensor(a)``; its tag
                                         `nondeterministic_seeded`; and _VIEWS_WITHOUT_SCHEMA
another function of torch              ``inplace=True``, a name that ends with ``_``, _VIEWS_WITHOUT_SCHEMA, _DRAWING
a function of the module `operator`    IN_PLACE, and _CHANGING
a module of torch                      ``inplace=True``, _VIEW_MODULES, _RATES_OF_MODULES, _DRAWING_MODULES
anything else                          nobody
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MethodDescriptorType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.jit._builtins import _find_builtin

IN_PLACE = "iadd iand ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor".split()
"""The functions of the module `operator` that Python calls for `x += y` and its like."""
RATES = ("dropout_p", "dropout")
"""What operators call the rate of a dropout among their arguments."""

_CHANGING = frozenset((*IN_PLACE, "iconcat", "setitem", "delitem"))
_NO_NUMBERS = frozenset(("requires_grad_", "retain_grad", "retain_grad_", "detach_"))  # they change no number
# Operators and functions of torch that may return an argument or a view of it, of which no schema tells.
_VIEWS_WITHOUT_SCHEMA = frozenset(
    """atleast_1d atleast_2d atleast_3d broadcast_tensors cartesian_prod einsum histogramdd meshgrid sum_to_size type_as
    unsafe_chunk unsafe_split unsafe_split_with_sizes
    alpha_dropout dropout dropout1d dropout2d dropout3d feature_alpha_dropout feature_dropout""".split()
)
_SHAPE_ATTRIBUTES = frozenset(
    ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda", "itemsize", "nbytes")
)
_NORMS = (  # no schema tells what these change
    F.batch_norm,
    F.instance_norm,
    torch.ops.aten.batch_norm.default,
    torch.ops.aten.instance_norm.default,
)
# Functions of torch that are written in Python, and draw.
_DRAWING = frozenset(
    """dropout1d dropout2d dropout3d feature_alpha_dropout fractional_max_pool2d fractional_max_pool2d_with_indices
    fractional_max_pool3d fractional_max_pool3d_with_indices gumbel_softmax multi_head_attention_forward
    pca_lowrank svd_lowrank""".split()
)
_VIEW_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)
_RATES_OF_MODULES = {nn.modules.dropout._DropoutNd: "p", nn.RNNBase: "dropout", nn.MultiheadAttention: "dropout"}
_DRAWING_MODULES = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


@dataclass(frozen=True)
class Effect:
    """The arguments that a call changes in place, and those whose memory its result may share."""

    changed: Sequence[Any] = ()
    shared: Sequence[Any] = ()


def name_of(operation: Callable[..., Any] | str) -> str:
    """The name of a function, of an operator of torch, or of a method that is given by its name.

    >>> name_of(torch.relu), name_of(torch.ops.aten.relu.default), name_of("view")
    ('relu', 'relu', 'view')
    """
    if isinstance(operation, str):
        return operation
    if isinstance(operation, torch._ops.OpOverload):
        return operation._schema.name.partition("::")[2]
    return getattr(operation, "__name__", type(operation).__name__)


def is_in_place(operation: Callable[..., Any] | str) -> bool:
    """Whether an operation changes its first argument in place and returns it, by the name of the operation.

    >>> import operator
    >>> is_in_place(operator.iadd), is_in_place("add_"), is_in_place("add")
    (True, True, False)
    """
    if (operator := _operator(operation)) is not None:
        return operator in _CHANGING
    name = name_of(operation)
    return name.endswith("_") and (name.startswith("_foreach_") or not name.startswith("_"))


def _operator(operation: Callable[..., Any] | str) -> str | None:
    """The name that an operator of Python has in the module `operator`; None for another operation."""
    if isinstance(operation, str):
        return operation[2:-2] if operation.startswith("__") and operation.endswith("__") else None
    return name_of(operation) if getattr(operation, "__module__", "") in ("_operator", "operator") else None


def effect_of(operation: Callable[..., Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Effect | None:
    """What the call of a function, or of a method by its name, changes and shares; None if it is not known.

    >>> effect_of("detach", ("x",), {}), effect_of(torch.relu_, ("x",), {})
    (Effect(changed=[], shared=['x']), Effect(changed=['x'], shared=['x']))
    """
    if (operator := _operator(operation)) is not None:
        changed = args[:1] if operator in _CHANGING else []
        return Effect(changed, args[:1] if changed or operator in ("getitem", "pos") else [])
    if operation is getattr:
        return Effect([], [] if args[1] in _SHAPE_ATTRIBUTES else args[:1])
    arguments = [*args, *kwargs.values()]
    if not isinstance(operation, str):
        if operation in _NORMS:
            bound = _bind(operation, args, kwargs)
            updates = bound.get("training") or bound.get("use_input_stats")
            return Effect([bound.get("running_mean"), bound.get("running_var")] if updates is not False else [])
        if _bind(operation, args, kwargs).get("inplace") is True:
            return Effect(arguments[:1], arguments[:1])
    name, module = name_of(operation), getattr(operation, "__module__", None) or ""
    overloads = _overloads(name if isinstance(operation, MethodDescriptorType) else operation)
    if overloads:
        return _effect_of_schemas(name, args, kwargs, overloads)
    if module.partition(".")[0] == "torch":
        changed = changed_by_name(operation, arguments)
        return Effect([*changed, kwargs.get("out")], arguments if name in _VIEWS_WITHOUT_SCHEMA else changed)
    return Effect() if module in ("builtins", "math") else None


def changed_by_name(operation: Callable[..., Any] | str, given: Sequence[Any]) -> Sequence[Any]:
    """The arguments whose numbers an operation without a schema changes, by its name."""
    return given[:1] if is_in_place(operation) and name_of(operation) not in _NO_NUMBERS else []


def module_changes(module: nn.Module) -> bool:
    """Whether a module changes its input: one with ``inplace=True``, or a Sequential that begins with such a one."""
    if type(module) is nn.Sequential and len(module):
        return module_changes(module[0])
    return getattr(module, "inplace", False) is True


def module_shares(module: nn.Module) -> bool:
    """Whether a module of torch may return its input, or a view of it."""
    if isinstance(module, nn.Sequential):
        return all(map(module_shares, module))
    return isinstance(module, _VIEW_MODULES) or module_changes(module)


def torch_module_draws(module: nn.Module) -> bool:
    """Whether the forward of a module of torch draws random numbers, without the modules in it.

    >>> torch_module_draws(nn.Dropout()), torch_module_draws(nn.Dropout(0.0))
    (True, False)
    """
    rates = [getattr(module, rate) for kind, rate in _RATES_OF_MODULES.items() if isinstance(module, kind)]
    return any(rates) or isinstance(module, _DRAWING_MODULES)


@cache
def draws(operation: Any) -> bool:
    """Whether an operator, or the function of torch with a name, draws random numbers.

    >>> draws(torch.ops.aten.bernoulli.p), draws("bernoulli_"), draws("relu")
    (True, True, False)
    """
    if isinstance(operation, str):
        is_operator = operation.isidentifier() and not operation.startswith("__")
        found = getattr(torch.ops.aten, operation, None) if is_operator else None
        return operation in _DRAWING or (found is not None and draws(found))
    return any(torch.Tag.nondeterministic_seeded in each.tags for each in overloads_of(operation))


def overloads_of(operator: Any) -> list[torch._ops.OpOverload]:
    """The overloads of an operator of torch. Of an overload, it alone."""
    if isinstance(operator, torch._ops.OpOverload):
        return [operator]
    return [getattr(operator, name) for name in operator.overloads()]


def drops_nothing(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call of a function is a dropout whose rate is the number 0.

    >>> drops_nothing(F.dropout, ("x", 0.0), {}), drops_nothing(F.scaled_dot_product_attention, ("q", "k", "v"), {})
    (True, True)
    """
    name = name_of(function)
    if "dropout" not in name and name != "scaled_dot_product_attention":
        return False
    bound = _bind(function, args, kwargs)
    rate = bound.get("p", bound.get("dropout_p", 0.0))
    return isinstance(rate, int | float) and rate == 0


@dataclass(frozen=True)
class _Argument:
    """One argument of a schema."""

    name: str
    kwarg_only: bool
    changed: bool
    shared: bool


_Overload = tuple[_Argument, ...]


def _effect_of_schemas(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], overloads: Sequence[_Overload]
) -> Effect:
    """What any of the overloads says."""
    changed, shared = [], [args, *kwargs.values()] if name in _VIEWS_WITHOUT_SCHEMA else []
    for overload in overloads:
        for argument, value in _bound(overload, args, kwargs):
            changed += [value] if argument.changed and name not in _NO_NUMBERS else []
            shared += [value] if argument.shared else []
    return Effect(changed, shared)


def _bound(overload: _Overload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[_Argument, Any]]:
    yield from zip((each for each in overload if not each.kwarg_only), args)
    for name, value in kwargs.items():
        argument = next((each for each in overload if each.name == name), None)
        if argument is not None:
            yield argument, value
        elif name in ("input", "tensor"):  # what Python calls the argument that a schema calls self
            yield overload[0], value


@cache
def _overloads(function: Any) -> tuple[_Overload, ...]:
    """The overloads of an operator, or of a method by its name, that take a tensor or several first."""
    if isinstance(function, torch._ops.OpOverload):
        return (_arguments(function._schema),) if function._schema.arguments else ()
    if isinstance(function, torch._ops.OpOverloadPacket):
        schemas = [each._schema for each in overloads_of(function)]
    else:
        name = f"aten::{function}" if isinstance(function, str) else _find_builtin(function)
        schemas = torch._C._jit_get_schemas_for_operator(name) if name else []
    by_type: dict[str, list[_Overload]] = {}
    for schema in schemas:
        if schema.arguments:
            by_type.setdefault(str(schema.arguments[0].type), []).append(_arguments(schema))
    of_tensors = [*by_type.get("Tensor", []), *by_type.get("Optional[Tensor]", [])]
    # Beside an operator on a tensor, one on a list of tensors is of TorchScript: `sort`, say, which sorts the list.
    return tuple(of_tensors or by_type.get("List[Tensor]", []))


def _arguments(schema: torch.FunctionSchema) -> _Overload:
    returns_alias = any(result.alias_info for result in schema.returns)
    return tuple(
        _Argument(
            each.name,
            each.kwarg_only,
            changed=each.alias_info is not None and each.alias_info.is_write,
            shared=each.alias_info is not None and returns_alias,
        )
        for each in schema.arguments
    )


def _bind(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names: defaults too, where the function is written in Python."""
    signature = _signature(function)
    if signature is None:
        overload = next(iter(_overloads(function)), ())
        return {**{argument.name: value for argument, value in _bound(overload, args, {})}, **kwargs}
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return dict(kwargs)
    bound.apply_defaults()
    return bound.arguments


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a function that is written in Python."""
    try:
        return None if isinstance(function, torch._ops.OpOverload) else inspect.signature(function)
    except (TypeError, ValueError):  # most functions written in C
        return None
