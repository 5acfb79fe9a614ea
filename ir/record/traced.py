"""The record of what was traced: the tracer fills it, the passes that cut a model read it."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from pippy.ir.base.errors import SharedParameterError
from pippy.ir.base.modes import ModelModes
from pippy.ir.base.names import named_state
from pippy.ir.base.node_notes import SOURCE
from pippy.ir.call.signature import ModelCall, target_name
from pippy.ir.record.reached import ModelTensors, reached_by


@dataclass
class Traced(ModelCall):
    """A marked graph, and what the names in it stand for.

    ``attributes`` has the value of each target of a `get_attr` or `call_module` node. ``balanced`` is True if a pass has
    placed the marks, or has decided that there are none. ``kept_whole`` has the reason for each module that the graph calls
    because it could not be traced; ``untraced`` is the whole error if the model itself is one of them. ``differing`` has
    the paths of modules that call something else in the other mode. ``reads`` has the attributes of modules that tracing
    has read, there or not: the class of the module, and the name.
    """

    model: nn.Module
    graph: fx.Graph
    attributes: dict[str, Any] = field(default_factory=dict)
    modes: ModelModes = field(default_factory=ModelModes)
    balanced: bool = False
    kept_whole: dict[str, str] = field(default_factory=dict)
    untraced: str = ""
    differing: set[str] = field(default_factory=set)
    reads: dict[tuple[type, str], bool] = field(default_factory=dict)
    _reached: dict[Any, list[torch.Tensor]] = field(default_factory=dict)

    def reached(self, node: fx.Node) -> list[torch.Tensor]:
        """The model's tensors that a node reaches by plain references, beside that which it gets, or those that its module has
        registered. Raises if it reaches one that cannot be followed."""
        target: Any = node.target
        if node.op in ("get_attr", "call_module", "call_function") and target not in self._reached:
            value = target if node.op == "call_function" else self.attributes[target]
            registered = named_state(value) if isinstance(value, nn.Module) else [("", value)]
            own = {id(tensor) for _, tensor in registered if id(tensor) in self.model_tensors.names}
            where = (
                f"{target} ({SOURCE.of(node)})" if node.op == "get_attr" else getattr(target, "__qualname__", target)
            )
            found = self.model_tensors.among(reached_by(value, str(where)), own, SharedParameterError)
            self._reached[target] = [each.value for each in found]
        return self._reached.get(target, [])

    @cached_property
    def model_tensors(self) -> ModelTensors:
        """The tensors of the model, as code may reach them."""
        return ModelTensors(self.model)

    def placeholders(self) -> list[fx.Node]:
        return list(self.graph.find_nodes(op="placeholder"))

    def name_for_target(self) -> str:
        """What the target will be called, if there is a loss function."""
        return target_name([node.name for node in self.placeholders()])
