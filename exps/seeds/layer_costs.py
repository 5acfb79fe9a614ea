"""How long each layer of a model takes, alone, and what that makes of stages."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from exps.seeds.layers import Layers
from pippy.balance.partition import Row, RunWeight, best_cuts
from pippy.drivers.plan.cost.simulate import Costs


@dataclass
class LayerCosts:
    """The seconds that each layer takes for one micro-batch.

    >>> costs = LayerCosts([1.0, 1.0, 2.0], [2.0, 2.0, 4.0])
    >>> costs.whole, costs.balance(2), costs.of_stages([1, 2]).backward, costs.of_stages([1, 2], unit=0.5).forward
    (12.0, [2, 1], [2.0, 6.0], [0.5, 1.5])
    """

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)

    @property
    def whole(self) -> float:
        """A forward and a backward of the model."""
        return sum(self.forward) + sum(self.backward)

    def balance(self, stages: int, forwards: int = 1) -> list[int]:
        """How many layers each stage gets if the heaviest is to be light; each forward runs so many times."""
        weights = [
            round(1e9 * (forwards * forward + backward)) for forward, backward in zip(self.forward, self.backward)
        ]
        layers = len(weights)
        cuts = best_cuts(Row(stages, [RunWeight(weights)] * stages, layers=[1] * layers, prices=[0] * layers))
        assert cuts is not None, f"{layers} layers cannot be {stages} stages"
        return [after - before for before, after in pairwise([0, *cuts, layers])]

    def of_stages(self, balance: Sequence[int], unit: float = 1.0) -> Costs:
        """The costs of the passes of each stage, for a simulation; ``unit`` is how long a second counts."""
        forward, backward = ([unit * each for each in sums(costs, balance)] for costs in (self.forward, self.backward))
        return Costs(forward, backward=backward)


def sums(values: Sequence[float], balance: Sequence[int]) -> list[float]:
    """The sum of the values of each stage.

    >>> sums([1, 2, 3, 4], [1, 3])
    [1, 9]
    """
    ends = [sum(balance[:stage]) for stage in range(len(balance) + 1)]
    return [sum(values[begin:end]) for begin, end in pairwise(ends)]


def measured(model: Layers, x: torch.Tensor, repeat: int = 3) -> LayerCosts:
    """Run the model ``repeat`` times, and each layer on its inputs with its backward. Of all times of a layer, and of layers
    that do the same work, the shortest counts: a machine that does something else makes a layer slower, and never faster."""
    times: dict[str, tuple[float, float]] = {}
    order: list[str] = []

    def time_layer(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        work = f"{layer} {[tuple(each.shape) for each in inputs]}"
        found = _seconds(layer, [each.detach().requires_grad_() for each in inputs])
        times[work] = min(times.get(work, found)[0], found[0]), min(times.get(work, found)[1], found[1])
        order.append(work)

    with torch.no_grad():
        model(x)  # the first calls of kernels take longer
        hooks = [layer.register_forward_hook(time_layer) for layer in model.layers]
        for _ in range(repeat):
            model(x)
    for hook in hooks:
        hook.remove()
    of_layers = [times[work] for work in order[: len(model.layers)]]
    return LayerCosts([forward for forward, _ in of_layers], [backward for _, backward in of_layers])


@torch.enable_grad()
def _seconds(layer: nn.Module, inputs: list[torch.Tensor]) -> tuple[float, float]:
    """Of a forward and a backward of one layer."""
    begin = time.perf_counter()
    output = layer.forward(*inputs)
    middle = time.perf_counter()
    wanted = [*inputs, *layer.parameters()]
    torch.autograd.grad(output, wanted, torch.ones_like(output), allow_unused=True)
    return middle - begin, time.perf_counter() - middle
