"""The tensors that code reaches by plain references: closures, globals, defaults, attributes, hooks, methods of objects.

    loss_fn = lambda output, target: mse(output, target) + model.decay(0.1)

    loss_fn ─closure─▶ model ─the code names .decay─▶ Net.decay ─it names .weight─▶ model.weight

A process that such code is sent to needs these tensors. A module that code has in its hands whole is followed into all of its
parameters. Where code names attributes of an object, only these are followed: a loss that reads `model.config` needs no
parameter. What is reached in other ways (`getattr(model, name)`) is not found here; a worker has a tensor there that cannot be read.
Code of installed packages is followed into what it was given (closures, defaults), and not into its globals.
"""

import functools
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from cloudpickle.cloudpickle import _extract_code_globals  # type: ignore[import-untyped]
from torch import nn

from pippy.ir.base import source
from pippy.ir.base.errors import PippyError
from pippy.ir.base.names import first_names, named_state
from pippy.ir.record.module_hooks import HOOK_ATTRIBUTES
from pippy.ir.run.gradient_hooks import GradientHooks
from pippy.ir.run.shared_tensors import memory_of

Names = frozenset[str] | None
"""The attributes that the code around an object names; None for all."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_STATE = ("_parameters", "_buffers", "_modules")
_OF_ALL_STATE = frozenset(  # methods of modules, whose callers may read any parameter
    "parameters named_parameters buffers named_buffers children named_children modules named_modules state_dict apply "
    "get_parameter get_buffer get_submodule forward".split()
)


@dataclass(frozen=True)
class Reached:
    """A tensor, and the way to it. Not ``named`` is one of a module that code has in its hands whole."""

    tensor: torch.Tensor
    path: str
    code: CodeType | None
    named: bool

    def __str__(self) -> str:
        defined = f", defined at {self.code.co_filename}:{self.code.co_firstlineno}" if self.code else ""
        return f"{self.path}{defined}"


def reached(root: Any, name: str, narrowly: bool = True) -> list[Reached]:
    """The tensors that ``root`` reaches, each once, with its registered ones. ``name`` is what errors call it.

    If not ``narrowly``, all attributes of all objects are followed.

    >>> linear, unread = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> function = lambda output, target: output.sum() + linear.bias.sum() + unread.in_features
    >>> [each.path for each in reached(function, "loss_fn")]
    ["loss_fn.<global 'linear'>.bias"]
    """
    walk = _Walk(narrowly)
    walk.run(root, name)
    return list(walk.found.values())


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
        trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        self.memory = {memory: name for name, each in trained if (memory := memory_of(each)) is not None}

    def among(self, found: Iterable[Reached], own: Collection[int], error: type[PippyError]) -> list[Reached]:
        """Those that are the model's, without ``own``. Raises an ``error`` for those that cannot be followed."""
        others = [each for each in found if id(each.tensor) not in own]
        own_memory = {memory_of(each.tensor) for each in found if id(each.tensor) in own}
        for each in others:
            if id(each.tensor) not in self.names and memory_of(each.tensor) not in own_memory:
                self._check(each, error)
        of_model = (each for each in others if id(each.tensor) in self.names)
        return [each for each in of_model if each.named or isinstance(each.tensor, nn.Parameter)]

    def _check(self, each: Reached, error: type[PippyError]) -> None:
        made_again = not each.tensor.is_leaf and each.code is None  # an attribute of a part, as its pre-hooks set it
        if (name := self.memory.get(memory_of(each.tensor) or 0)) is not None:
            raise error(
                f"{each} shares memory with the parameter {name!r}: a worker would have a copy, which gets no gradient and "
                "follows no update. Let the code refer to the parameter itself, and make the view of it where it is used"
            )
        if each.tensor.requires_grad and not made_again:
            raise error(
                f"{each} requires a gradient, and is registered neither in the model nor in a module that is the loss: a worker "
                "would have a copy, whose gradient is lost. Register it, as in self.name = nn.Parameter(...); or, if nothing "
                "trains it, call .requires_grad_(False) on it, or on the model that it is of"
            )


@dataclass(frozen=True)
class _Item:
    """An object to look into, and what the code around it names."""

    value: Any
    path: str
    names: Names
    code: CodeType | None


