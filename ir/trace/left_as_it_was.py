"""A trace leaves the process as it was, whether it succeeds or is refused: torch, and the user's code.
What it reads of modules is noted.

    @lru_cache                               cleared, if something in it is a stand-in for a tensor
    def table(n): return torch.arange(n)
    _TABLES = {}; Rotary.table = None        an entry that is a stand-in is taken out, or what was there is put back
    def mask(n, known={}): ...               the same, in defaults, closures and attributes of functions, and in objects
    rng = numpy.random.default_rng()         has its state again, and its draws are refused (`recording.py`)

What can be reached from the model's attributes and from the files of its classes is looked at; in installed packages, these
files only. The attributes of the model's modules are put back too, and also after the model was measured:
`restoring_attributes`.
"""

import copy
import functools
import gc
import itertools
import operator
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from pippy.ir.base import source
from pippy.ir.base.errors import TracingError
from pippy.ir.base.operations import IN_PLACE, is_in_place, name_of
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
    """A context for one of several traces, inside of `tracing`: the next trace finds nothing of it.

    Raises where forward keeps a number that it computes in an object, as a running mean.
    """
    kept: list[str] = []
    try:
        yield
    finally:
        if _held is not None:
            kept = _held.restore()
    if kept:
        raise (
            TracingError(
                f"forward() sets {', '.join(kept)} to what it computes, but the stages of a Pipe set no attributes, so the "
                "next step would compute with the number of before. What to do: keep it in a buffer of a module, and change "
                "that in place; or move the code into the forward of a module of its own, without a mark inside, which is "
                "called as a whole"
            )
        )


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

    def restore(self) -> list[str]:
        """Take out what stands for a value of the trace. Returns the attributes of objects that had numbers in their places."""
        kept: list[str] = []
        for cache in self._caches:
            if any(map(_holds, gc.get_referents(cache))):
                cache.cache_clear()
        for owner, names in self._owners:
            now = getattr(owner, "__dict__", {})
            for name in [name for name, value in now.items() if value is not names.get(name) and _holds(value)]:
                setattr(owner, name, names[name]) if name in names else delattr(owner, name)
                is_number = isinstance(names.get(name), torch.Tensor | int | float) and not isinstance(
                    names[name], bool
                )
                if is_number and not isinstance(owner, nn.Module | types.ModuleType | type | types.FunctionType):
                    kept.append(f"{name!r} of a {type(owner).__name__}")
        for container, before in self._containers:
            now, then = _entries(container), _entries(before)
            if (len(now) != len(then) or any(map(operator.is_not, now, then))) and any(map(_holds, now)):
                container.clear()
                container.extend(before) if isinstance(container, list | deque) else container.update(before)
        return kept


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


_OF_TRACING = ("_tensor_constant", "_tensor_from_outside")  # what the tracer sets on the model
_TABLES = ("_parameters", "_buffers", "_modules")
_COPIED = (list, dict, set, OrderedDict)  # the last holds hooks


class Attributes:
    """The attributes that the modules of a model have."""

    def __init__(self, model: nn.Module) -> None:
        self._before = {
            path: (module, _attributes(module))
            for path, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)
        }
        self._known = {id(module): attributes for module, attributes in self._before.values()}
        # A forward may write into them: a model of Hugging Face notes in its config what kind of problem it solves.
        self._objects = [(each, dict(vars(each))) for each in _plain_objects(model)]

    def get(self, target: str, default: Any) -> Any:
        """The attribute that a dotted name stood for, which forward may have assigned since."""
        path, _, name = target.rpartition(".")
        tables = self._before[path][1].tables.values() if path in self._before else ()
        return next((table[name] for table in tables if name in table), default)

    def has_other_tensors(self, module: nn.Module) -> bool:
        """Whether a module, or one inside of it, has other tensors now. A node that calls it would run it with those of before.

        torch.func.functional_call(self.base, dict(self.other.named_parameters()), x)
        self.conv.weight = self.hyper(z)
        """
        return any(id(each) in self._known and _has_others(each, self._known[id(each)]) for each in module.modules())

    def restore(self, within: str = "") -> list[str]:
        """Give the modules below a path their attributes again. Returns the names of those that had changed."""
        inside = {
            path: each for path, each in self._before.items() if within in ("", path) or path.startswith(f"{within}.")
        }
        for each, attributes in self._objects:
            if vars(each) != attributes:
                vars(each).clear()
                vars(each).update(attributes)
        return [f"{path}.{name}".lstrip(".") for path, each in inside.items() for name in _restore(*each)]


def _plain_objects(model: nn.Module) -> list[Any]:
    """The objects with attributes that modules hold directly: their configurations."""
    objects = {
        id(value): value
        for module in model.modules()
        for value in vars(module).values()
        if type(getattr(value, "__dict__", None)) is dict and not isinstance(value, (nn.Module, torch.Tensor, type))
    }
    return [value for value in objects.values() if not callable(value)]


