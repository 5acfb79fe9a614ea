"""Layers that compute their weight gradient later: linear layers and convolutions.

A linear layer computes y = x @ W.T + b. Given the gradient g of y, its backward has three products:

    gradient of x    g @ W       now, by autograd: the stage before waits for it
    gradient of b    g.sum(0)    now, by autograd: it costs little
    gradient of W    g.T @ x     later, from x and g

Under autocast all is computed with fewer bits: x is kept as it is cast, and the gradient of W is cast back when it is
complete, as autograd does.

So the forward gives the operation a detached W, and autograd computes nothing for it. Each call of the layer makes a
`LayerCall`, which keeps x. When autograd has g, a hook on the node that made y puts g beside x, and the `LayerCall` into
a queue.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._C._autograd import (
    _make_saved_tensor,  # autograd saves tensors with it; it keeps saved-tensor hooks and checks versions
)
from torch._subclasses.fake_tensor import FakeTensor

LayerGradients = tuple[torch.Tensor, ...]
_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)


class LayerCall:
    """One call of a layer, with the two tensors that its weight gradient is computed from."""

    __slots__ = ("_grad", "_gradients", "_input", "_queue", "_saved", "parameters")

    def __init__(
        self,
        queue: list["LayerCall"],
        parameters: Sequence[nn.Parameter],
        x: torch.Tensor,
        gradients: Callable[[torch.Tensor, torch.Tensor], LayerGradients],
    ) -> None:
        self.parameters = parameters
        self._queue = queue
        self._gradients = gradients
        self._saved: Any = _make_saved_tensor(x, False)
        self._input: torch.Tensor | None = None
        self._grad: torch.Tensor | None = None

    def receive(self, grads: tuple[torch.Tensor | None, ...]) -> None:
        """Autograd calls this with the gradient of the layer's output."""
        (grad,) = grads
        if grad is None:
            return
        # A checkpointed block runs its forward again when the input is unpacked; autograd would do that here, too.
        # Detached, the input does not keep alive the graph that made it.
        self._input, self._grad, self._saved = self._saved.unpack().detach(), grad, None
        queue, self._queue = self._queue, []  # no reference cycle: it would live until a garbage collection
        queue.append(self)

    def gradients(self) -> LayerGradients:
        """The gradients of `parameters`. The two tensors that they are computed from are freed."""
        assert self._input is not None and self._grad is not None
        result = self._gradients(self._grad, self._input)
        self._input = self._grad = None
        return result


class DeferrableLayer(ABC):
    """A module whose `forward` can be replaced by one that defers the weight gradient.

    ``products_per_number`` is the number of multiplications that each number of the input takes part in.
    """

    def __init__(self, module: nn.Module, products_per_number: int) -> None:
        self._module = module
        self._products_per_number = products_per_number
        self._smallest_input = 0.0
        self._parameters = module._parameters
        self._queue: list[LayerCall] = []

    def install(self, queue: list[LayerCall], at_least: int) -> None:
        """From now on, a call goes into ``queue`` if it takes ``at_least`` this number of multiplications."""
        self._queue = queue
        self._smallest_input = at_least / self._products_per_number
        self._module.__dict__["forward"] = self._forward  # nn.Module.__setattr__ is slow

    def remove(self) -> None:
        """Give the module its own `forward` again."""
        self._queue = []
        self._module.__dict__.pop("forward", None)

    @abstractmethod
    def deferred_parameters(self) -> Iterable[nn.Parameter | None]:
        """The parameters whose gradient this layer computes later."""

    @abstractmethod
    def _forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute what the module computes, and defer the weight gradient where that is possible."""


class LinearLayer(DeferrableLayer):
    """A linear layer; the gradient of its bias is not deferred."""

    def deferred_parameters(self) -> Iterable[nn.Parameter | None]:
        return [self._parameters["weight"]]

    def _forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        too_small = input.numel() < self._smallest_input
        if weight is None or too_small or not (_can_defer(input, weight) and _is_one_product(input, weight)):
            return F.linear(input, weight, bias)  # type: ignore[arg-type]
        call = LayerCall(self._queue, (weight,), _as_computed(input), _linear_gradients)
        output = F.linear(input, weight.detach(), bias)
        _receive_gradient(output, call)
        return output


def _is_one_product(input: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch computes one matrix product, so that detaching the weight does not change the result's bits.

    For other shapes torch chooses a way that depends on whether the weight requires a gradient.
    """
    return weight.is_contiguous() and (input.dim() == 2 or (input.dim() > 2 and input.is_contiguous()))


