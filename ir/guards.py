"""What was fixed when a model was traced with example arguments, and is checked at each call.

An example fixes which arguments there are, their dtypes and numbers of dimensions, and all values that are no tensors. Sizes
stay free, as far as forward has not asked about them: `if x.shape[1] > 3` fixes that it is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree

from pippy.ir.errors import InputError
from pippy.ir.source import Source
from pippy.ir.trees import describe

_NAMES: dict[str, Any] = {"math": math, "inf": math.inf}


@dataclass(frozen=True)
class GivenTensor:
    """A tensor of the example. ``sizes`` has a name for each size that is free, and the others as numbers."""

    dtype: torch.dtype
    sizes: tuple[int | str, ...]


@dataclass(frozen=True)
class GivenValue:
    """What the example had in place of a tensor: a number, a string, None."""

    value: Any


@dataclass(frozen=True)
class Condition:
    """What must hold of the sizes: Python code with their names, the same for the reader, and the line that asked."""

    code: str
    text: str
    source: Source | None = None

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether it holds for these sizes."""
        return bool(eval(self.code, _NAMES, dict(sizes)))  # sympy has written the code, out of the names of sizes


@dataclass(frozen=True)
class Guards:
    """What each call must have in common with the example.

    ``given`` has what the example had, by the argument and the way into it: ``mask``, ``batch['ids']``. ``dtypes`` has those of
    the model's parameters and buffers, by their names; ``asked_autocast`` the line that asked whether autocast is on.
    """

    given: dict[str, GivenTensor | GivenValue]
    conditions: tuple[Condition, ...] = ()
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    asked_autocast: Source | None = None

    def joined(self, others: Sequence[Condition]) -> "Guards":
        """These guards, and other conditions."""
        return replace(self, conditions=tuple(dict.fromkeys((*self.conditions, *others))))

    def check(self, values: Mapping[str, Any]) -> None:
        """Raise an `InputError` if the inputs, by their names, differ from the example in something that is fixed."""
        if self.asked_autocast is not None and any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            raise InputError(
                "forward asks whether autocast is on, and the model was traced without; call the Pipe without autocast, and "
                f"have the model compute in the dtype that you want:\n{self.asked_autocast.excerpt()}"
            )
        found = leaves_by_path(values)
        for path in [*self.given, *found]:
            if path not in found or path not in self.given:
                raise InputError(_differs(path, *(_named(each, path) for each in (found, self.given))))
        sizes: dict[str, int] = {}
        for path, fixed in self.given.items():
            _check_leaf(path, fixed, found[path], sizes)
        for condition in self.conditions:
            if not condition.holds(sizes):
                raise InputError(_does_not_hold(condition, self._sizes_in(condition, sizes)))

    def _sizes_in(self, condition: Condition, sizes: Mapping[str, int]) -> str:
        texts = {name: f"{path}.size({dim})" for path, dim, name in self.free_sizes()}
        return ", ".join(f"{text} is {sizes[name]}" for name, text in texts.items() if text in condition.text)

    def free_sizes(self) -> list[tuple[str, int, str]]:
        """The argument, the dimension and the name of each size that has a name."""
        tensors = [(path, each) for path, each in self.given.items() if isinstance(each, GivenTensor)]
        return [
            (path, dim, size) for path, each in tensors for dim, size in enumerate(each.sizes) if isinstance(size, str)
        ]


def leaves_by_path(values: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of inputs, by the input and the way into it.

    >>> leaves_by_path({"x": 1, "batch": {"ids": (2, 3)}})
    {'x': 1, "batch['ids'][0]": 2, "batch['ids'][1]": 3}
    """
    return {
        name + _pytree.keystr(path): leaf
        for name, value in values.items()
        for path, leaf in _pytree.tree_flatten_with_path(value)[0]
    }


def _check_leaf(path: str, fixed: GivenTensor | GivenValue, found: Any, sizes: dict[str, int]) -> None:
    if isinstance(fixed, GivenValue):
        if type(found) is not type(fixed.value) or found != fixed.value:
            raise InputError(_differs(path, describe(found), describe(fixed.value)))
        return
    if not isinstance(found, torch.Tensor) or (found.dtype, found.dim()) != (fixed.dtype, len(fixed.sizes)):
        raise InputError(_differs(path, describe(found), _described(fixed)))
    for dim, (size, given) in enumerate(zip(fixed.sizes, found.shape)):
        if isinstance(size, str):
            sizes[size] = given
        elif size != given:
            raise InputError(_differs(f"{path}.size({dim})", str(given), str(size)))


def _named(leaves: Mapping[str, Any], path: str) -> str:
    if path not in leaves:
        return "not there"
    leaf = leaves[path]
    if isinstance(leaf, GivenTensor):
        return _described(leaf)
    return describe(leaf.value if isinstance(leaf, GivenValue) else leaf)


def _described(given: GivenTensor) -> str:
    sizes = ", ".join("any" if isinstance(size, str) else str(size) for size in given.sizes)
    return f"{str(given.dtype).removeprefix('torch.')}[{sizes}]"


def _differs(path: str, found: str, fixed: str) -> str:
    return (
        f"{path} is {found}; in the example that the model was traced with it was {fixed}, and the Pipe is right for no other. "
        "Give it like that, or make another Pipe with this call for its example"
    )


def _does_not_hold(condition: Condition, sizes: str) -> str:
    where = f"\n{condition.source.excerpt()}" if condition.source is not None else ""
    return (
        f"the Pipe is right only if {condition.text}, as in the example that the model was traced with; here {sizes}."
        f"{' The line that asked:' if where else ''}{where}\nMake another Pipe with this call for its example"
    )
