"""Which modules, functions and methods may draw random numbers. What is not known to draw none may draw.

    what is torch's          ir/base/operations.py says it: a dropout draws unless its rate is 0, and a Linear does not
    functions in Python      draw nothing if all names in their code are known to draw nothing
    anything else            may draw

What may draw and is not torch's draws from the generators of Python and numpy too, if its file names these.
"""

import builtins
import math
import random
import types
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import fx, nn

from pippy.ir.base import operations
from pippy.ir.run.functions import ScriptedFunction
from pippy.ir.run.random_state import draw_key, seed_draws


class Draws(Enum):
    """From which generators something may draw.

    >>> Draws.of([Draws.NOTHING, Draws.TORCHS])
    <Draws.TORCHS: 1>
    """

    NOTHING = 0
    TORCHS = 1
    PYTHONS_TOO = 2

    @staticmethod
    def of(parts: Iterable["Draws"]) -> "Draws":
        """Those of several things together."""
        return max(parts, key=lambda draws: draws.value, default=Draws.NOTHING)


_KNOWN_CLASSES = ("torch.nn.modules.", "pippy.")
_PYTHONS = ("random", "numpy")
_CONTAINERS = (torch.Tensor, dict, list, tuple, str, torch.Size)
_ALIASES = types.SimpleNamespace(torch=torch, nn=nn, F=nn.functional, math=math)  # usual names in the globals of a file
_KNOWN = (builtins, math, torch, nn.functional, _ALIASES, *_CONTAINERS)


def module_draws(module: nn.Module) -> Draws:
    """From which generators the forward of a module may draw.

    >>> module_draws(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))
    <Draws.NOTHING: 0>
    >>> module_draws(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    <Draws.TORCHS: 1>
    """
    return Draws.of(draws for each in module.modules() for draws in _own_draws(each))


def _own_draws(module: nn.Module) -> Iterator[Draws]:
    """Those of a module without the modules in it."""
    for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
        yield function_draws(hook)
    if not type(module).__module__.startswith(_KNOWN_CLASSES):
        yield Draws.TORCHS
        yield _class_draws(type(module))  # type: ignore[arg-type]  # for mypy, the class of a module has no hash
    if operations.torch_module_draws(module):
        yield Draws.TORCHS
    if "function" in module.__dict__ and type(module).__module__.startswith("pippy."):  # a loss function
        yield function_draws(module.__dict__["function"])


@cache
def _class_draws(kind: Any) -> Draws:
    """From which generators the methods of a class may draw."""
    users = [each for each in kind.__mro__ if not each.__module__.startswith((*_KNOWN_CLASSES, "torch.", "builtins"))]
    return Draws.of(_code_draws(value) for each in users for value in vars(each).values() if hasattr(value, "__code__"))


def function_draws(function: Callable[..., Any]) -> Draws:
    """From which generators a function may draw.

    >>> from torch.nn import functional as F
    >>> function_draws(torch.relu), function_draws(F.dropout), function_draws(torch.rand)
    (<Draws.NOTHING: 0>, <Draws.TORCHS: 1>, <Draws.TORCHS: 1>)
    """
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return _operator_draws(function)
    if isinstance(function, nn.Module):
        return module_draws(function)
    module, name = getattr(function, "__module__", None) or "", getattr(function, "__name__", "")
    if module.partition(".")[0] == "torch":
        return _name_draws(name)
    if module in ("_operator", "operator", "builtins", "math") or (
        module.startswith("pippy.") and isinstance(function, types.FunctionType)
    ):
        return Draws.NOTHING
    if isinstance(function, ScriptedFunction):
        return Draws.TORCHS
    inner = getattr(function, "function", function)  # of a call of an autograd function, that
    if isinstance(inner, type):
        return Draws.of([Draws.TORCHS, _class_draws(inner)])
    code = inner if hasattr(inner, "__code__") else getattr(inner, "func", None)  # of a partial, its function
    if not hasattr(code, "__code__"):
        return Draws.PYTHONS_TOO
    return Draws.NOTHING if _draws_nothing(inner, 3) else Draws.of([Draws.TORCHS, _code_draws(code)])