class _Walk:
    def __init__(self, narrowly: bool) -> None:
        self.narrowly = narrowly
        self.found: dict[int, Reached] = {}
        self.seen: dict[int, Names] = {}
        self.alive: list[Any] = []  # ids are of objects that stay
        self.pending: deque[_Item] = deque()

    def run(self, root: Any, name: str) -> None:
        self.pending.append(_Item(root, name, None, None))
        while self.pending:
            item = self.pending.popleft()
            if isinstance(item.value, torch.Tensor):
                self._find(item)
            if not self._is_seen(item.value, item.names):
                self._look_into(item)

    def _find(self, item: _Item) -> None:
        before = self.found.get(id(item.value))
        if before is None or (item.names is not None and not before.named):
            self.found[id(item.value)] = Reached(item.value, item.path, item.code, item.names is not None)

    def _is_seen(self, value: Any, names: Names) -> bool:
        if id(value) in self.seen:
            before = self.seen[id(value)]
            if before is None or (names is not None and names <= before):
                return True
            names = None if names is None else names | before
        self.seen[id(value)] = names
        self.alive.append(value)
        return False

    def _look_into(self, item: _Item) -> None:
        value = item.value
        kind = next((kind for kind in _LOOK if isinstance(value, kind)), object)
        code = value.__code__ if kind in (FunctionType, MethodType) else item.code
        for path, inner, names in _LOOK[kind](value, item.names):
            if not isinstance(inner, _PLAIN):
                kept = names if self.narrowly or isinstance(inner, ModuleType) else None
                self.pending.append(_Item(inner, item.path + path, kept, code))


_Inside = Iterator[tuple[str, Any, Names]]


def _in_tensor(tensor: Any, _: Names) -> _Inside:
    hooks = GradientHooks.of(tensor) if tensor.is_leaf else GradientHooks()
    for hook in (*hooks.on_gradient, *hooks.after_accumulation):
        yield ".<gradient hook>", hook, None
    for name, value in getattr(tensor, "__dict__", {}).items():
        yield f".{name}", value, None


def _in_function(function: Any, _: Names) -> _Inside:
    names, code = names_of(function), function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            yield f".<closure {name!r}>", cell.cell_contents, names
        except ValueError:  # a cell that is not filled yet
            continue
    for name, value in _defaults(function):
        yield f".<default {name!r}>", value, names
    yield "", vars(function), names
    if source.is_of_project(code.co_filename):
        for name in _extract_code_globals(code):
            if name in function.__globals__:
                yield f".<global {name!r}>", function.__globals__[name], names


def _defaults(function: Any) -> Iterable[tuple[str, Any]]:
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]
    own = function.__defaults__ or ()
    return [*zip(positional[len(positional) - len(own) :], own), *(function.__kwdefaults__ or {}).items()]


def names_of(function: Any) -> frozenset[str]:
    """The names of attributes in the code of a function, and of functions that it wraps."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return frozenset()
    found = _names_in(function.__code__)
    for cell in function.__closure__ or () if not source.is_of_project(function.__code__.co_filename) else ():
        try:
            found |= names_of(cell.cell_contents)
        except ValueError:
            continue
    return found


@functools.lru_cache(1024)
def _names_in(code: CodeType) -> frozenset[str]:
    inner = [_names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(name for name in code.co_names if not name.startswith("__")).union(*inner)


def _in_method(method: Any, _: Names) -> _Inside:
    names = names_of(method)
    yield "", method.__func__, None
    if isinstance(method.__self__, type) or not names.isdisjoint(dir(method.__self__)):
        yield ".__self__", method.__self__, names


def _in_builtin_method(method: Any, _: Names) -> _Inside:
    yield ".__self__", method.__self__, None


def _in_partial(partial: Any, _: Names) -> _Inside:
    names = names_of(partial.func)
    yield ".func", partial.func, None
    yield ".args", partial.args, names
    yield ".keywords", partial.keywords, names


def _in_mapping(mapping: Any, names: Names) -> _Inside:
    for key, value in list(mapping.items()):
        yield f"[{key!r}]", value, names
        if not isinstance(key, _PLAIN):
            yield ".keys()", key, names


def _in_sequence(values: Any, names: Names) -> _Inside:
    for index, value in enumerate(list(values)):
        if not isinstance(value, _PLAIN):
            yield f"[{index}]", value, names


def _in_python_module(module: Any, names: Names) -> _Inside:
    if names is not None and source.is_of_project(getattr(module, "__file__", None) or ""):
        for name in names & vars(module).keys():
            yield f".{name}", vars(module)[name], names


def _in_class(kind: Any, _: Names = None) -> _Inside:
    for base in filter(is_of_project, kind.__mro__):
        for name, value in list(vars(base).items()):
            if not name.startswith("__") or isinstance(value, FunctionType):
                yield f".{name}", _function_in(value), None


def _named_in_class(kind: type, names: frozenset[str]) -> _Inside:
    for name in names:
        base = next((base for base in kind.__mro__ if name in vars(base)), None)
        if base is not None and is_of_project(base):
            yield f".{name}", _function_in(vars(base)[name]), names


def _function_in(value: Any) -> Any:
    """The function in a static method, a class method or a property."""
    return getattr(value, "__func__", None) or getattr(value, "fget", None) or value


def is_of_project(code: Any) -> bool:
    """Whether a class or a function is the user's own, and not of a package that is installed."""
    file = getattr(sys.modules.get(code.__module__), "__file__", None)
    return source.is_of_project(file) if file else code.__module__ == "__main__"


