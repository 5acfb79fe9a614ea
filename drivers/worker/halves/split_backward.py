"""The two halves of a stage's backward: I for the gradients of its inputs, W for those of its weights.

    F    with deferral.recording(inputs) as deferred:                the forward
             output = run_stage(...)
    I    grads = deferred.backward_input(output, grads, inputs)      every gradient, but those of heavy weights
    W    deferred.run()                                              the gradients of heavy weights

A zero-bubble schedule runs I early, because the stage before waits for it, and W where the worker would be idle. For a
linear layer y = x @ W.T, whose output gets the gradient g, the three do this:

    F    computes y with W detached                                  x is kept
    I    autograd computes g @ W, the gradient of x                  x and g go into the queue of ``deferred``
    W    computes g.T @ x, and adds it to `W.grad`                   the queue is emptied

Together, I and W do what `stage_backward` does, with the same kernels in the same order, so with the same bits.

Autograd runs once, over the whole graph. The other way is to run it twice, once for the inputs and once for the weights;
then somebody has to find out which nodes belong to which run. Nodes off the path to the inputs are missed, custom
functions, hooks and checkpointed blocks run twice, and graphs inside of graphs are not seen. Here only the weights of
linear and convolution layers wait for W. Autograd computes all else in I: biases, norms, embeddings, recurrent cells,
weights that are used in several ways or have hooks, custom functions, and layers that are too small. So a layer that is
not found makes I longer, and no gradient wrong.

Special cases:

- If no input of a stage requires a gradient, I does nothing, and W is the whole backward.
- If a module that tracing did not look into calls a layer and also uses the layer's weight by itself, both I and W add
  to the weight's `.grad`; then the sum is equal to rounding only.
- Between I and W the queue holds inputs and gradients. A stage's own inputs and ``output_grads`` can be among them, so
  their memory must not be used for anything else before W.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward

from pippy.drivers.worker.halves.deferred_layers import LayerCall, deferrable_layers, has_hooks
from pippy.ir.base.errors import StageError
from pippy.ir.base.trees import tensors
from pippy.ir.run.stage_backward import stage_backward

# The least number of multiplications for which a weight gradient is deferred. To defer one takes 20 to 30 microseconds;
# so many multiplications take a core more than 100.
_WORTH_DEFERRING = 1 << 21
# Gradients are given to autograd in groups of this size: one at a time is slow, all at once takes memory.
_GROUP_BYTES = 1 << 20


class _State(Enum):
    """How far a run is.

    RECORDED ──backward_input──▶ WAITING ──run──▶ DONE
    """

    RECORDED, WAITING, DONE = range(3)


class DeferredGradients:
    """The weight gradients of one run of a stage, from its forward to `run`."""

    def __init__(self, deferral: "WeightDeferral") -> None:
        self._deferral = deferral
        self._queue: list[LayerCall] = []
        self._whole_backward: tuple[Any, Any, Sequence[Any]] | None = None
        self._state = _State.RECORDED

    def __len__(self) -> int:
        """How many calls of layers wait for `run`."""
        return len(self._queue)

    def backward_input(self, stage_output: Any, output_grads: Any, input_values: Sequence[Any]) -> tuple[Any, ...]:
        """The half I of `stage_backward`: it takes and returns the same, but adds nothing to the `.grad` of heavy weights."""
        if self._state is not _State.RECORDED:
            raise StageError(
                "backward_input was called twice for one run of a stage, but the graph of a run can only be used "
                "once; run the stage again"
            )
        self._state = _State.WAITING
        if not _any_requires_grad(input_values):
            self._whole_backward = stage_output, output_grads, input_values
            return (None,) * len(input_values)
        with self._deferral.installed(self):  # checkpointed blocks call their layers again
            return stage_backward(stage_output, output_grads, input_values)

    def run(self) -> None:
        """The half W: add the deferred gradients to the parameters' `.grad`, and free what they are computed from."""
        if self._state is not _State.WAITING:
            raise StageError(
                "backward_weight was called before backward_input, or a second time; for each run of a stage call "
                "backward_input, and then backward_weight once"
            )
        self._state = _State.DONE
        if self._whole_backward is not None:
            whole, self._whole_backward = self._whole_backward, None
            stage_backward(*whole)
        if self._queue:
            queue, self._queue = self._queue, []
            with torch.no_grad():
                add_to_grads(_summed(queue))


