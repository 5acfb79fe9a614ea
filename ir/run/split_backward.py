"""The two halves of a stage's backward: I gives the gradients of its inputs, W adds up those of its heavy weights.

    with deferral.recording(inputs) as deferred:                the forward F: linear and convolution layers
        output = run_stage(...)                                 leave word of what their weights will need
    grads = backward_input(output, grads, inputs, deferred)     I: everything but the weights of those layers
    backward_weight(deferred)                                   W: the products that were put off, added to .grad

Together they do what `stage_backward` does, with the same kernels in the same order, so with the same bits.

Why this way. Autograd computes the gradients of a product's two factors in one node. One could run the graph twice,
once towards the inputs and once, from chosen nodes, towards the parameters; then correctness hangs on the analysis of
the graph: nodes off the inputs' path are missed, custom functions, hooks and checkpointed blocks run twice, and graphs
inside of graphs are not seen. Here the backward is autograd's own, run once, over the whole graph; it merely finds the
weights of plain layers detached, and a queue keeps what their gradient takes. Whatever is not sure to be such a plain
layer (biases, norms, embeddings, recurrent cells, weights with several kinds of use or with hooks, autocast, custom
functions, and layers so small that it is not worth the trouble) gets its gradient in I, as ever. So a layer that is
overlooked costs overlap, never correctness.

One case is right only to rounding: a module that tracing did not look into calls a layer and also uses the layer's
weight by itself. Then `.grad` is added to twice, in I and in W.

A stage none of whose inputs needs a gradient has nothing to do in I: all of its backward is W.

Between I and W the queue holds the inputs of layers and the gradients of their results. A stage's own inputs and
``output_grads`` may be among them: memory that they live in must not be used anew before W.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward

from pippy.ir.errors import StageError
from pippy.ir.run.deferred_layers import Use, deferrable_layers
from pippy.ir.run.stage_backward import stage_backward
from pippy.ir.trees import tensors

# Products below which a weight's gradient is computed at once. To put it off takes some 20 to 30 microseconds; this many
# take a core more than 100, so a whole backward in two halves is not much dearer.
_WORTH_IT = 1 << 21
_FLUSH_BYTES = 1 << 20  # gradients handed to autograd at once: one by one is slow for small ones, all is memory


class _State(Enum):
    RECORDED, WAITING, DONE = range(3)


class Deferred:
    """The weight gradients of one run of a stage, from its forward to `run`."""

    def __init__(self, deferral: "WeightDeferral") -> None:
        self._deferral = deferral
        self._queue: list[Use] = []
        self._whole: tuple[Any, Any, Sequence[Any]] | None = None
        self._state = _State.RECORDED

    def __len__(self) -> int:
        """How many uses of layers wait for `run`."""
        return len(self._queue)

    def backward_input(self, stage_output: Any, output_grads: Any, input_values: Sequence[Any]) -> tuple[Any, ...]:
        """See the function `backward_input`."""
        if self._state is not _State.RECORDED:
            raise StageError("backward_input was called twice for one run of a stage; its graph can be run once only")
        self._state = _State.WAITING
        if not _any_needs_grad(input_values):
            self._whole = stage_output, output_grads, input_values
            return (None,) * len(input_values)
        with self._deferral.exchanged(self._queue):  # checkpointed blocks call their layers again
            return stage_backward(stage_output, output_grads, input_values)

    def run(self) -> None:
        """Add the gradients that were put off to the parameters' `.grad`, and let everything go."""
        if self._state is not _State.WAITING:
            raise StageError(
                "the weight gradients of a stage were asked for before backward_input ran, or a second time; run "
                "backward_input first, then backward_weight once"
            )
        self._state = _State.DONE
        if self._whole is not None:
            whole, self._whole = self._whole, None
            stage_backward(*whole)
        with torch.no_grad():
            self._accumulate()

    def _accumulate(self) -> None:
        queue, self._queue = self._queue, []
        uses_left = Counter(parameter for use in queue for parameter in use.parameters)
        sums: dict[nn.Parameter, torch.Tensor] = {}
        whole: dict[nn.Parameter, torch.Tensor] = {}
        size = 0
        for use in queue:  # the order in which autograd adds them, too
            for parameter, gradient in zip(use.parameters, use.gradients(), strict=True):
                sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
                uses_left[parameter] -= 1
                if not uses_left[parameter]:
                    whole[parameter] = sums.pop(parameter)
                    size += gradient.nbytes
            if size >= _FLUSH_BYTES:
                _add_to_grad(whole)
                whole, size = {}, 0
        _add_to_grad(whole)


def _add_to_grad(gradients: dict[nn.Parameter, torch.Tensor]) -> None:
    """By way of autograd, which knows how `.grad` is to look, and whom to tell."""
    if gradients:
        _engine_run_backward(
            tuple(gradients), tuple(gradients.values()), False, False, (), allow_unreachable=True, accumulate_grad=True
        )


class WeightDeferral:
    """The layers of a stage that can put off their weights' gradients; made once for a stage, then used for each run.

    A call of a layer puts its weight's gradient off if that takes ``at_least`` so many products.

    >>> stage = nn.Linear(2, 2)
    >>> x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    >>> deferral = WeightDeferral(stage, at_least=0)
    >>> with deferral.recording([x]) as deferred:
    ...     output = stage(x)
    >>> (grad,) = backward_input(output, torch.ones(1, 2), [x], deferred)
    >>> stage.weight.grad is None
    True
    >>> backward_weight(deferred)
    >>> stage.weight.grad
    tensor([[1., 2.],
            [1., 2.]])
    """

    def __init__(self, stage: nn.Module, at_least: int = _WORTH_IT) -> None:
        self._at_least = at_least
        self._layers = deferrable_layers(stage)

    @contextmanager
    def recording(self, input_values: Sequence[Any]) -> Iterator[Deferred]:
        """Run the stage's forward in here, on these inputs; outside, its layers are as they were."""
        deferred = Deferred(self)
        with self.exchanged(deferred._queue) if _any_needs_grad(input_values) else nullcontext():
            yield deferred

    @contextmanager
    def exchanged(self, queue: list[Use]) -> Iterator[None]:
        """While it lasts, the layers put their weights' gradients into ``queue``."""
        try:
            for layer in self._layers:
                layer.install(queue, self._at_least)
            yield
        finally:
            for layer in self._layers:
                layer.remove()


def backward_input(
    stage_output: Any, output_grads: Any, input_values: Sequence[Any], deferred: Deferred
) -> tuple[Any, ...]:
    """The half I of `stage_backward`: the same arguments, the same result; heavy weights' `.grad` must wait for W."""
    return deferred.backward_input(stage_output, output_grads, input_values)


def backward_weight(deferred: Deferred) -> None:
    """The half W: the gradients that `backward_input` left out are added to the parameters' `.grad`."""
    deferred.run()


def _any_needs_grad(values: Sequence[Any]) -> bool:
    return any(tensor.requires_grad for tensor in tensors(values))
