"""What the backward nodes of a Pipe's graph call."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd import Variable

from pippy.ir.errors import StageError
from pippy.ir.trees import children, describe, tensors

# The gradient of the loss with respect to itself; stands in ``output_grads`` for the value that is the loss. Any other
# number in its place is what the loss counts, where it is one of several.
SEED = 1.0


def stage_backward(stage_output: Any, output_grads: Any, input_values: Sequence[Any]) -> tuple[Any, ...]:
    """Run the backward pass of one stage: gradients add up in its parameters' `.grad`, and come back for its inputs.

    ``output_grads`` has the shape of ``stage_output``: a gradient for each tensor, None where there is none, `SEED`
    for the loss. ``input_values`` are the leaves that the stage was called with. A gradient is returned for each of
    them, None where there is none; that of a container is the tuple of its children's.

    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> stage_backward(stage_output=(x * 3, "text"), output_grads=[torch.ones(2), None], input_values=[x, 7])
    (tensor([3., 3.]), None)
    """
    _check_leaves(input_values)
    pairs = list(gradient_pairs(stage_output, output_grads))
    if pairs:
        # torch.autograd.backward takes as long again to check what was checked where the gradients were made
        Variable._execution_engine.run_backward(*zip(*pairs), False, False, (), True, True)
    return tuple([_gradient(value) for value in input_values])


def gradient_pairs(output: Any, gradient: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor inside ``output`` that has a gradient, and that gradient."""
    if gradient is None:
        return
    if isinstance(gradient, float):
        yield output, _seed(output, gradient)
    elif isinstance(output, torch.Tensor):
        if output.requires_grad:
            yield output, gradient
    else:
        for item, its_gradient in zip(children(output) or (), gradient, strict=True):
            yield from gradient_pairs(item, its_gradient)


def weighted(output_grads: Any, weight: float) -> Any:
    """``output_grads`` for a loss that counts ``weight``; one that counts 0, and may be no number, has no gradient.

    >>> weighted([SEED, None], 0.25)
    [0.25, None]
    """
    if isinstance(output_grads, float):
        return output_grads * weight if weight else None
    if isinstance(output_grads, (list, tuple)):
        return type(output_grads)([weighted(item, weight) for item in output_grads])
    return output_grads


def _seed(loss: Any, gradient: float) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise StageError(f"the loss is {describe(loss)}; it must be a single number: reduce it, with .mean() or .sum()")
    if not loss.requires_grad:
        raise StageError(
            "the loss does not require a gradient: every parameter that it depends on is frozen, or it was detached. "
            "Run the Pipe under torch.no_grad() to compute it alone"
        )
    return torch.full_like(loss, gradient)


def _check_leaves(values: Sequence[Any]) -> None:
    for value in values:
        if not (value.is_leaf if type(value) is torch.Tensor else all(tensor.is_leaf for tensor in tensors(value))):
            raise StageError(
                "stage_backward was given an input that another stage's graph reaches through, so gradients would be counted "
                "twice; call the Pipe, pipe(*args), not its split_gm"
            )


def _gradient(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.grad if value.requires_grad else None
    gradients = tuple(_gradient(item) for item in children(value) or ())
    return gradients if any(gradient is not None for gradient in gradients) else None


def add_gradients(one: Any, other: Any) -> Any:
    """What `torch.add` means where the gradients of a value with several uses meet: either may be None or a tuple.

    >>> add_gradients((torch.tensor(1.0), None), (torch.tensor(2.0), None))
    (tensor(3.), None)
    """
    if one is None or other is None:
        return one if other is None else other
    if isinstance(one, tuple):
        return tuple(add_gradients(mine, theirs) for mine, theirs in zip(one, other, strict=True))
    return torch.add(one, other)