def method_draws(name: str) -> Draws:
    """From which generators a method may draw, of a tensor most likely.

    >>> method_draws("view"), method_draws("bernoulli_")
    (<Draws.NOTHING: 0>, <Draws.TORCHS: 1>)
    """
    if any(hasattr(kind, name) for kind in _CONTAINERS):
        return _name_draws(name)
    return Draws.PYTHONS_TOO


def _operator_draws(operator: Any) -> Draws:
    """Those of an operator of torch; nobody knows of those of other libraries."""
    of_torch = all(each.namespace in ("aten", "prims", "prim") for each in operations.overloads_of(operator))
    return Draws.NOTHING if of_torch and not operations.draws(operator) else Draws.TORCHS


def _name_draws(name: str) -> Draws:
    """The draws of what torch has by this name; none if it has nothing by it."""
    return Draws.TORCHS if operations.draws(name) else Draws.NOTHING


@cache
def _code_draws(function: Any) -> Draws:
    """Whether a function sees generators of Python or numpy: by the names in its file, or by what it has taken along."""
    function = getattr(function, "__func__", function)
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_filled(cell)]
    seen = [*getattr(function, "__globals__", {}).values(), *cells]
    return Draws.PYTHONS_TOO if any(map(_is_pythons, seen)) else Draws.NOTHING


def _draws_nothing(function: Any, depth: int) -> bool:
    """Whether all names in the code of a function are known to draw nothing, those of functions of its file ``depth`` deep."""
    if not isinstance(function, types.FunctionType) or not depth:
        return False
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    held += [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    names = set(_names_in_code(function.__code__))
    held += [function.__globals__[name] for name in names if name in function.__globals__]
    return all(_is_known(value, depth) for value in held) and all(
        _is_known_name(name) for name in names if not isinstance(function.__globals__.get(name), types.FunctionType)
    )


def _names_in_code(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names_in_code(inner)


def _is_known_name(name: str) -> bool:
    """Whether a name is a builtin or an attribute of what is torch's, and draws nothing."""
    return any(hasattr(each, name) for each in _KNOWN) and _name_draws(name) is Draws.NOTHING


def _is_known(value: Any, depth: int) -> bool:
    if isinstance(value, types.ModuleType):
        return value in (torch, nn, nn.functional, math)
    if value is None or isinstance(value, torch.Tensor | str | int | float | torch.dtype):
        return True
    if isinstance(value, types.FunctionType) and not value.__module__.startswith("torch."):
        return _draws_nothing(value, depth - 1)
    if isinstance(value, nn.Module):  # a hook may hold the module that has the hook
        hooked = any(each._forward_hooks or each._forward_pre_hooks for each in value.modules())
        return not hooked and module_draws(value) is Draws.NOTHING
    return callable(value) and not isinstance(value, type) and function_draws(value) is Draws.NOTHING


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_pythons(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in _PYTHONS
    if isinstance(value, random.Random) or getattr(type(value), "__module__", "").startswith("numpy.random"):
        return True
    return isinstance(getattr(value, "__self__", None), random.Random)  # `from random import random`


# What a stage draws random numbers from, and stages that are seeded once for all of a call: losses.


def drawn_as_whole(module: nn.Module) -> Draws:
    """From which generators something draws that is seeded once, for all of a call: a loss."""
    return Draws.NOTHING if isinstance(module, fx.GraphModule) else module_draws(module)


def stage_draws(module: nn.Module) -> Draws:
    """From which generators a stage, or the loss, may draw."""
    seeding = (
        module.graph.find_nodes(op="call_function", target=seed_draws) if isinstance(module, fx.GraphModule) else ()
    )
    nodes = [Draws.PYTHONS_TOO if node.kwargs.get("pythons") else Draws.TORCHS for node in seeding]
    return Draws.of([drawn_as_whole(module), *nodes])


def seed_whole(name: str, draws: Draws) -> None:
    """Seed the generators for all of a call, if this thread draws with a key."""
    if draws is not Draws.NOTHING:
        seed_draws(draw_key(), name, draws is Draws.PYTHONS_TOO)
