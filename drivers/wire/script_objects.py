"""Objects of a script that cloudpickle writes by a name which another process lacks, or cannot write. Here each has a way.

    object                                       how it travels
    ──────────────────────────────────────────   ─────────────────────────────────────────────────────────────────
    a function under `functools.lru_cache`       its function, and the options of an empty cache
    `torch.library.custom_op`, and its operator  its functions; the other process defines it where it has none
    a module that another class has made, and    its name
      one in a module, `torch._C._functions`

A custom operator that a function reaches by name, as in `torch.ops.mylib.cube(x)`, travels with the function's code.
"""

import functools
import importlib
import inspect
import operator
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
    reduce = _of_module if isinstance(obj, ModuleType) else _REDUCE.get(type(obj))
    return None if reduce is None else reduce(obj)


def operators_named_in(function: FunctionType) -> list[CustomOpDef]:
    """The custom operators that the code of a function reaches through `torch.ops`."""
    names = names_of(function)
    return [op for op in list(OPDEFS.values()) if {"ops", op._namespace, op._name} <= names]


def _of_cached(function: Any) -> tuple[Any, ...] | None:
    found = cloudpickle._lookup_module_and_qualname(function)
    if found is not None and not cloudpickle._is_registered_pickle_by_value(found[0]):
        return None  # the other process can import it
    return _cached, (function.__wrapped__, function.cache_parameters())


def _cached(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    return functools.lru_cache(**options)(function)


def _of_module(module: ModuleType) -> tuple[Any, ...] | None:
    name = module.__name__
    if name in sys.modules:
        return None if type(module) is ModuleType else (importlib.import_module, (name,))
    if name.partition(".")[0] not in sys.modules or _inner_module(name) is not module:
        return None
    return _inner_module, (name, [op for op in OPDEFS.values() if name == f"torch.ops.{op._namespace}"])


def _inner_module(name: str, _: object = None) -> Any:
    root, *path = name.split(".")
    found: Any = importlib.import_module(root)
    for each in path:
        found = getattr(found, each, None)
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
    if name in OPDEFS and name not in _arrived:
        return OPDEFS[name]
    namespace, _, own = name.partition("::")
    _arrived[name] = CustomOpDef(namespace, own, schema, lambda: None, [getattr(torch.Tag, tag) for tag in tags])
    return _arrived[name]


def _put_functions(op: CustomOpDef, state: tuple[Any, ...]) -> None:
    """Give an operator that has arrived its functions. One that this process defined itself has them."""
    functions, kernels, vmap, autocast = state
    if _arrived.get(op._qualname) is not op:
        return
    op.__dict__.update(functions)
    for device, function in kernels.items():
        op.register_kernel(device)(function)
    if vmap is not None:
        op.register_vmap(vmap)
    for device, dtype in autocast.items():
        op.register_autocast(device, dtype)


def _of_operator(overload: torch._ops.OpOverload) -> tuple[Any, ...] | None:
    """An operator by its definition; that of torch is pickled by its name."""
    op = OPDEFS.get(overload._name)
    return None if op is None else (operator.attrgetter("_opoverload"), (op,))


def _of_packet(packet: torch._ops.OpOverloadPacket) -> tuple[Any, ...] | None:
    op = OPDEFS.get(packet._qualified_op_name)
    return None if op is None else (operator.attrgetter("_opoverload.overloadpacket"), (op,))


_REDUCE: dict[type, Callable[[Any], tuple[Any, ...] | None]] = {
    functools._lru_cache_wrapper: _of_cached,
    CustomOpDef: _of_custom_op,
    torch._ops.OpOverload: _of_operator,
    torch._ops.OpOverloadPacket: _of_packet,
}
