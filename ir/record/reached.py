"""The tensors that code reaches by plain references: closures, globals, defaults, attributes, hooks, methods of objects.

    loss_fn = lambda output, target: mse(output, target) + model.decay(0.1)

    loss_fn ─closure─▶ model ─the code names .decay─▶ Net.decay ─it names .weight─▶ model.weight

A process that such code is sent to needs these tensors. Where code names attributes of an object, only these are followed: a
loss that reads `model.config` needs no parameter. An object of which it names none, `decay(model)`, is followed into all that
it holds. What is reached in other ways, `getattr(model, name)`, is not found here; on a worker it cannot be read.
Code of installed packages is followed into what it was given (closures, defaults), and not into its globals.
"""

import contextlib
import copyreg
import functools
import inspect
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from cloudpickle.cloudpickle import _extract_code_globals
from torch import fx, nn

from pippy.ir.base import source
from pippy.ir.base.errors import PippyError
from pippy.ir.base.names import first_names, named_state
from pippy.ir.run.copies import GradientHooks
from pippy.ir.run.in_place import memory_of

NamedThere = frozenset[str] | None
"""The attributes that the code around an object names; None for all."""

_Inside = Iterator[tuple[str, Any, NamedThere]]
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
HOOK_ATTRIBUTES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_STATE = ("_parameters", "_buffers", "_modules")
_GIVE_STATE = frozenset(  # methods of modules, whose callers may read any parameter
    "parameters named_parameters buffers named_buffers children named_children modules named_modules state_dict apply "
    "get_parameter get_buffer get_submodule forward".split()
)


@dataclass(frozen=True)
class Reached:
    """An object, the way to it, and the innermost code on this way."""

    value: Any
    path: str
    names: NamedThere = None
    code: CodeType | None = None

    def __str__(self) -> str:
        return f"{self.path}, defined at {self.code.co_filename}:{self.code.co_firstlineno}" if self.code else self.path


def reached_by(
    root: Any, name: str, narrowly: bool = True, kind: type | tuple[type, ...] = torch.Tensor
) -> list[Reached]:
    """The tensors, or other objects, that ``root`` reaches, with those that it has registered. ``name`` is what errors call it.

    If not ``narrowly``, all attributes of all objects are followed.

    >>> linear = nn.Linear(2, 2)
    >>> [each.path for each in reached_by(functools.partial(nn.functional.linear, weight=linear.weight), "loss_fn")]
    ["loss_fn.keywords['weight']"]
    """
    found: dict[int, Reached] = {}
    seen: dict[int, Reached] = {}  # they keep the objects, whose ids are used
    pending = deque([Reached(root, name)])
    while pending:
        each = pending.popleft()
        before = seen.get(id(each.value))
        if before is not None:
            if before.names is None or (each.names is not None and each.names <= before.names):
                continue
            each = Reached(each.value, each.path, each.names and each.names | before.names, each.code)
        seen[id(each.value)] = each
        if isinstance(each.value, kind):
            found[id(each.value)] = each if before is None else before
        pending.extend(_inside(each, narrowly))
    return list(found.values())


def _inside(each: Reached, narrowly: bool) -> Iterator[Reached]:
    kind = next(kind for kind in _LOOK if isinstance(each.value, kind))
    code = getattr(each.value, "__code__", None) if isinstance(each.value, (FunctionType, MethodType)) else None
    for path, value, names in _LOOK[kind](each.value, each.names):
        if not isinstance(value, _PLAIN):
            kept = names if narrowly or isinstance(value, ModuleType) else None
            yield Reached(value, each.path + path, kept, code or each.code)


def _in_tensor(tensor: Any, _: NamedThere) -> _Inside:
    hooks = (
        GradientHooks.of(tensor) if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.is_leaf else GradientHooks()
    )
    yield from ((".<gradient hook>", hook, None) for hook in (*hooks.on_gradient, *hooks.after_accumulation))
    yield from ((f".{name}", value, frozenset()) for name, value in vars(tensor).items())


