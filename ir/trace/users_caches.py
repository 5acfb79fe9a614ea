"""Tracing runs the user's functions with stand-ins for tensors. Afterwards no cache of theirs keeps one.

    @lru_cache                               cleared, if something in it is a stand-in
    def table(n): return torch.arange(n)
    _TABLES = {}; Rotary.tables = {}         an entry that is a stand-in is taken out, or what was there is put back
    def mask(n, known={}): ...               the same, in defaults and attributes of functions, and in closures

It is looked at what can be reached from the files of the model's classes, through what these import: the user's own files,
and installed packages that have a class of the model's. The attributes of the model's
modules are put back in `restore_attributes.py`.
"""

import functools
import gc
import operator
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from pippy.ir.base import source

_STAND_INS = (fx.Proxy, fx.Node, FakeTensor, FunctionalTensor, torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = (str, bytes, int, float, complex, tuple, frozenset, type(None), torch.dtype)
_WRAPPERS = (types.MethodType, staticmethod, classmethod, property, functools.partial)
_FILES = 2  # how far away from the model's own file: what it imports, and what that imports
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
_MANY = 10_000  # a container that holds more is data, and not looked at
_DEPTH = 6  # of what an entry holds


_places: "_Places | None" = None  # while a model is traced; one is at a time


@contextmanager
def leaving_users_caches(model: nn.Module) -> Iterator[None]:
    """A context after which the caches of the user's code hold nothing that stands for a value while ``model`` is traced."""
    global _places
    _places = _Places(model)
    try:
        yield
    finally:
        places, _places = _places, None
        places.restore()


@contextmanager
def forgetting_one_trace() -> Iterator[None]:
    """A context for one of several traces, inside of `leaving_users_caches`: the next trace finds nothing of it."""
    try:
        yield
    finally:
        if _places is not None:
            _places.restore()


class _Places:
    """What the user's code can keep values in, and what was in it."""

    def __init__(self, model: nn.Module) -> None:
        self.caches: dict[Any, int] = {}
        self.cells: list[tuple[types.CellType, Any]] = []
        self.names: list[tuple[Any, dict[str, Any]]] = []  # of modules, classes, functions and objects
        self.containers: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        # The nearest first, with the number of files between.
        kinds = {type(module) for module in model.modules()}
        self._packages = {_top(kind.__module__) for kind in kinds}
        held = [inside for module in model.modules() for value in vars(module).values() for inside in _inside(value)]
        self._pending = deque[tuple[Any, int]]((each, 0) for each in (*kinds, *held))
        while self._pending:
            value, files = self._pending.popleft()
            if files <= _FILES and id(value) not in self._seen:
                self._seen.add(id(value))
                self._pending += [(each, at) for each, at in self._visit(value, files) if id(each) not in self._seen]

    def _visit(self, value: Any, files: int) -> Iterator[tuple[Any, int]]:
        """Note what a value is, and give what it leads to."""
        kind = type(value)
        if issubclass(kind, (torch.Tensor, nn.Module, fx.Proxy, *_PLAIN)):
            return
        if kind is functools._lru_cache_wrapper:
            self.caches[value] = value.cache_info().misses
            yield value.__wrapped__, files
        elif kind in _CONTAINERS:
            if len(value) > _MANY:
                return
            self.containers.append((value, dict(value) if issubclass(kind, dict) else kind(value)))
            yield from ((each, files) for each in (value.values() if isinstance(value, dict) else value))
        elif issubclass(kind, _WRAPPERS):
            yield from ((getattr(value, name, None), files) for name in ("__func__", "fget", "fset", "func"))
        elif self._is_near(value) and hasattr(value, "__dict__"):
            names = vars(value)
            self.names.append((value, dict(names)))
            yield from ((each, files + (kind is types.ModuleType)) for each in names.values())
            yield sys.modules.get(str(getattr(value, "__module__", None))), files
            yield from ((each, files) for each in self._parts(value))

    def _is_near(self, value: Any) -> bool:
        """Whether something is of the user's own files, or of an installed package that has a class of the model's."""
        module = _module_of(value)
        file = str(getattr(module, "__file__", None))
        return _is_users(value) and ("-packages" not in file or _top(module.__name__) in self._packages)

    def _parts(self, value: Any) -> Iterator[Any]:
        if isinstance(value, type):
            yield from value.__bases__
        elif isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                self.cells.append((cell, _content(cell)))
                yield _content(cell)
            yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        elif not isinstance(value, types.ModuleType):
            yield type(value)

    def restore(self) -> None:
        """Take out what stands for a value of the trace."""
        for cache, misses in self.caches.items():
            if cache.cache_info().misses != misses and any(map(_holds, gc.get_referents(cache))):
                cache.cache_clear()
            self.caches[cache] = cache.cache_info().misses
        for cell, before in self.cells:
            if _holds(_content(cell)):
                cell.cell_contents = before
        for owner, names in self.names:
            if _is_changed(vars(owner), names):
                for name, _ in _new_entries(vars(owner), names):
                    setattr(owner, name, names[name]) if name in names else delattr(owner, name)
        for container, before in self.containers:
            if _is_changed(container, before):
                _restore_container(container, before)


def _is_changed(container: Any, before: Any) -> bool:
    if len(container) != len(before):
        return True
    pair = (container.values(), before.values()) if isinstance(before, dict) else (container, before)
    return any(map(operator.is_not, *pair))


def _new_entries(container: Any, before: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """The entries that are stand-ins, or hold some, and were not there before."""
    changed = [(key, value) for key, value in container.items() if value is not before.get(key, _EMPTY)]
    return [(key, value) for key, value in changed if _holds(key) or _holds(value)]


def _restore_container(container: Any, before: Any) -> None:
    if isinstance(container, dict):
        for key, _ in _new_entries(container, before):
            if key in before:
                container[key] = before[key]
            else:
                del container[key]
    elif any(map(_holds, container)):
        container.clear()
        container.update(before) if isinstance(container, set) else container.extend(before)


def _inside(value: Any) -> Any:
    """What a container among the attributes of a module holds, for the container itself is put back with the attributes."""
    return value.values() if isinstance(value, dict) else value if isinstance(value, (list, set)) else (value,)


_EMPTY = object()


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _top(name: str) -> str:
    return name.partition(".")[0]


def _module_of(value: Any) -> Any:
    """The module of a class, a function or an object; a module itself."""
    if isinstance(value, types.ModuleType):
        return value
    owner = value if isinstance(value, (type, types.FunctionType)) else type(value)
    return sys.modules.get(str(owner.__module__))


def _is_users(value: Any) -> bool:
    """Whether a module, a class, a function or an object is of a file of the user's, or of a notebook."""
    module = _module_of(value)
    file = getattr(module, "__file__", None)
    if file is None:
        return isinstance(value, types.FunctionType) or getattr(module, "__name__", None) == "__main__"
    return _is_users_file(file)


@functools.cache
def _is_users_file(file: str) -> bool:
    return source.is_users(file) and not source.is_standard(file)


def _holds(value: Any, depth: int = _DEPTH) -> bool:
    """Whether a value is a stand-in, or holds one."""
    kind = type(value)
    if issubclass(kind, _STAND_INS):
        return True
    if issubclass(kind, torch.Tensor):
        return torch._C._functorch.is_functorch_wrapped_tensor(value)
    if depth == 0 or issubclass(kind, (nn.Module, type, types.ModuleType, types.FunctionType)):
        return False
    if issubclass(kind, dict):
        return any(_holds(each, depth - 1) for pair in value.items() for each in pair)
    if issubclass(kind, (tuple, list, set, frozenset, deque)):
        return any(_holds(each, depth - 1) for each in value)
    names = getattr(value, "__dict__", None) if _is_users(value) else None
    return type(names) is dict and any(_holds(each, depth - 1) for each in names.values())
