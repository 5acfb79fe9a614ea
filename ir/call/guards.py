"""What was fixed when a model was traced with example arguments, and is checked at each call. Both front ends make these.

                                            traced by torch.fx                  by torch.export
    ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────
    kinds       of the arguments            classes, numbers of dimensions      these, dtypes, and constants
    asked       of inputs, by forward       values that Python was told         none
    conditions  on sizes                    none                                the same, as torch writes it: x.size(1) > 3

Kinds are those of a whole call; the rest is checked for each micro-batch. Sizes stay free, as far as forward has not asked.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pippy.ir.base.errors import InputError
from pippy.ir.base.source import Source
from pippy.ir.base.trees import describe
from pippy.ir.call.asked import Asked
from pippy.ir.call.kinds import Elsewhere, InPieces, Kind, differences, tensor_kinds

_NAMES: dict[str, Any] = {"math": math, "inf": math.inf}


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

    ``kinds`` are those of the arguments, by their names. ``dtypes`` has those of the model's parameters and buffers, by their
    names, if they are written into the graph; ``asked_autocast`` the line that asked whether autocast is on. ``one`` has
    pairs of inputs that must be one object, ``different`` those that must be two: forward asks by `is`. ``flags`` has the
    defaults of inputs that are True or False, where no example says more.
    """

    kinds: dict[str, Kind] = field(default_factory=dict)
    asked: Asked = field(default_factory=Asked)
    conditions: tuple[Condition, ...] = ()
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    asked_autocast: Source | None = None
    one: tuple[tuple[str, str], ...] = ()
    different: tuple[tuple[str, str], ...] = ()
    flags: dict[str, bool] = field(default_factory=dict)

    def joined(self, others: Sequence[Condition]) -> "Guards":
        """These guards, and other conditions."""
        return replace(self, conditions=tuple(dict.fromkeys((*self.conditions, *others))))

    def other_kinds(self, arguments: Mapping[str, Any], required: Sequence[str] = ()) -> Iterator[str]:
        """What is wrong with the kinds of a call's arguments, but for those of ``required`` that are None."""
        for name, kind in self.kinds.items():
            if arguments[name] is None and name in required:
                continue
            for each in differences(kind, arguments[name], name):
                yield differs(each.path, each.found, each.fixed)

        for name, default in self.flags.items():
            if not isinstance(arguments[name], (bool, Elsewhere, InPieces)):
                yield (
                    f"{name} is {describe(arguments[name])}, and the model was traced with its default, {default}; give "
                    "True or False, or make another Pipe with this call for its example"
                )
        for name, other in (*self.one, *self.different):
            is_one = arguments[name] is arguments[other] and arguments[name] is not None
            if is_one != ((name, other) in self.one):
                words = ("two objects", "one") if (name, other) in self.one else ("one object", "two")
                yield (
                    f"{name} and {other} are {words[0]}, and forward asks; the model was traced with {words[1]}. Make "
                    "another Pipe with this call for its example"
                )

    @property
    def are_of_rows(self) -> bool:
        """Whether there is something to check in each micro-batch."""
        return bool(self.asked.steps) or self.asked_autocast is not None or bool(self.conditions) or self._fix_sizes()

    def _fix_sizes(self) -> bool:
        return any(map(_has_sizes, self.kinds.values()))

    @property
    def checked_names(self) -> list[str]:
        """The names of the inputs that `check` looks at."""
        named = [name for name, kind in self.kinds.items() if _has_sizes(kind)]
        return list(dict.fromkeys([*named, *self.asked.inputs()]))

    def check(self, values: Mapping[str, Any]) -> None:
        """Raise an `InputError` if the inputs of a micro-batch, by their names, differ in something that is fixed."""
        if self.asked_autocast is not None and any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            raise InputError(
                "forward asks whether autocast is on, and the model was traced without; call the Pipe without autocast, and "
                f"have the model compute in the dtype that you want:\n{self.asked_autocast.excerpt()}"
            )
        self.asked.check(values)
        texts, sizes = dict[str, str](), dict[str, int]()
        for path, dim, size, given in self._sizes(values):
            text = f"{path}.size({dim})"
            if isinstance(size, str):
                texts[size], sizes[size] = text, given
            elif size != given:
                raise InputError(differs(text, str(given), str(size)))
        for condition in self.conditions:
            if not condition.holds(sizes):
                now = ", ".join(f"{text} is {sizes[name]}" for name, text in texts.items() if text in condition.text)
                raise InputError(_does_not_hold(condition, now))

    def _sizes(self, values: Mapping[str, Any]) -> Iterator[tuple[str, int, int | str, int]]:
        """The argument, the dimension, and the size of the example and of ``values``, for each size that is known."""
        for name, whole in self.kinds.items():
            if not _has_sizes(whole):
                continue
            for path, kind, tensor in whole.tensors(values[name], name):
                for dim, size in enumerate(kind.sizes):
                    yield path, dim, size, tensor.shape[dim]

    def free_sizes(self, values: Mapping[str, Any]) -> list[tuple[str, int, str, int]]:
        """The argument, the dimension and the name of each size that has a name, and what it is in ``values``."""
        return [(path, dim, size, given) for path, dim, size, given in self._sizes(values) if isinstance(size, str)]


def _has_sizes(kind: Kind) -> bool:
    return any(each.sizes for each in tensor_kinds(kind))


def differs(path: str, found: str, fixed: str) -> str:
    """What is wrong with an argument that differs from the example."""
    return (
        f"{path} is {found}; in the example that the model was traced with it was {fixed}, and the Pipe is right for no other. "
        "Give it like that, or make another Pipe with this call for its example"
    )


def _does_not_hold(condition: Condition, now: str) -> str:
    line = f":\n{condition.source.excerpt()}\n" if condition.source is not None else "; "
    return (
        f"forward asked for sizes while it was traced, and went on for {condition.text}; now {now}{line}"
        "What to do: make another Pipe with this call for its example"
    )