def _names_of_class(kind: type) -> frozenset[str]:
    bases = [base for base in kind.__mro__ if base not in (nn.Module, object)]
    methods = [value for base in bases for name, value in vars(base).items() if name != "__init__"]
    return frozenset[str]().union(*(names_of(_function_in(each)) for each in methods))


def _in_object(value: Any, names: Names) -> _Inside:
    """Into the attributes that code names; into all if it names none of them, as where the object is handed on."""
    held, kind = _attributes(value), type(value)
    if names is not None and not (isinstance(value, nn.Module) and names & _OF_ALL_STATE):
        names = _with_methods(kind, names)
        state = {name: held[name] for name in names & held.keys()}
        if state or any(hasattr(kind, name) for name in names):
            yield from ((f".{name}", inner, names) for name, inner in state.items())
            yield from _named_in_class(kind, names)
            return
    yield from _in_whole(value, held)


def _with_methods(kind: type, names: frozenset[str]) -> frozenset[str]:
    """The names, and those in the code of the user's methods that have one of these names."""
    known: frozenset[str] = frozenset()
    while names != known:
        new, known = names - known, names
        for _, inner, _ in _named_in_class(kind, new):
            names |= names_of(inner)
    return names


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", None) or {})
    for base in type(value).__mro__:
        for name in [slots] if isinstance(slots := vars(base).get("__slots__", ()), str) else slots:
            if hasattr(value, name):
                found[name] = getattr(value, name)
    for state in _STATE if isinstance(value, nn.Module) else ():
        found |= found.get(state) or {}
    return found


def _in_whole(value: Any, held: Mapping[str, Any]) -> _Inside:
    """Into all that a module has registered, and into what its own code, and that of its hooks, names; else into everything."""
    names: Names = None
    if isinstance(value, nn.Module):
        hooks = [hook for kind in HOOK_ATTRIBUTES for hook in held.get(kind, {}).values()]
        yield from ((".<hook>", hook, None) for hook in hooks)
        registered = {name for state in _STATE for name in held.get(state) or {}}
        yield from ((f".{name}", held[name], None) for name in registered)
        names = _names_of_class(type(value)).union(*map(names_of, hooks))
        held = {name: inner for name, inner in held.items() if name not in (*_STATE, *registered)}
        held = {name: inner for name, inner in held.items() if name in names or callable(inner)}
    yield from ((f".{name}", inner, names) for name, inner in held.items())
    if is_of_project(type(value)):
        yield "", type(value), None


def _nothing(_: Any, __: Names) -> _Inside:
    yield from ()


_LOOK: dict[Any, Callable[[Any, Names], _Inside]] = {
    torch.Tensor: _in_tensor,
    FunctionType: _in_function,
    MethodType: _in_method,
    functools.partial: _in_partial,
    BuiltinMethodType: _in_builtin_method,
    ModuleType: _in_python_module,
    type: _in_class,
    dict: _in_mapping,
    (list, tuple, set, frozenset, deque): _in_sequence,  # type: ignore[dict-item]
    (torch.fx.Graph, torch.jit.ScriptModule): _nothing,  # type: ignore[dict-item]
    object: _in_object,
}
