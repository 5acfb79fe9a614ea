"""Which layers of a stage compute their weight gradient later."""

import math
from collections.abc import Iterator

from torch import fx, nn

from pippy.drivers.worker.halves.deferred_layers import ConvolutionLayer, DeferrableLayer, LinearLayer

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def deferrable_layers(stage: nn.Module) -> list[DeferrableLayer]:
    """The layers of a stage whose weights nothing else in the stage uses.

    Where something else uses a weight, autograd must add up its gradients, and compute all of them.

    >>> from torch import nn
    >>> len(deferrable_layers(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))))
    2
    """
    modules = list(stage.modules())
    if any(_is_compiled(module) for module in modules):
        return []
    layers = {module: layer for module in modules if (layer := _layer_for(module)) is not None}
    elsewhere = {id(parameter) for parameter in _used_elsewhere(modules, layers)}
    return [layer for layer in layers.values() if elsewhere.isdisjoint(map(id, layer.deferred_parameters()))]


def _layer_for(module: nn.Module) -> DeferrableLayer | None:
    if "forward" in module.__dict__:  # somebody else has replaced it
        return None
    if not {"weight", "bias"} <= module._parameters.keys():  # torch.nn.utils.spectral_norm and prune compute them
        return None
    if type(module) is nn.Linear:  # a subclass may do anything in its forward
        return LinearLayer(module, module.out_features or 1)
    if isinstance(module, _CONVOLUTIONS) and type(module) in _CONVOLUTIONS and _is_plainly_padded(module):
        return ConvolutionLayer(module, math.prod(module.kernel_size) * module.out_channels // module.groups or 1)
    return None


def _is_plainly_padded(module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> bool:
    return module.padding_mode == "zeros" and not isinstance(module.padding, str)


def _used_elsewhere(modules: list[nn.Module], layers: dict[nn.Module, DeferrableLayer]) -> Iterator[nn.Parameter]:
    """The parameters that are used otherwise than as the weight of one of ``layers``."""
    for module in modules:
        deferred = {id(one) for one in layers[module].deferred_parameters()} if module in layers else set()
        yield from (one for one in module._parameters.values() if one is not None and id(one) not in deferred)
        if isinstance(module, fx.GraphModule):
            yield from _fetched(module)


def _fetched(module: fx.GraphModule) -> Iterator[nn.Parameter]:
    """The parameters that the graph itself reads."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for node in module.graph.nodes:
        if node.op == "get_attr" and node.target in parameters:
            yield parameters[node.target]


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile made it: it does not call its layers, and would compile again if a layer's `forward` changed."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
