"""Objects of a script that cloudpickle writes by a name which another process lacks, or cannot write. Here each has a way.

    object                                       how it travels
    ──────────────────────────────────────────   ─────────────────────────────────────────────────────────────────
    a function under `functools.lru_cache`       its function, and the options of an empty cache
    a function of `torch.jit.script` or `trace`  its code; it arrives as a scripted module, which is called alike
    `torch.library.custom_op`, and its operator  its functions; the other process defines it where it has none
    a module in a module, `torch._C._functions`  the name of the importable module, and the attributes that lead there

A custom operator that a function reaches by name, as in `torch.ops.mylib.cube(x)`, travels with the function's code.
"""

import functools
import importlib
import inspect
import io
import sys
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from cloudpickle import cloudpickle
from torch._library.custom_ops import OPDEFS, CustomOpDef

from pippy.ir.record.reached import names_of

_FUNCTIONS = ("_init_fn", "_abstract_fn", "_setup_context_fn", "_backward_fn")  # that an operator looks up at each call
_arrived: dict[str, CustomOpDef] = {}  # the operators that this process did not define itself, by their names


def reduced(obj: Any) -> tuple[Any, ...] | None:
    """How to pickle an object of the table above; None for any other object.

    >>> square = functools.lru_cache(maxsize=3)(lambda n: n * n)
    >>> make, parts = reduced(square)
    >>> make(*parts)(3), make(*parts).cache_parameters()
    (9, {'maxsize': 3, 'typed': False})
    """
    reduce = _REDUCE.get(type(obj))
    return None if reduce is None else reduce(obj)


def operators_named_in(function: FunctionType) -> list[CustomOpDef]:
    """The custom operators that the code of a function reaches through `torch.ops`."""
    names = names_of(function)
    return [op for op in list(OPDEFS.values()) if {"ops", op._namespace, op._name} <= names]


def _of_cached(function: Any) -> tuple[Any, ...] | None:
    if cloudpickle._lookup_module_and_qualname(function) is not None:
        return None  # the other process can import it
    return _cached, (function.__wrapped__, function.cache_parameters())


def _cached(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    return functools.lru_cache(**options)(function)


def _of_scripted(function: Any) -> tuple[Any, ...]:
    return _scripted, (function.save_to_buffer(),)


def _scripted(code: bytes) -> Any:
    return torch.jit.load(io.BytesIO(code))


def _of_module(module: ModuleType) -> tuple[Any, ...] | None:
    root, _, path = module.__name__.partition(".")
    if module.__name__ in sys.modules or root not in sys.modules or _inner_module(root, path) is not module:
        return None
    return _inner_module, (
        root,
        path,
        [op for op in OPDEFS.values() if module.__name__ == f"torch.ops.{op._namespace}"],
    )


def _inner_module(root: str, path: str, _: object = None) -> Any:
    found: Any = importlib.import_module(root)
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _of_custom_op(op: CustomOpDef) -> tuple[Any, ...]:
    functions = {name: getattr(op, name) for name in _FUNCTIONS}
    kernels = {device: _kernel(function) for device, function in op._backend_fns.items()}
    state = (functions, kernels, op._vmap_fn, op._autocast_dtype)
    return _custom_op, (op._qualname, op._schema, [tag.name for tag in op._tags]), state, None, None, _put_functions


def _kernel(function: Any) -> Any:
    """The function that was registered for a device: torch wraps it in one that asks whether the kernel is enabled."""
    function = inspect.unwrap(function)
    return inspect.getclosurevars(function).nonlocals.get("fn", function)


def _custom_op(name: str, schema: str, tags: list[str]) -> CustomOpDef:
    known = OPDEFS.get(name)
    if known is None or (name in _arrived and known._schema != schema):
        _arrived[name] = known = CustomOpDef(
            *name.split("::"), schema, lambda: None, [getattr(torch.Tag, tag) for tag in tags]
        )
    return known


def _put_functions(op: CustomOpDef, state: tuple[Any, ...]) -> None:
    """Give an operator that has arrived its functions. One that this process defined itself has them."""
    functions, kernels, vmap, autocast = state
    if _arrived.get(op._qualname) is not op:
        return
    op.__dict__.update(functions)
    for device, function in kernels.items():
        if device in op._backend_fns:
            op._backend_fns[device] = function
        else:
            op.register_kernel(device)(function)
    if vmap is not None:
        op.register_vmap(vmap)
    for device, dtype in autocast.items():
        op.register_autocast(device, dtype)


def _of_operator(operator: Any) -> tuple[Any, ...] | None:
    """An operator as its custom operator; an operator of torch is pickled by its name."""
    name = operator._qualified_op_name if isinstance(operator, torch._ops.OpOverloadPacket) else operator._name
    op = OPDEFS.get(name)
    return None if op is None else (_operator, (op, type(operator)))


def _operator(op: CustomOpDef, kind: type) -> Any:
    overload = op._opoverload
    return overload if kind is torch._ops.OpOverload else overload.overloadpacket


_REDUCE: dict[type, Callable[[Any], tuple[Any, ...] | None]] = {
    functools._lru_cache_wrapper: _of_cached,
    torch.jit.ScriptFunction: _of_scripted,
    ModuleType: _of_module,
    torch._ops._OpNamespace: _of_module,
    CustomOpDef: _of_custom_op,
    torch._ops.OpOverload: _of_operator,
    torch._ops.OpOverloadPacket: _of_operator,
}
