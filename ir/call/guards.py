"""What was fixed when a model was traced; each call is checked for it.

                                            of an example                       of a program of torch.export
    ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────
    kinds       of the arguments            classes, numbers of dimensions      these, dtypes, sizes, and constants
    asked       of inputs, by forward       values that Python has read         none
    conditions  on sizes                    none                                as torch writes them: x.size()[1] > 3

Kinds are checked for the call, the others for each micro-batch. Sizes are free, unless forward has read them.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from pippy.ir.base.errors import GuardError
from pippy.ir.base.trees import describe
from pippy.ir.call.kinds import ArgumentKind, Elsewhere, InPieces, differences, tensor_kinds

# Checks of inputs: what Python read of them while forward was traced must be the same in each call, before it runs.
#
# forward                         the graph                       checked before the call
# ──────────────────────────────────────────────────────────────────────────────────────────────
# if x.shape[1] > 512:            check_fixed(gt, False, line)    yes: it depends on the input alone
# for row in h.unbind():          check_fixed(len_1, 4, line)     no: the stage that computes h checks it


@dataclass(frozen=True)
class InputChecks:
    """Nodes that compute what Python read of inputs, and check it: plain data, in order.

    ``steps`` has for each its name, its function and its arguments, in which a `ValueReference` is an input or an earlier step.
    """

    steps: tuple[tuple[str, Callable[..., Any], Any, Any], ...] = ()

    def inputs(self) -> list[str]:
        """The names of the inputs that are checked."""
        steps, names = {name for name, *_ in self.steps}, dict[str, None]()

        def note(argument: Any) -> Any:
            if isinstance(argument, ValueReference) and argument not in steps:
                names[str(argument)] = None
            return argument

        for _, _, args, kwargs in self.steps:
            fx.node.map_aggregate((args, kwargs), note)
        return list(names)

    def check(self, inputs: Mapping[str, Any]) -> None:
        """Raise a `GuardError` if the inputs, by their names, are others than forward was traced for."""
        values = dict(inputs)
        for name, function, args, kwargs in self.steps:
            filled, named = fx.node.map_aggregate((args, kwargs), lambda each: _filled(each, values))
            values[name] = function(*filled, **named)


class ValueReference(str):
    """The name of an input or a step, in the arguments of another."""

    __slots__ = ()


class Method:
    """A method, called by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(value, self.name)(*args, **kwargs)


def _filled(argument: Any, values: Mapping[str, Any]) -> Any:
    return values[argument] if isinstance(argument, ValueReference) else argument


_INPUT = re.compile(r"\bL\['(\w+)'\]")
OF_AN_EXAMPLE = "make another Pipe with this call for its example"


@dataclass(frozen=True)
class Condition:
    """A condition on the sizes of inputs, as torch writes it.

    >>> condition = Condition("L['x'].size()[0] >= 4")
    >>> condition.names, condition.holds({"x": torch.ones(3)})
    (['x'], False)
    >>> print(condition)
    x.size()[0] >= 4
    """

    code: str

    @property
    def names(self) -> list[str]:
        """The names of the inputs in it."""
        return list(dict.fromkeys(_INPUT.findall(self.code)))

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether it holds for these inputs."""
        return bool(eval(self.code, {"L": values, "math": math}))  # torch has written the code

    def __str__(self) -> str:
        return _INPUT.sub(r"\1", self.code)


@dataclass(frozen=True)
class Guards:
    """What each call must have in common with the example.

    ``kinds`` are the kinds of the arguments, by name. ``dtypes`` are those of the model's parameters and buffers, by name, if
    the graph depends on them. ``one`` has pairs of inputs that must be one object, and ``different`` pairs that must be two, as
    forward compares them by `is`. ``flags`` has the defaults of inputs that are True or False, if there is no example.
    ``other_than`` has defaults that forward compares with by `is`, and that inputs must not be. ``remedy`` is the advice of
    errors.
    """

    kinds: dict[str, ArgumentKind] = field(default_factory=dict)
    asked: InputChecks = field(default_factory=InputChecks)
    conditions: tuple[Condition, ...] = ()
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    one: tuple[tuple[str, str], ...] = ()
    different: tuple[tuple[str, str], ...] = ()
    flags: dict[str, bool] = field(default_factory=dict)
    other_than: dict[str, Any] = field(default_factory=dict)
    remedy: str = OF_AN_EXAMPLE

    def other_kinds(self, arguments: Mapping[str, Any], required: Sequence[str] = ()) -> Iterator[str]:
        """The faults in the kinds of a call's arguments, without those of ``required`` that are None."""
        for name, kind in self.kinds.items():
            if arguments[name] is None and name in required:
                continue
            for each in differences(kind, arguments[name], name):
                yield differs(each.path, each.found, each.fixed, self.remedy)

        for name, default in self.flags.items():
            if not isinstance(arguments[name], (bool, Elsewhere, InPieces)):
                yield (
                    f"{name} is {describe(arguments[name])}, and the model was traced with its default, {default}; give "
                    "True or False, or make another Pipe with this call for its example"
                )
        for name, fixed in self.other_than.items():
            if arguments[name] is fixed:
                yield (
                    f"{name} is its default, {describe(fixed)}, and forward asks; the model was traced with another value. "
                    "Make another Pipe with this call for its example"
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
        return bool(self.asked.steps) or bool(self.conditions) or self._fix_sizes()

    def _fix_sizes(self) -> bool:
        return any(map(_has_sizes, self.kinds.values()))

    @property
    def checked_names(self) -> list[str]:
        """The names of the inputs that `check` looks at."""
        named = [name for name, kind in self.kinds.items() if _has_sizes(kind)]
        of_conditions = [name for condition in self.conditions for name in condition.names]
        return list(dict.fromkeys([*named, *of_conditions, *self.asked.inputs()]))

    def check(self, values: Mapping[str, Any]) -> None:
        """Raise a `GuardError` if the inputs of a micro-batch, by their names, differ in something that is fixed."""
        self.asked.check(values)
        for name, argument in self.kinds.items():
            for path, kind, tensor in argument.tensors(values[name], name) if _has_sizes(argument) else ():
                for dim, size in enumerate(kind.sizes):
                    if size is not None and size != tensor.shape[dim]:
                        raise GuardError(differs(f"{path}.size({dim})", str(tensor.shape[dim]), str(size), self.remedy))
        for condition in self.conditions:
            if not condition.holds(values):
                arguments = ", ".join(f"{name} is {describe(values[name])}" for name in condition.names)
                raise GuardError(
                    f"the program was exported for {condition}, and {arguments}.\nWhat to do: {self.remedy}"
                )


def differs(path: str, found: str, fixed: str, remedy: str = OF_AN_EXAMPLE) -> str:
    """The text about an argument that differs from the example."""
    return (
        f"{path} is {found}; in the example that the model was traced with it was {fixed}. The Pipe is only valid "
        f"for that value; pass it, or {remedy}"
    )


def _has_sizes(kind: ArgumentKind) -> bool:
    return any(each.sizes for each in tensor_kinds(kind))
