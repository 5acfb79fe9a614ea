"""A trace leaves the process as it was, whether it succeeds or is refused: torch, and the user's code.
What it reads of modules is noted.

    @lru_cache                               cleared, if something in it is a stand-in for a tensor
    def table(n): return torch.arange(n)
    _TABLES = {}; Rotary.table = None        an entry that is a stand-in is taken out, or what was there is put back
    def mask(n, known={}): ...               the same, in defaults, closures and attributes of functions, and in objects
    rng = numpy.random.default_rng()         has its state again, and its draws are refused (`random_draws.py`)

What can be reached from the model's attributes and from the files of its classes is looked at; in installed packages, these
files only. The attributes of the model's modules are put back in `restore_attributes.py`.
"""

import copy
import functools
import gc
import operator
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from pippy.ir.base import source
from pippy.ir.base.surroundings import SETTINGS
from pippy.ir.base.trees import leaves
from pippy.ir.trace.tracing_thread import tracing_thread

_STAND_INS = (fx.Proxy, fx.Node, FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.Tensor, nn.Module, fx.Proxy)
_WRAPPERS = (types.MethodType, types.BuiltinMethodType, staticmethod, classmethod, property, functools.partial)
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
_MANY = 10_000  # a container that holds more is data, and not looked at


@contextmanager
def tracing(model: nn.Module) -> Iterator[dict[tuple[type, str], bool]]:
    """A context in which this thread traces ``model``, and after which torch and the user's code hold nothing of it.

    It gives the names of the attributes of modules that are read, there or not, with the classes of the modules.
    """
    with tracing_thread(), _leaving_users_code(model), ExitStack() as torchs, _noting_reads() as reads:
        torchs.callback(torch_as_it_is())
        yield reads


@contextmanager
def _noting_reads() -> Iterator[dict[tuple[type, str], bool]]:
    reads: dict[tuple[type, str], bool] = {}
    read = object.__getattribute__

    def get(module: nn.Module, name: str) -> Any:  # it calls no function that the watch over calls would be told of
        reads[type(module), name] = True
        return read(module, name)

    nn.Module.__getattribute__ = get  # type: ignore[assignment]
    try:
        yield reads
    finally:
        del nn.Module.__getattribute__


@contextmanager
def _leaving_users_code(model: nn.Module) -> Iterator[None]:
    global _held
    _held = _Held(model)
    try:
        yield
    finally:
        held, _held = _held, None
        held.restore()


@contextmanager
def forgetting_one_trace() -> Iterator[None]:
    """A context for one of several traces, inside of `tracing`: the next trace finds nothing of it."""
    try:
        yield
    finally:
        if _held is not None:
            _held.restore()


def numpys_generators() -> list[Any]:
    """The generators of numpy that the user's code holds, while a model is traced."""
    return [] if _held is None else _held.generators


class _Held:
    """What the user's code can keep values in, and what was in it."""

    def __init__(self, model: nn.Module) -> None:
        self.generators: list[Any] = []
        self._caches: list[Any] = []
        self._owners: list[tuple[Any, dict[str, Any]]] = []  # modules, classes, functions and objects
        self._containers: list[tuple[Any, Any]] = []
        kinds = {kind for module in model.modules() for kind in type(module).__mro__}
        self._files = {kind.__module__ for kind in kinds if not kind.__module__.startswith(("torch.", "builtins"))}
        attributes = [value for each in model.modules() for value in vars(each).values()]
        # Containers among the attributes are put back with these.
        inside = [
            item for value in attributes for item in (_entries(value) if type(value) in _CONTAINERS else (value,))
        ]
        seen, pending = set[int](), [*kinds, *inside]
        while pending:
            value = pending.pop()
            if id(value) not in seen and not issubclass(type(value), _PLAIN):
                seen.add(id(value))
                pending += self._visit(value)

    def _visit(self, value: Any) -> Iterable[Any]:
        """Note what a value is, and give what it leads to."""
        kind = type(value)
        if kind is functools._lru_cache_wrapper:
            self._caches.append(value)
            return (value.__wrapped__,)
        if kind in _CONTAINERS or kind is tuple:
            if kind is not tuple and len(value) <= _MANY:
                self._containers.append((value, copy.copy(value)))
            return _entries(value) if len(value) <= _MANY else ()
        if issubclass(kind, _WRAPPERS):
            return [getattr(value, name, None) for name in ("__self__", "__func__", "fget", "fset", "func")]
        if kind.__module__.startswith("numpy.random") and hasattr(kind, "standard_normal"):
            self.generators.append(value)
        if not self._is_users(value):
            return ()
        names = dict(getattr(value, "__dict__", {}))
        self._owners.append((value, names))
        return (*names.values(), *_parts(value))

    def _is_users(self, value: Any) -> bool:
        """Whether a module, a class, a function or an object is of a file of the model's, or of the user's own."""
        module = _module_of(value)
        name, file = getattr(module, "__name__", None), getattr(module, "__file__", None)
        return name in self._files or name == "__main__" or (file is not None and _is_users_own(file))

    def restore(self) -> None:
        """Take out what stands for a value of the trace."""
        for cache in self._caches:
            if any(map(_holds, gc.get_referents(cache))):
                cache.cache_clear()
        for owner, names in self._owners:
            now = getattr(owner, "__dict__", {})
            for name in [name for name, value in now.items() if value is not names.get(name) and _holds(value)]:
                setattr(owner, name, names[name]) if name in names else delattr(owner, name)
        for container, before in self._containers:
            now, then = _entries(container), _entries(before)
            if (len(now) != len(then) or any(map(operator.is_not, now, then))) and any(map(_holds, now)):
                container.clear()
                container.extend(before) if isinstance(container, list | deque) else container.update(before)