def _linear_gradients(grad: torch.Tensor, x: torch.Tensor) -> LayerGradients:
    # autograd computes the same product with the same layout, so the bits are the same
    return (grad.reshape(-1, grad.shape[-1]).t().mm(x.reshape(-1, x.shape[-1])),)


class ConvolutionLayer(DeferrableLayer):
    """A convolution; the gradient of its bias is deferred too, because one kernel computes both."""

    def deferred_parameters(self) -> Iterable[nn.Parameter | None]:
        return [self._parameters["weight"], self._parameters["bias"]]

    def _forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        module: Any = self._module
        too_small = input.numel() < self._smallest_input
        if weight is None or too_small or input.dim() != weight.dim() or not _can_defer(input, weight, bias):
            return module._conv_forward(input, weight, bias)
        parameters = [one for one in (weight, bias) if one is not None and one.requires_grad]
        call = LayerCall(self._queue, parameters, _as_computed(input), self._gradients)
        output = module._conv_forward(input, weight.detach(), None if bias is None else bias.detach())
        _receive_gradient(output, call)
        return output

    def _gradients(self, grad: torch.Tensor, x: torch.Tensor) -> LayerGradients:
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        module: Any = self._module
        assert weight is not None
        needs_bias = bias is not None and bias.requires_grad
        _, of_weight, of_bias = torch.ops.aten.convolution_backward(
            grad, x, weight.to(x.dtype), None if bias is None else list(bias.shape), module.stride, module.padding,
            module.dilation, False, [0], module.groups, [False, True, needs_bias],
        )  # fmt: skip
        return (of_weight, of_bias) if needs_bias else (of_weight,)


def _can_defer(x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None = None) -> bool:
    """Whether the formulas above hold. In every other case autograd computes the weight gradient."""
    return (
        torch.is_grad_enabled()
        and x.requires_grad
        and weight.requires_grad
        and type(x) in _PLAIN
        and type(weight) in (nn.Parameter, FakeTensor)
        and x.layout is torch.strided
        and _same_dtype(x, weight, bias)
        and not has_hooks(weight)
        and (bias is None or not has_hooks(bias))
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _same_dtype(*operands: torch.Tensor | None) -> bool:
    """Whether the operands have one dtype, or autocast gives them one."""
    dtypes = {operand.dtype for operand in operands if operand is not None}
    device = next(operand.device.type for operand in operands if operand is not None)
    if not torch.is_autocast_enabled(device):
        return len(dtypes) == 1
    # Without its cache autocast casts a weight at each use, and autograd adds up what the uses give with more bits.
    return torch.is_autocast_cache_enabled() and dtypes <= {torch.float32, torch.get_autocast_dtype(device)}


def _as_computed(x: torch.Tensor) -> torch.Tensor:
    """An input in the dtype that the operation computes in. A cast one is no part of the graph: autocast makes its own."""
    device = x.device.type
    return x.detach().to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether a parameter has hooks; autograd must compute its gradient, to call them once, with all of it."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _receive_gradient(output: torch.Tensor, call: LayerCall) -> None:
    # When a view is changed in place, autograd replaces the node of the view, but not the node of its base.
    made = output._base if output._is_view() else output
    made.grad_fn.register_prehook(call.receive)  # type: ignore[union-attr]


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
    # torch.nn.utils.spectral_norm and prune compute them; the keys of a scripted module are a list
    if not {"weight", "bias"}.issubset(module._parameters.keys()):
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
