"""`stage_backward`, which the backward nodes of a Pipe's graph call, and the sums of its gradients."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pippy.ir.base.errors import StageError
from pippy.ir.base.trees import children, describe, map_tensors, tensors

# The gradient of the loss with respect to itself. In ``output_grads`` it stands at the place of the loss. Another number
# there is the weight of this loss, where the loss of a step is the weighted sum of several.
SEED = 1.0


class OutputEdge(GradientEdge):
    """What the backward of a stage needs of an output: the edge of autograd's graph that its gradient goes to.

    It does not hold the output, whose memory is freed as soon as nothing else needs it. For a message it reads like the output.
    """

    __slots__ = ()
    requires_grad = True

    @property
    def like(self) -> Any:
        """What autograd knows of the output: its shape, dtype and device."""
        return self.node._input_metadata[self.output_nr]

    def __repr__(self) -> str:
        return _shown(self.like)


class NoEdge:
    """Stands for an output that no gradient goes to."""

    __slots__ = ("device", "dtype", "shape")
    requires_grad = False

    def __init__(self, output: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = output.shape, output.dtype, output.device

    def __repr__(self) -> str:
        return _shown(self)


def _shown(output: Any) -> str:
    return f"{str(output.dtype).removeprefix('torch.')}{list(output.shape)}"


def edges_of(outputs: Any) -> Any:
    """The outputs of a stage with an `OutputEdge` in place of each tensor, or a `NoEdge`.

    Numbers stay, and leaves, which autograd's graph holds itself, and tensors that are sparse or of classes of their own.

    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> edges = edges_of((x * 3, torch.zeros(5), "text"))
    >>> edges
    (float32[2], float32[5], 'text')
    >>> stage_backward(edges, [torch.ones(2), None, None], [x])
    (tensor([3., 3.]),)
    """
    return _edge_of(outputs) if type(outputs) is torch.Tensor else map_tensors(_edge_of, outputs)


def _edge_of(output: torch.Tensor) -> Any:
    if output.dim() == 0 or output.layout is not torch.strided or type(output) not in (torch.Tensor, FakeTensor):
        return output  # a number, most often: an edge takes longer to make, and more memory
    made_by = output.grad_fn
    if made_by is None:
        return output if output.requires_grad else NoEdge(output)
    if isinstance(made_by, _CUSTOM):
        return OutputEdge._make(get_gradient_edge(output))
    # most often: what torch's function does then, which takes three times as long
    return tuple.__new__(OutputEdge, (made_by, output.output_nr, None))


def stage_backward(stage_output: Any, output_grads: Any, input_values: Sequence[Any]) -> tuple[Any, ...]:
    """Run the backward pass of one stage: add to its parameters' `.grad`, and return the gradients of its inputs.

    In ``stage_output`` are tensors, or what `edges_of` has put in their place. ``output_grads`` has its shape: a gradient for
    each tensor, None where there is none, and `SEED` for the loss. ``input_values`` are the leaves that the stage was called
    with. The result has a gradient for each of them, or None; the gradient of a container is the tuple of its children's.

    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> stage_backward(stage_output=(x * 3, "text"), output_grads=[torch.ones(2), None], input_values=[x, 7])
    (tensor([3., 3.]), None)
    """
    _check_leaves(input_values)
    if isinstance(output_grads, torch.Tensor) and type(stage_output) is OutputEdge:  # most often
        outputs, gradients = (stage_output,), (output_grads,)
    else:
        outputs, gradients = tuple(zip(*gradient_pairs(stage_output, output_grads))) or ((), ())
    if outputs:
        # torch.autograd.backward calls this after checks that take as long again.
        Variable._execution_engine.run_backward(outputs, gradients, False, False, (), True, True)
    return tuple([_gradient(value) for value in input_values])


def gradient_pairs(output: Any, gradient: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """Each tensor inside ``output`` that has a gradient, or its edge, and that gradient."""
    if gradient is None:
        return
    if isinstance(gradient, float):
        yield output, _seed(output, gradient)
    elif isinstance(output, _OUTPUTS):
        if output.requires_grad:
            yield output, gradient
    else:
        for item, its_gradient in zip(children(output) or (), gradient, strict=True):
            yield from gradient_pairs(item, its_gradient)


def loss_inside(seed: Any, value: Any) -> Any:
    """The loss inside of a value, at the place where ``seed`` has a number.

    >>> loss_inside([None, SEED], ("logits", 0.5))
    0.5
    """
    if isinstance(seed, float):
        return value
    places = [place for place, inner in enumerate(seed) if inner is not None]
    return loss_inside(seed[places[0]], (children(value) or ())[places[0]])


def weighted(output_grads: Any, weight: float) -> Any:
    """``output_grads`` for a loss of this weight. A loss of weight 0 gets no gradient, since it may be NaN.

    >>> weighted([SEED, None], 0.25)
    [0.25, None]
    """
    if isinstance(output_grads, float):
        return output_grads * weight if weight else None
    if isinstance(output_grads, (list, tuple)):
        return type(output_grads)([weighted(item, weight) for item in output_grads])
    return output_grads


def _seed(loss: Any, gradient: float) -> torch.Tensor:
    like = loss.like if isinstance(loss, OutputEdge) else loss
    if not isinstance(loss, _OUTPUTS) or math.prod(like.shape) != 1:
        raise StageError(f"the loss is {describe(loss)}; it must be a single number: reduce it, with .mean() or .sum()")
    if not loss.requires_grad:
        raise StageError(
            "the loss does not require a gradient: every parameter that it depends on is frozen, or it was detached. "
            "Run the Pipe under torch.no_grad() to compute it alone"
        )
    return torch.full(like.shape, gradient, dtype=like.dtype, device=like.device)


_OUTPUTS = (torch.Tensor, OutputEdge, NoEdge)
_CUSTOM = torch._C._FunctionBase  # of functions that are written in Python


def _check_leaves(values: Sequence[Any]) -> None:
    for value in values:
        if not (value.is_leaf if type(value) is torch.Tensor else all(tensor.is_leaf for tensor in tensors(value))):
            raise StageError(
                "stage_backward was given an input that still has the autograd graph of another stage, so gradients would be "
                "counted twice; call the Pipe, pipe(*args), not its split_gm"
            )


def _gradient(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.grad if value.requires_grad else None
    gradients = tuple(_gradient(item) for item in children(value) or ())
    return gradients if any(gradient is not None for gradient in gradients) else None


def add_gradients(one: Any, other: Any) -> Any:
    """The sum of two gradients of one value, which the `torch.add` nodes of a Pipe's graph stand for.

    Both may be None, which is no gradient, or tuples, which are the gradients of containers.

    >>> add_gradients((torch.tensor(1.0), None), (torch.tensor(2.0), None))
    (tensor(3.), None)
    """
    if one is None or other is None:
        return one if other is None else other
    if isinstance(one, tuple):
        return tuple(add_gradients(mine, theirs) for mine, theirs in zip(one, other, strict=True))
    if one.layout is not torch.strided and other.layout is torch.strided:
        return torch.add(other, one)  # torch adds a sparse tensor to a dense one, and not the other way round
    return torch.add(one, other)