_held: _Held | None = None  # while a model is traced; one is at a time


def _entries(container: Any) -> list[Any]:
    return [*container.keys(), *container.values()] if isinstance(container, dict) else list(container)


def _module_of(value: Any) -> Any:
    """The module of a class, a function or an object; a module itself."""
    owner = value if isinstance(value, types.ModuleType | type | types.FunctionType) else type(value)
    return owner if isinstance(owner, types.ModuleType) else sys.modules.get(str(owner.__module__))


@functools.cache
def _is_users_own(file: str) -> bool:
    return source.is_users(file) and not source.is_standard(file) and "-packages" not in file


def _parts(value: Any) -> list[Any]:
    """What a class, a function or an object leads to, other than by its attributes."""
    if isinstance(value, types.ModuleType):
        return []
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if gc.get_referents(cell)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), _module_of(value)]
    if isinstance(value, type):
        return [*value.__bases__, _module_of(value)]
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
    return [type(value), *(getattr(value, name, None) for name in slots)]


def _holds(value: Any) -> bool:
    """Whether a value is a stand-in, or has one among its leaves."""
    return any(issubclass(type(leaf), _STAND_INS) for leaf in leaves(value))


# Tracing runs the user's forward, which may stop anywhere. Afterwards torch's own state in this thread is what it was before.
#
# left behind by a forward that stops                  put back by
# ───────────────────────────────────────────────────────────────────────────────────────────
# levels of torch.func (vmap, grad, jvp)               leaving them, innermost first
# modes for functions and for operations               the same
# hooks for saved tensors, levels of forward_ad        the same
# autocast, gradient mode, default dtype, settings     setting them


_C: Any = torch._C


def torch_as_it_is() -> Callable[[], None]:
    """What gives torch its state in this thread again."""
    depths = [depth() for depth, _ in _STACKS]
    settings = [row.read() for row in SETTINGS]
    grad, autocast = torch.is_grad_enabled(), _autocast()

    def restore() -> None:
        for (depth, leave), before in zip(_STACKS, depths):
            for _ in range(depth() - before):
                leave()
        for row, value in zip(SETTINGS, settings):
            if row.read() != value:
                row.write(value)
        torch.set_grad_enabled(grad)
        if _autocast() != autocast:
            _set_autocast(*autocast)

    return restore


def _depth_of_saved_tensors_hooks() -> int:
    """How many pairs of hooks for saved tensors there are. torch says only which is the innermost."""
    hooks, taken = _C._autograd, list[Any]()
    while (top := hooks._top_saved_tensors_default_hooks(True)) is not None:
        taken.append(top)
        hooks._pop_saved_tensors_default_hooks()
    for pair in reversed(taken):
        hooks._push_saved_tensors_default_hooks(*pair)
    return len(taken)


def _depth_of_autocast() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _leave_autocast() -> None:
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()


_STACKS = (
    (
        _C._functorch.get_dynamic_layer_stack_depth,
        lambda: _C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(
            _C._functorch.get_dynamic_layer_stack_depth() - 1
        ),
    ),
    (_C._len_torch_function_stack, _C._pop_torch_function_stack),
    (_C._len_torch_dispatch_stack, _C._pop_torch_dispatch_stack),
    (lambda: forward_ad._current_level + 1, forward_ad.exit_dual_level),
    (_depth_of_saved_tensors_hooks, _C._autograd._pop_saved_tensors_default_hooks),
    (_depth_of_autocast, _leave_autocast),
)


def _autocast() -> tuple[Any, ...]:
    kinds = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in _C._autocast_supported_devices()
    ]
    return torch.is_autocast_cache_enabled(), kinds


def _set_autocast(keeps: bool, kinds: list[tuple[str, bool, torch.dtype]]) -> None:
    torch.set_autocast_cache_enabled(keeps)
    for kind, enabled, dtype in kinds:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