def add_to_grads(gradients: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
    """Add gradients to the `.grad` of parameters, as soon as there are some."""
    group: dict[nn.Parameter, torch.Tensor] = {}
    size = 0
    for parameter, gradient in gradients:
        group[parameter] = gradient
        size += gradient.nbytes
        if size >= _GROUP_BYTES:
            _add_to_grad(group)
            group, size = {}, 0
    _add_to_grad(group)


def _summed(queue: list[LayerCall]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Each parameter with its gradient, the sum over all calls, added in the order in which autograd adds."""
    calls_left = Counter(parameter for call in queue for parameter in call.parameters)
    sums: dict[nn.Parameter, torch.Tensor] = {}
    for call in queue:
        for parameter, gradient in zip(call.parameters, call.gradients(), strict=True):
            sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
            calls_left[parameter] -= 1
            if not calls_left[parameter]:
                yield parameter, sums.pop(parameter).to(parameter.dtype)


def _add_to_grad(gradients: dict[nn.Parameter, torch.Tensor]) -> None:
    """Add to `.grad`. Autograd does it where there is none yet, whose layout it knows, and where a parameter has hooks."""
    added = [parameter for parameter, gradient in gradients.items() if _is_added_to(parameter, gradient)]
    totals = [each.grad for each in added if each.grad is not None]
    if totals:
        torch._foreach_add_(totals, tuple(gradients.pop(each) for each in added))
    if gradients:
        _engine_run_backward(
            tuple(gradients), tuple(gradients.values()), False, False, (), allow_unreachable=True, accumulate_grad=True
        )


def sum_for(parameter: torch.Tensor) -> torch.Tensor:
    """What gradients of a parameter can be added to in place: its `.grad`, if autograd would do no more, or a tensor of zeros.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> sum_for(weight) is weight.grad, weight.grad
    (True, tensor([0., 0.]))
    """
    own = parameter.grad
    if own is None:
        own = torch.zeros_like(parameter)
        if not has_hooks(parameter):
            parameter.grad = own
        return own
    alike = own.stride() == parameter.stride() and _is_added_to(parameter, parameter)
    return own if alike else torch.zeros_like(parameter)


def _is_added_to(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether autograd would only add a gradient to the one that is there: a tenth of its time is enough for that."""
    own = parameter.grad
    return (
        own is not None
        and own.layout is gradient.layout is torch.strided
        and own.dtype is gradient.dtype
        and not own.requires_grad
        and not has_hooks(parameter)
    )


class WeightDeferral:
    """The layers of a stage that can defer their weight gradients. Made once for a stage, and used in each of its runs.

    A call of a layer defers its weight gradient if that takes ``at_least`` so many multiplications.

    >>> stage = nn.Linear(2, 2)
    >>> x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    >>> deferral = WeightDeferral(stage, at_least=0)
    >>> with deferral.recording([x]) as deferred:
    ...     output = stage(x)
    >>> (grad,) = deferred.backward_input(output, torch.ones(1, 2), [x])
    >>> stage.weight.grad is None
    True
    >>> deferred.run()
    >>> stage.weight.grad
    tensor([[1., 2.],
            [1., 2.]])
    """

    def __init__(self, stage: nn.Module, at_least: int = _WORTH_DEFERRING) -> None:
        self._at_least = at_least
        self._layers = deferrable_layers(stage)

    def recording(self, input_values: Sequence[Any]) -> AbstractContextManager[DeferredGradients]:
        """A context in which the stage's forward runs on these inputs. After it, the layers are as before."""
        deferred = DeferredGradients(self)
        if not _any_requires_grad(input_values):
            return nullcontext(deferred)
        return self.installed(deferred)

    def installed(self, deferred: DeferredGradients) -> AbstractContextManager[DeferredGradients]:
        """A context in which each call of a layer goes into the queue of a run."""
        return self._installed(deferred) if self._layers else nullcontext(deferred)

    @contextmanager
    def _installed(self, deferred: DeferredGradients) -> Iterator[DeferredGradients]:
        try:
            for layer in self._layers:
                layer.install(deferred._queue, self._at_least)
            yield deferred
        finally:
            for layer in self._layers:
                layer.remove()


def _any_requires_grad(values: Sequence[Any]) -> bool:
    for value in values:
        if value.requires_grad if type(value) is torch.Tensor else any(each.requires_grad for each in tensors(value)):
            return True
    return False
