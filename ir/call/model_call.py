"""How a model is called: what the arguments of a call are bound to. `Traced` and `Compiled` are such."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from pippy.ir.call.guards import Guards


@dataclass(eq=False, kw_only=True)
class ModelCall(ABC):
    """The call of a model's forward, with the target of its loss.

    ``concrete_args`` are the arguments that the graph is specialized to. ``required_inputs`` names the inputs that must not
    be None, because forward does something else without them. ``guards`` say what is fixed, and are checked in each call.
    ``target_name`` is the name of the loss's target, or None.
    """

    signature: inspect.Signature = field(default_factory=inspect.Signature)
    concrete_args: dict[str, Any] = field(default_factory=dict)
    required_inputs: tuple[str, ...] = ()
    guards: Guards = field(default_factory=Guards)
    target_name: str | None = None

    @abstractmethod
    def placeholders(self) -> Sequence[fx.Node]:
        """The inputs of the graph, in order."""