@contextmanager
def restoring_attributes(model: nn.Module, silent: bool = False) -> Iterator[Attributes]:
    """A context after which every module of ``model`` has its attributes again.

    Warns, unless ``silent``, of attributes that were set inside.
    """
    attributes = Attributes(model)
    try:
        yield attributes
    finally:
        changed = attributes.restore()
    if changed and not silent:
        source.warn(
            f"forward() sets {', '.join(changed)} on the model, but the stages of a Pipe do not set attributes, so "
            "the model will not change. Return the value, or keep it in a buffer that is changed in place"
        )


@dataclass
class _Attributes:
    """The attributes of a module.

    ``tables`` has its parameters, buffers and modules by the names of those dictionaries, and all other attributes under
    the empty name. ``contents`` has copies of the attributes that are lists, dicts or sets.
    """

    tables: dict[str, dict[str, Any]]
    contents: dict[str, Any]


def _attributes(module: nn.Module) -> _Attributes:
    plain = {name: value for name, value in module.__dict__.items() if name not in _TABLES}
    contents = {name: copy.copy(value) for name, value in plain.items() if type(value) in _COPIED}
    return _Attributes({"": plain, **{table: dict(module.__dict__[table]) for table in _TABLES}}, contents)


def _has_others(module: nn.Module, before: _Attributes) -> bool:
    now = {**module._parameters, **module._buffers}
    old = {**before.tables["_parameters"], **before.tables["_buffers"]}
    if now.keys() != old.keys() or any(value is not old[name] for name, value in now.items()):
        return True
    plain = [(name, value) for name, value in vars(module).items() if issubclass(type(value), torch.Tensor | fx.Proxy)]
    return any(value is not before.tables[""].get(name) for name, value in plain)


def _restore(module: nn.Module, before: _Attributes) -> list[str]:
    """Set a module's attributes to those of ``before``, and give the names of those that had changed."""
    changed = _restore_contents(before)
    is_of_torch = type(module).__module__.startswith("torch.nn.")  # what it keeps of its own is set when it runs
    for table, old in before.tables.items():
        now = module.__dict__ if table == "" else module.__dict__[table]
        names = [name for name in now if not (table == "" and name in _TABLES)]
        stale = [name for name in names if name not in old or now[name] is not old[name]]
        # What forward assigns to buffers is recorded, or refused.
        changed += [name for name in stale if not name.startswith(_OF_TRACING) and table != "_buffers"]
        if table == "":
            for name in stale:
                del now[name]
            now.update(old)
        elif stale:  # this also restores the order
            now.clear()
            now.update(old)
    return [] if is_of_torch else changed


def _restore_contents(before: _Attributes) -> list[str]:
    changed = []
    for name, old in before.contents.items():
        now = before.tables[""][name]
        if _identities(now) != _identities(old):
            if _identities(now) != _identities(old, now):
                changed.append(name)
            now.clear()
            now.extend(old) if isinstance(now, list) else now.update(old)
    return changed


def _identities(container: Any, later: Any = ()) -> Any:
    """What is in a container. Of what `self.seen[0] += 1` has replaced in ``later`` by its result: that result."""
    if isinstance(container, dict):
        return [(key, id(_in_place(value, later and later.get(key)))) for key, value in container.items()]
    if isinstance(container, list):
        return [id(_in_place(*pair)) for pair in itertools.zip_longest(container, later)]
    return {id(value) for value in container}


def _in_place(value: Any, later: Any) -> Any:
    return later if isinstance(value, torch.Tensor) and is_changed_in_place(later) else value


# The parts of a model by their names, while it is traced.


def lookup_attribute(modules: dict[str, nn.Module], target: str) -> Any:
    """The value of the target of a node: a module among ``modules``, by their paths, or an attribute of one."""
    if target in modules:
        return modules[target]
    path, _, name = target.rpartition(".")
    found = modules[path] if path in modules else _walk(modules[""], path)
    return getattr(found, name)


def _walk(value: Any, path: str) -> Any:
    for atom in path.split("."):
        value = getattr(value, atom)
    return value


# In-place operators and methods among the nodes that tracing makes.


def is_changed_in_place(value: Any) -> bool:
    """Whether ``value`` is what an in-place operation gave of a tensor that the model has in a container."""
    if not issubclass(type(value), fx.Proxy):
        return False
    node = value.node
    while node.op.startswith("call_") and is_in_place(node.target) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.op == "get_attr"


def changes_in_place(node: fx.Node, attribute: str) -> bool:
    """Whether ``node`` is an in-place operator on the attribute of the model with that name."""
    if node.op != "call_function" or name_of(node.target) not in IN_PLACE:
        return False
    changed = node.args[0]
    return isinstance(changed, fx.Node) and changed.op == "get_attr" and changed.target == attribute
