"""Tracing and measuring run the user's forward. Afterwards, the model has the attributes that it had before."""

import copy
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from pippy.ir.base import source
from pippy.ir.base.operations import IN_PLACE, is_in_place, name_of

_OF_TRACING = ("_tensor_constant", "_tensor_from_outside")  # what the tracer sets on the model
_TABLES = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (list, dict, set, OrderedDict)  # the last holds hooks


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
    contents = {name: copy.copy(value) for name, value in plain.items() if type(value) in _CONTAINERS}
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
