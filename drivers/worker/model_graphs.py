"""The stages of a model on one worker, by the graph: those that it was given first, and those of other graphs of the model.

The stages of another graph have code of their own, and the tensors and modules of the first.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import nn

from pippy.drivers.protocol.programs import AddGraph
from pippy.drivers.protocol.state import TensorLocation
from pippy.drivers.protocol.steps import StageFlags
from pippy.drivers.wire.pickling import Pickled, unpickle
from pippy.ir.run.random_state import draw_from_torch

GraphStages = Mapping[str, nn.Module]


def made_stages(pickled: Pickled, held: Callable[[Any], Any], device: torch.device) -> dict[str, nn.Module]:
    """Stages from their code, on the device. ``held`` gives what the code only names."""
    made: dict[str, nn.Module] = unpickle(pickled, held, device)
    for module in made.values():
        module.to(device)
        if device.type == "cuda":
            draw_from_torch(module)
    return made


class ModelGraphs:
    """The stages of each graph, by the graph's number: ``modules`` are those of graph 0. ``constant`` names their tensors that
    other stages read."""

    def __init__(self, modules: GraphStages, constant: Mapping[str, Sequence[str]], device: torch.device) -> None:
        self.device = device
        self.modules: dict[int, GraphStages] = {0: modules}
        self.constant: dict[int, Mapping[str, Sequence[str]]] = {0: constant}

    def add(self, add: AddGraph) -> None:
        """Make the stages of another graph, in place of those that had its number."""
        self.modules[add.graph] = made_stages(add.modules, self.part, self.device)
        self.constant[add.graph] = add.constant

    def part(self, place: TensorLocation) -> Any:
        """The tensor or module at a place in the first graph's stages."""
        return reduce(getattr, place.name.split("."), self.modules[0][place.call])

    def set_flags(self, graph: int, flags: Mapping[str, StageFlags]) -> None:
        """Set the flags of modules and parameters of some stages."""
        for call, its in flags.items():
            for module, flag in zip(self.modules[graph][call].modules(), its.training, strict=True):
                module.training = flag
            for parameter, flag in zip(self.modules[graph][call].parameters(), its.requires_grad, strict=True):
                parameter.requires_grad_(flag)
