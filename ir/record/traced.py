"""The record of what was traced: the tracer fills it, the passes that cut a model read it."""

import inspect
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from pippy.ir.base.modes import Modes
from pippy.ir.call.guards import Guards
from pippy.ir.call.target import target_name


@dataclass
class Traced:
    """A marked graph, and what the names in it stand for.

    ``attributes`` has the value of each target of a `get_attr` or `call_module` node. ``required_inputs`` names
    the inputs that must not be None, because forward does something else without them. ``balanced`` is True if a pass has
    placed the marks, or has decided that there are none. ``guards`` say what is fixed. ``kept_whole`` has the
    reason for each module that the graph calls because it could not be traced. ``differing`` has the paths of modules that
    call something else in the other mode.
    """

    model: nn.Module
    graph: fx.Graph
    attributes: dict[str, Any] = field(default_factory=dict)
    concrete_args: dict[str, Any] = field(default_factory=dict)
    required_inputs: tuple[str, ...] = ()
    signature: inspect.Signature = field(default_factory=inspect.Signature)
    modes: Modes = field(default_factory=Modes)
    balanced: bool = False
    guards: Guards = field(default_factory=Guards)
    kept_whole: dict[str, str] = field(default_factory=dict)
    differing: set[str] = field(default_factory=set)

    @property
    def target_name(self) -> str:
        """What the target of a loss is called, if the Pipe has one."""
        return target_name([node.name for node in self.graph.find_nodes(op="placeholder")])
