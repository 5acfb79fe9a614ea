"""What is cut into stages: the model, and the loss that the Trainer computes with it.

    inputs ──▶ compute_loss ──▶ model ──▶ outputs ──▶ the model's loss, label smoothing, compute_loss_func ──▶ loss, outputs

So whatever `compute_loss` of a Trainer does is traced, and done by the workers. Two inputs are not the model's:
``num_items_in_batch``, by which the Trainer divides sums over tokens, and how many batches are accumulated, by which it
divides a loss that is a mean over its batch.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from pippy.ir.base.errors import LossError
from pippy.ir.base.trees import describe
from pippy.ir.loss.loss_wrappers import LossWrapper

ITEMS = "num_items_in_batch"
ACCUMULATED = "pippy_accumulated_batches"
_REST = "pippy_outputs"  # what a model that returns a tuple returns beside its loss


class TracedLoss(LossWrapper):
    """The model of a Trainer, and its loss. ``compute_loss`` is called as that of a Trainer.

    ``counted`` says what a micro-batch counts for, if the loss is a mean and that is known.
    """

    def __init__(
        self, model: nn.Module, compute_loss: Callable[..., Any], counted: Callable[..., Any] | None = None
    ) -> None:
        super().__init__(model, compute_loss)
        self.counted = counted
        self.training = model.training

    def forward(self, **inputs: Any) -> dict[str, Any]:
        accumulated = inputs.pop(ACCUMULATED, None)
        items = inputs.pop(ITEMS, None)
        loss, outputs = self.loss_fn(self.module, inputs, return_outputs=True, num_items_in_batch=items)
        if accumulated is not None:
            loss = loss / accumulated
        return {"loss": loss, **_beside_the_loss(outputs)}


def labels_that_count(*, labels: Any) -> Any:
    """How many labels a loss is a mean over."""
    return (labels != -100).sum()


def shifted_labels_that_count(*, labels: Any) -> Any:
    """How many, if each is predicted at the place before it."""
    return (labels[..., 1:] != -100).sum()


def _beside_the_loss(outputs: Any) -> dict[str, Any]:
    if isinstance(outputs, Mapping):
        return {name: value for name, value in outputs.items() if name != "loss"}
    if isinstance(outputs, tuple):
        return {_REST: outputs[1:]}
    raise LossError(
        f"the model returns {describe(outputs)}, and a Trainer needs a dict, or a tuple that begins with the loss; return one"
    )


def returned_outputs(returned: Mapping[str, Any]) -> Any:
    """What the model returned, as a Trainer expects it, of what the Pipe has returned."""
    if _REST in returned:
        return (returned["loss"], *returned[_REST])
    return dict(returned)
