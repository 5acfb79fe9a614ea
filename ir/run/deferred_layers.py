"""Layers whose heavy weight gradient is put off: their forward saves what it needs, and queues it in the backward.

In such a layer the operation gets its weight detached, so that autograd computes only the gradient of the layer's input
(and that of a linear layer's bias, a plain sum). A hook at the operation's node catches the gradient that arrives
there; with the saved input that is all that the weight's gradient takes, whenever it is asked for.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._C._autograd import _make_saved_tensor  # what autograd itself saves with: it minds hooks and versions

Gradients = tuple[torch.Tensor, ...]
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PLAIN = (torch.Tensor, nn.Parameter)


class Use:
    """One call of a layer: what its weight gradient is computed from."""

    __slots__ = ("_grad", "_gradients", "_input", "_queue", "_saved", "parameters")

    def __init__(
        self,
        queue: list["Use"],
        parameters: Sequence[nn.Parameter],
        x: torch.Tensor,
        gradients: Callable[[torch.Tensor, torch.Tensor], Gradients],
    ) -> None:
        self.parameters = parameters
        self._queue = queue
        self._gradients = gradients
        self._saved: Any = _make_saved_tensor(x, False)
        self._input: torch.Tensor | None = None
        self._grad: torch.Tensor | None = None

    def receive(self, grads: tuple[torch.Tensor | None, ...]) -> None:
        """Called by autograd when the gradient of the operation's result arrives."""
        (grad,) = grads
        if grad is None:
            return
        # Without detach, the graph that made the input would live until the weights' turn. A checkpointed block runs
        # its forward again here, at the one place where autograd would have done it too.
        self._input, self._grad, self._saved = self._saved.unpack().detach(), grad, None
        queue, self._queue = (
            self._queue,
            [],
        )  # a use that knew the queue that holds it would outlive both, until a collection
        queue.append(self)

    def gradients(self) -> Gradients:
        """The gradients of `parameters`; what they were computed from is let go."""
        assert self._input is not None and self._grad is not None
        result = self._gradients(self._grad, self._input)
        self._input = self._grad = None
        return result


class DeferrableLayer(ABC):
    """A module whose `forward` can be exchanged for one that queues the weight's gradient."""

    def __init__(self, module: nn.Module, products_per_number: int) -> None:
        self._module = module
        self._products_per_number = products_per_number  # how many products each number of the input takes part in
        self._least_numbers = 0.0
        self._parameters = module._parameters
        self._queue: list[Use] = []

    def install(self, queue: list[Use], at_least: int) -> None:
        """From now on, calls of ``at_least`` so many products put their weight's gradient into ``queue``."""
        self._queue = queue
        self._least_numbers = at_least / self._products_per_number
        self._module.__dict__["forward"] = self._forward  # not setattr: nn.Module's is slow, and this is done each time

    def remove(self) -> None:
        self._queue = []
        self._module.__dict__.pop("forward", None)

    @abstractmethod
    def deferred_parameters(self) -> Iterable[nn.Parameter | None]:
        """The parameters whose gradient this layer computes later."""

    @abstractmethod
    def _forward(self, input: torch.Tensor) -> torch.Tensor:
        """What the module computes; with the weight's gradient queued, where that can be done."""


class _Linear(DeferrableLayer):
    def deferred_parameters(self) -> Iterable[nn.Parameter | None]:
        return [self._parameters["weight"]]

    def _forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        if (
            weight is None
            or input.numel() < self._least_numbers
            or not (_can_defer(input, weight) and _is_one_product(input, weight))
        ):
            return F.linear(input, weight, bias)  # type: ignore[arg-type]
        use = Use(self._queue, (weight,), input, _linear_gradients)
        output = F.linear(input, weight.detach(), bias)
        _catch(output, use)
        return output


def _is_one_product(input: torch.Tensor, weight: torch.Tensor) -> bool:
    """Other shapes are computed in ways that depend on whether the weight requires a gradient: other bits."""
    return weight.is_contiguous() and (input.dim() == 2 or (input.dim() > 2 and input.is_contiguous()))


