"""One loss over the whole mini-batch: the micro-batches are joined before it, and its gradients are divided again."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from pippy.drivers.base.errors import DriverError
from pippy.ir.base.trees import cat, children, describe, leaves, map_leaves, narrow
from pippy.ir.run.stage_backward import stage_backward


class Runnable(Protocol):
    """What computes the loss."""

    def run(self, inputs: Sequence[Any]) -> Any: ...


class SingleLoss:
    """Gathers the inputs of the loss from all micro-batches, and computes it once, in one step.

    Tensors are concatenated along their first dimension. Inputs without rows must be the same in all micro-batches, which
    then share their gradients.

    >>> class Mean:
    ...     def run(self, inputs):
    ...         return inputs[0].mean()
    >>> single = SingleLoss(Mean())
    >>> single.gather(0, (torch.tensor([1.0, 2.0], requires_grad=True),))
    >>> single.gather(1, (torch.tensor([6.0], requires_grad=True),))
    >>> single.loss()
    tensor(3.)
    >>> single.backward(1)
    (tensor([0.3333]),)
    """

    def __init__(self, call: Runnable) -> None:
        self.call = call
        self.gathered: dict[int, tuple[Any, ...]] = {}
        self.merged: tuple[Any, ...] = ()
        self.output: Any = None
        self.gradients: list[list[Any]] | None = None  # by micro-batch, then leaf

    def gather(self, microbatch: int, inputs: tuple[Any, ...]) -> None:
        """Keep the inputs of one micro-batch."""
        self.gathered[microbatch] = inputs

    def loss(self) -> torch.Tensor:
        """The loss over all micro-batches."""
        if self.output is None:
            parts = [self.gathered[microbatch] for microbatch in sorted(self.gathered)]
            merged = iter([_merged(same) for same in zip(*(list(leaves(part)) for part in parts), strict=True)])
            self.merged = tuple(map_leaves(lambda _: next(merged), value) for value in parts[0])
            self.output = self.call.run(self.merged)
        return self.output.detach() if isinstance(self.output, torch.Tensor) else self.output

    def backward(self, microbatch: int, seed: float = 1.0) -> tuple[Any, ...]:
        """The gradients of one micro-batch's inputs. ``seed`` is the gradient of the loss, the same for all of them."""
        self.loss()
        if self.gradients is None:
            stage_backward(self.output, seed, self.merged)
            self.gradients = list(self._divided())
        own = iter(self.gradients[microbatch])
        return tuple(_arranged(value, own) for value in self.gathered[microbatch])

    def _divided(self) -> Iterator[list[Any]]:
        merged = list(leaves(self.merged))
        start = [0] * len(merged)
        for microbatch in sorted(self.gathered):
            gradients: list[torch.Tensor | None] = []
            for index, leaf in enumerate(leaves(self.gathered[microbatch])):
                whole = merged[index]
                rows = leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.dim() else 0
                if not isinstance(whole, torch.Tensor) or not whole.requires_grad or whole.grad is None:
                    gradients.append(None)
                elif leaf.dim():
                    gradients.append(narrow(whole.grad, 0, start[index], rows))
                else:
                    gradients.append(whole.grad / len(self.gathered))
                start[index] += rows
            yield gradients


def _merged(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, torch.Tensor) and (first.dim() or all(torch.equal(first, part) for part in parts)):
        merged = cat([part.detach() for part in parts], 0) if first.dim() else first.detach()
        return merged.requires_grad_(any(part.requires_grad for part in parts))
    if not isinstance(first, torch.Tensor) and all(first == part for part in parts):
        return first
    raise DriverError(
        f"single_loss=True: an input of the loss, {describe(first)}, has no rows to put together, and is not the same in all "
        "micro-batches; leave single_loss out, so that each micro-batch has a loss of its own"
    )


def _arranged(value: Any, gradients: Iterator[Any]) -> Any:
    """The gradients of a value's leaves in the structure of the value, as `stage_backward` returns them."""
    held = children(value)
    if held is None:
        return next(gradients)
    arranged = tuple(_arranged(item, gradients) for item in held)
    return arranged if any(gradient is not None for gradient in arranged) else None