def _in_function(function: Any, _: NamedThere) -> _Inside:
    names, code = names_of(function), function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # a cell that is not filled yet
            yield f".<closure {name!r}>", cell.cell_contents, names
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    yield from ((".<default>", value, names) for value in defaults)
    yield "", vars(function), names
    for name in _extract_code_globals(code) if is_own_code(function) else ():
        if name in function.__globals__:
            yield f".<global {name!r}>", function.__globals__[name], names


def names_of(function: Any) -> frozenset[str]:
    """The names of attributes in the code of a function, or of the one that it wraps."""
    function = _function_in(function)
    if not isinstance(function, FunctionType):
        return frozenset()
    return _names_in(getattr(inspect.unwrap(function), "__code__", function.__code__))  # it may wrap a module


@functools.lru_cache(1024)
def _names_in(code: CodeType) -> frozenset[str]:
    inner = [_names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(name for name in code.co_names if not name.startswith("__")).union(*inner)


def _function_in(value: Any) -> Any:
    """The function in a method, a static or a class method, or a property."""
    wrappers = (MethodType, staticmethod, classmethod)
    return value.__func__ if isinstance(value, wrappers) else value.fget if isinstance(value, property) else value


def _in_method(method: Any, _: NamedThere) -> _Inside:
    function, names = getattr(method, "__func__", None), names_of(method)
    yield "", function, None
    if function is None or isinstance(method.__self__, type) or not names.isdisjoint(dir(method.__self__)):
        yield ".__self__", method.__self__, names if function else None


def _in_partial(partial: Any, _: NamedThere) -> _Inside:
    yield from ((f".{name}", getattr(partial, name), names_of(partial.func)) for name in ("func", "args", "keywords"))


def _in_dict(mapping: Any, names: NamedThere) -> _Inside:
    yield from ((f"[{key!r}]", value, names) for key, value in list(mapping.items()))


def _in_sequence(values: Any, names: NamedThere) -> _Inside:
    yield from ((f"[{at}]", value, names) for at, value in enumerate(list(values)) if not isinstance(value, _PLAIN))


def _in_python_module(module: Any, names: NamedThere) -> _Inside:
    if names is not None and is_own_code(module):
        yield from ((f".{name}", vars(module)[name], names) for name in sorted(names & vars(module).keys()))


def _in_class(kind: Any, _: NamedThere) -> _Inside:
    for base in filter(is_own_code, kind.__mro__):
        names = frozenset[str]().union(*map(names_of, vars(base).values()))
        own = [
            name for name, value in vars(base).items() if name in names or isinstance(_function_in(value), FunctionType)
        ]
        yield from ((f".{name}", _function_in(vars(base)[name]), names) for name in own)


def is_own_code(code: Any) -> bool:
    """Whether a class, a function or a module of Python is the user's own, and not of a package that is installed."""
    if isinstance(code, FunctionType):
        file: Any = code.__code__.co_filename
    else:
        file = getattr(sys.modules.get(getattr(code, "__module__", None) or code.__name__), "__file__", None)
    if file is None:
        return getattr(code, "__module__", None) == "__main__"
    return source.is_of_project(file)


def _in_object(value: Any, names: NamedThere) -> _Inside:
    """Into the attributes that code names, and those that methods name which it names."""
    held, kind = _attributes(value), type(value)
    if names is None or (isinstance(value, nn.Module) and not names.isdisjoint(_GIVE_STATE)):
        yield from _in_whole(value, held, None)
        return
    if not (names & held.keys() or any(hasattr(kind, name) for name in names)):
        yield from _in_whole(value, held, names if hasattr(kind, "__getitem__") else None)  # layers[0].weight
        return
    yield from ((f".{name}", inner, names) for name, inner in held.items() if name in names)
    for base in filter(is_own_code, kind.__mro__):
        for name in sorted(names & vars(base).keys()):
            yield f".{name}", _function_in(vars(base)[name]), names
            yield "", value, names_of(vars(base)[name])


def _attributes(value: Any) -> dict[str, Any]:
    slots = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    found = {**getattr(value, "__dict__", {}), **{name: getattr(value, name, None) for name in slots}}
    for state in _STATE if isinstance(value, nn.Module) else ():
        found |= found.get(state) or {}
    return found


def _in_whole(value: Any, held: dict[str, Any], of_items: NamedThere) -> _Inside:
    """Into all that a module has registered, and what its own code, and that of its hooks, names; else into everything."""
    names: NamedThere = None
    if isinstance(value, nn.Module):
        registered = [name for state in _STATE for name in held.get(state) or {}]
        yield from ((f".{name}", held[name], of_items) for name in registered)
        hooks = [hook for kind in HOOK_ATTRIBUTES for hook in held.get(kind, {}).values()]
        yield from ((".<hook>", hook, None) for hook in hooks)
        bases = [base for base in type(value).__mro__ if base not in (nn.Module, object)]
        methods = [each for base in bases for name, each in vars(base).items() if name != "__init__"]
        names = frozenset[str]().union(*map(names_of, [*methods, *hooks]))
        others = {name: inner for name, inner in held.items() if name not in (*_STATE, *registered)}
        held = {name: inner for name, inner in others.items() if name in names or callable(inner)}
    yield from ((f".{name}", inner, names) for name, inner in held.items())
    yield "", type(value), None


_LOOK: dict[Any, Callable[[Any, NamedThere], _Inside]] = {
    torch.Tensor: _in_tensor,
    FunctionType: _in_function,
    (MethodType, BuiltinMethodType): _in_method,
    functools.partial: _in_partial,
    ModuleType: _in_python_module,
    type: _in_class,
    dict: _in_dict,
    (list, tuple, set, frozenset, deque): _in_sequence,
    (fx.Graph, torch.jit.ScriptModule): lambda _, __: iter(()),
    object: _in_object,
}


class ModelTensors:
    """The tensors of a model: by them it is known what is to become of a tensor that code reaches.

    a tensor that code reaches                           in the process that has the code
    ──────────────────────────────────────────────────   ──────────────────────────────────────────────────
    a parameter of the model                             is held there, or has a copy there, which follows it
    a buffer of the model that code names                the same
    a buffer of a module that code has whole             cannot be read, unless a stage there holds it
    another one that requires a gradient                 refused: its gradient would be lost
    one that shares memory with a parameter              refused: it would not follow the parameter
    all others                                           is a constant: a copy
    """

    def __init__(self, model: nn.Module) -> None:
        self.names = first_names(model)
        self.tensors = {id(tensor): tensor for _, tensor in named_state(model)}
        trained = [each for each in self.tensors.values() if isinstance(each, nn.Parameter) and each.requires_grad]
        self.memory = {memory: self.names[id(each)] for each in trained if (memory := memory_of(each)) is not None}

    def among(self, found: Iterable[Reached], own: Collection[int], error: type[PippyError]) -> list[Reached]:
        """Those that are the model's, without ``own``. Raises an ``error`` for those that cannot be followed."""
        own_memory = {memory_of(each.value) for each in found if id(each.value) in own} - {None}
        for each in found:
            memory = memory_of(each.value) or 0
            if id(each.value) not in self.names and memory in self.memory and memory not in own_memory:
                raise error(
                    f"{each} shares memory with the parameter {self.memory[memory]!r}, and would be a copy on a worker. Let "
                    "the code refer to the parameter itself, and make the view where it is used"
                )
            is_made_again = (
                not each.value.is_leaf and each.code is None
            )  # an attribute of a part, which its pre-hooks set
            is_registered = isinstance(each.value, nn.Parameter) and id(each.value) in {*own, *self.names}
            if each.value.requires_grad and not (is_registered or is_made_again):
                raise error(
                    f"{each} requires a gradient, and would be a copy on a worker, whose gradient is lost. Register it as an "
                    "nn.Parameter of the model, or of a loss that is a module; or, if nothing trains it, call "
                    ".requires_grad_(False) on it, or on the model that it belongs to"
                )
        of_model = [each for each in found if id(each.value) in self.names and id(each.value) not in own]
        return [each for each in of_model if each.names is not None or isinstance(each.value, nn.Parameter)]
