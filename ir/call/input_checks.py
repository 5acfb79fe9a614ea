"""Checks of inputs: what Python read of them while forward was traced must be the same in each call, before it runs.

forward                         the graph                       checked before the call
──────────────────────────────────────────────────────────────────────────────────────────────
if x.shape[1] > 512:            check_fixed(gt, False, line)    yes: it depends on the input alone
for row in h.unbind():          check_fixed(len_1, 4, line)     no: the stage that computes h checks it
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx


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
        """Raise an `InputError` if the inputs, by their names, are others than forward was traced for."""
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