def _linear_gradients(grad: torch.Tensor, x: torch.Tensor) -> Gradients:
    # the very product, in the very layout, that autograd computes: the same bits
    return (grad.reshape(-1, grad.shape[-1]).t().mm(x.reshape(-1, x.shape[-1])),)


class _Convolution(DeferrableLayer):
    """The bias waits with the weight: the kernel for one computes both, and would run twice."""

    def deferred_parameters(self) -> Iterable[nn.Parameter | None]:
        return [self._parameters["weight"], self._parameters["bias"]]

    def _forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        module: Any = self._module
        too_small = input.numel() < self._least_numbers
        if weight is None or too_small or input.dim() != weight.dim() or not _can_defer(input, weight, bias):
            return module._conv_forward(input, weight, bias)
        parameters = [one for one in (weight, bias) if one is not None and one.requires_grad]
        use = Use(self._queue, parameters, input, self._gradients)
        output = module._conv_forward(input, weight.detach(), None if bias is None else bias.detach())
        _catch(output, use)
        return output

    def _gradients(self, grad: torch.Tensor, x: torch.Tensor) -> Gradients:
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        module: Any = self._module
        assert weight is not None
        needs_bias = bias is not None and bias.requires_grad
        _, of_weight, of_bias = torch.ops.aten.convolution_backward(
            grad, x, weight, None if bias is None else list(bias.shape), module.stride, module.padding, module.dilation,
            False, [0], module.groups, [False, True, needs_bias],
        )  # fmt: skip
        return (of_weight, of_bias) if needs_bias else (of_weight,)


def _can_defer(x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None = None) -> bool:
    """Only the plain case, which the formulas above are sure of; in any other, autograd computes the gradient at once."""
    return (
        torch.is_grad_enabled()
        and x.requires_grad
        and weight.requires_grad
        and type(x) in _PLAIN
        and type(weight) is nn.Parameter
        and x.dtype == weight.dtype
        and not _has_hooks(weight)
        and (bias is None or not _has_hooks(bias))
        and not torch.is_autocast_enabled(x.device.type)
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _has_hooks(parameter: nn.Parameter) -> bool:
    """Such a parameter's gradient is left to autograd, which knows best when it is whole."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _catch(output: torch.Tensor, use: Use) -> None:
    # An operation in place on a view leaves the view's own node out of the graph, and never that of its base.
    made = output._base if output._is_view() else output
    made.grad_fn.register_prehook(use.receive)  # type: ignore[union-attr]


def deferrable_layers(stage: nn.Module) -> list[DeferrableLayer]:
    """The layers of a stage whose weights nothing else in the stage uses.

    A weight with a use of another kind gets its gradients where autograd can add them up before any hook sees them.

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
    if "forward" in module.__dict__:  # someone else's exchange; a subclass, too, may do anything in its forward
        return None
    if type(module) is nn.Linear:
        return _Linear(module, module.out_features or 1)
    if isinstance(module, _CONVOLUTIONS) and type(module) in _CONVOLUTIONS and _is_plainly_padded(module):
        return _Convolution(module, math.prod(module.kernel_size) * module.out_channels // module.groups or 1)
    return None


def _is_plainly_padded(module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> bool:
    return module.padding_mode == "zeros" and not isinstance(module.padding, str)


def _used_elsewhere(modules: list[nn.Module], layers: dict[nn.Module, DeferrableLayer]) -> Iterator[nn.Parameter]:
    for module in modules:
        deferred = {id(one) for one in layers[module].deferred_parameters()} if module in layers else set()
        yield from (one for one in module._parameters.values() if one is not None and id(one) not in deferred)
        if isinstance(module, fx.GraphModule):
            yield from _fetched(module)


def _fetched(module: fx.GraphModule) -> Iterator[nn.Parameter]:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for node in module.graph.nodes:
        if node.op == "get_attr" and node.target in parameters:
            yield parameters[node.target]


def _is_compiled(module: nn.Module) -> bool:
    """What torch.compile made does not call its layers, and would compile anew if one were exchanged."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
