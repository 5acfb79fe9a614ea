"""The record of a compiled model: the graph, its stages, its names and its loss. A `Pipe` is its face for the user."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from pippy.ir.base.brief import brief
from pippy.ir.base.errors import NameLookupError
from pippy.ir.base.modes import ModelModes
from pippy.ir.base.names import LOSS, Qualnames, stage_name
from pippy.ir.call.signature import ModelCall
from pippy.ir.record.wiring import Wiring
from pippy.ir.run.graph_module import PipeGraphModule
from pippy.ir.run.shared_tensors import get_tensor
from pippy.ir.run.stage_backward import SEED


@dataclass(frozen=True)
class Loss:
    """The value of the top-level graph that is the loss, by its name, and the gradient that the backward starts from.

    The seed is `SEED` if the value is the loss. If the loss is inside the value, it is nested lists with a `SEED`.
    """

    value: str
    seed: Any = SEED


@dataclass(eq=False, repr=False, kw_only=True)
class Compiled(ModelCall):
    """A model cut into stages, as plain data. The passes fill it; drawings and drivers read it.

    ``split_gm`` is the top-level graph, which holds the stages. ``replicated_params`` has a dict for every replicated
    parameter, from the stages that hold a copy to the name in that stage; the first is the model's own. ``balance`` is the
    result of the ``cut`` of `Pipe.from_tracing`. ``seen_inputs`` has the inputs that each stage must not change in place:
    their numbers and names. ``kept_whole`` is that of the traced graph. ``row_sizes`` says of the values between stages, by
    their names, how they depend on the number of rows; ``value_bytes`` the bytes that they have for the example.
    ``without_gradient`` has the names of those that can have no gradient.
    """

    split_gm: PipeGraphModule
    qualnames: Qualnames
    replicated_params: list[dict[str, str]]
    wiring: Wiring
    modes: ModelModes
    loss: Loss | None = None
    balance: Any = None
    seen_inputs: dict[str, tuple[tuple[int, str], ...]] = field(default_factory=dict)
    kept_whole: dict[str, str] = field(default_factory=dict)
    row_sizes: dict[str, Any] = field(default_factory=dict)
    value_bytes: dict[str, int] = field(default_factory=dict)
    without_gradient: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.split_gm.__dict__["replicated_params"] = self.replicated_params

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    @property
    def num_stages(self) -> int:
        """How many stages the Pipe has; `_loss` is not one of them."""
        return sum(1 for _ in self.stages())

    def stages(self) -> Iterator[tuple[str, PipeGraphModule]]:
        """Every stage with its name, in order."""
        for name, module in self.split_gm.named_children():
            if name != LOSS:
                yield name, module  # type: ignore[misc]

    def stage(self, name: str | int) -> Any:
        """A stage by its name or number; `_loss` too, by its name."""
        wanted = stage_name(name) if isinstance(name, int) and name < self.num_stages else name
        if not isinstance(wanted, str) or wanted not in self.split_gm._modules:
            raise NameLookupError(f"the Pipe has no stage {brief(name)}; it has {', '.join(self.split_gm._modules)}")
        return self.split_gm._modules[wanted]

    @property
    def loss_module(self) -> Any:
        """The loss's module; None if the model returns its loss, or has none."""
        return self.split_gm._modules.get(LOSS)

    def stage_outputs(self, name: str) -> Any:
        """The node in a stage's graph that makes its output, or the tuple of them."""
        return self.stage(name).graph.output_node().args[0]

    def placeholders(self) -> list[fx.Node]:
        """The inputs of the top-level graph, in order."""
        return list(self.split_gm.graph.find_nodes(op="placeholder"))

    def remap_qualname(self, qualname: str) -> str:
        """The user's name of a parameter, buffer or module, from its name inside a stage.

        >>> from torch import nn
        >>> from pippy import Pipe
        >>> pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        >>> pipe.remap_qualname("submod_0.0.weight")
        '0.weight'
        """
        return self.qualnames.remap(qualname)

    def stage_qualnames(self, name: str) -> tuple[str, ...]:
        """The names in stages of the user's parameter or buffer, the inverse of `remap_qualname`; empty if no stage uses it.

        >>> from torch import nn
        >>> from pippy import Pipe
        >>> pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        >>> pipe.stage_qualnames("0.weight")
        ('submod_0.0.weight',)
        """
        return self.qualnames.locate(name)

    def copies(self) -> list[list[torch.Tensor]]:
        """The copies of each replicated parameter, in the order of `replicated_params`; the first is the model's own."""
        return [
            [get_tensor(self.stage(stage), name) for stage, name in group.items()] for group in self.replicated_params
        ]

    def get_grad(self, name: str) -> torch.Tensor | None:
        """The gradient of the parameter that the user calls ``name``."""
        places = self.stage_qualnames(name)
        return get_tensor(self.split_gm, places[0]).grad if places else None
