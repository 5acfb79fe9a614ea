"""The model of a Trainer on workers: its Pipe and its driver, made for the first batch that comes."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from pippy.drivers.batch.items import call_of_items
from pippy.drivers.driver.drivers import PipelineDriver
from pippy.drivers.engines.cluster import Cluster
from pippy.drivers.model.optimizers.grad_scaler import PipelineGradScaler
from pippy.integrations.transformers.advice import logger
from pippy.integrations.transformers.arguments import PipelineArguments
from pippy.ir.base.errors import LossError, TracingError
from pippy.ir.base.trees import describe
from pippy.ir.loss.loss_wrappers import LossWrapper
from pippy.ir.pipe import Pipe
from pippy.ir.run.random_state import untouched_random_state
from pippy.pipeline import pipeline

# What is cut into stages: the model, and the loss that the Trainer computes with it.
#
#     inputs ──▶ compute_loss ──▶ model ──▶ outputs ──▶ the model's loss, label smoothing, compute_loss_func ──▶ loss, outputs
#
# So whatever `compute_loss` of a Trainer does is traced, and done by the workers. Two inputs are not the model's:
# ``num_items_in_batch``, by which the Trainer divides sums over tokens, and how many batches are accumulated, by which it
# divides a loss that is a mean over its batch.


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
        before = self._kept()
        loss, outputs = self.loss_fn(self.module, inputs, return_outputs=True, num_items_in_batch=items)
        _warn_of_kept([f"self.{name}" for name, each in self._kept().items() if before.get(name) != each])
        if accumulated is not None:
            loss = loss / accumulated
        return {"loss": loss, **_beside_the_loss(outputs)}

    def _kept(self) -> dict[str, tuple[int, int]]:
        """What the trainer has, by name: which object, and how many things are in it."""
        trainer = self.loss_fn.args[0] if isinstance(self.loss_fn, partial) else self
        held = {**vars(type(trainer)), **vars(trainer)}
        return {name: (id(each), len(each) if type(each) in (list, dict, set) else 0) for name, each in held.items()}


def _warn_of_kept(changed: Sequence[str]) -> None:
    """Warn once that ``compute_loss`` keeps something in the trainer: it is not called in each step."""
    if changed:
        logger.warning_once(
            f"PipelineTrainer: compute_loss changes {', '.join(changed)}, which happens in the first step alone: from then on "
            "the workers do what was followed there. What keeps numbers belongs into a callback: on_log of a TrainerCallback "
            "is given the loss"
        )


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


class PipelinedModel:
    """A model on the workers of a cluster, and its calls.

    A batch is a dict of arguments of `TracedLoss`. ``accumulated`` batches are run at once.
    """

    def __init__(
        self,
        loss: TracedLoss,
        arguments: PipelineArguments,
        cluster: Cluster,
        options: Mapping[str, Any],
        batch: Mapping[str, Any],
        accumulated: int,
    ) -> None:
        self.loss, self.names, self.arguments, self.accumulated = loss, set(batch), arguments, accumulated
        self.stages = arguments.stages_on(len(cluster))
        rows = _rows(batch)
        self.is_cut = rows > 1  # else batches are micro-batches as they come, and there is nothing to check
        example = {name: _first_rows(value, rows, self._chunks(rows)) for name, value in batch.items()}
        self.pipe = self._traced(example, arguments.split)
        self.sums = _is_used(self.pipe, ITEMS)
        how = "sum" if self.sums else loss.counted
        losses = {"check": self.is_cut, **({} if how is None else {"loss_reduction": how})}
        self.driver = PipelineDriver(self.pipe, cluster, **{**losses, **arguments.driver_options(), **options})
        self.scaler: PipelineGradScaler | None = None
        self.is_training = False

    def _traced(self, example: Mapping[str, Any], split: Any) -> Pipe:
        """The Pipe. An error that a plain Trainer has, too, is raised as there."""
        try:
            with torch.enable_grad():
                return pipeline(self.loss, num_stages=self.stages, split=split, example_kwargs=example)
        except TracingError as error:
            refused = error
        with torch.no_grad(), untouched_random_state():
            self.loss(**example)
        raise refused

    @property
    def model(self) -> nn.Module:
        """The model in this process."""
        return self.loss.module

    def _chunks(self, rows: int) -> int:
        return self.arguments.chunks_of(rows, self.accumulated, self.stages) if self.is_cut else 1

    def _asked_chunks(self, rows: int) -> int | None:
        """The micro-batches of a step, or None if the driver chooses how many fit."""
        chooses = self.arguments.memory is not None and self.arguments.chunks is None
        return None if chooses else self._chunks(rows)

    def takes(self, batch: Mapping[str, Any]) -> bool:
        """Whether a batch has the arguments that the stages were made for."""
        return self.names == set(batch)

    def train(self, batches: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """Run batches forward and backward, and give the sum of their losses.

        Losses that are sums over all batches, divided by what these hold together, are one step of the pipeline. A loss that is
        a mean over its batch is a step of its own, and so is each batch where the driver chooses a step that fits.
        """
        self.is_training = True
        together = [[each] for each in batches]
        if self.sums and self.arguments.memory is None:
            # Batches of an update that the Trainer has left are divided by another number.
            together = [list(each) for _, each in itertools.groupby(batches, lambda batch: float(batch[ITEMS]))]
        running = []
        for each in together:
            call = call_of_items(each, self._asked_chunks(max(map(_rows, each))))
            running.append(self.driver.run_async(call.chunks, *call.args, outputs=False, **call.kwargs))
        return torch.stack([each.result() for each in running]).sum()

    def evaluate(self, batch: Mapping[str, Any], outputs: bool) -> tuple[torch.Tensor, Any]:
        """The loss of a batch, and what the model returns for it, or nothing."""
        call = call_of_items([batch], self._asked_chunks(_rows(batch)))
        with torch.no_grad():
            result = self.driver.run(call.chunks, outputs=None if outputs else False, **call.kwargs)
        return (result["loss"], returned_outputs(result)) if outputs else (result, {})

    def scale(self, before: Any) -> PipelineGradScaler:
        """Have the workers scale the loss, from now on by a scaler with the state of the one before."""
        self.scaler = self.driver.instantiate_grad_scaler()
        self.scaler.load_state_dict(before.state_dict())
        return self.scaler

    def fetch(self) -> None:
        """Copy the parameters and buffers of the workers into the model of this process."""
        self.driver.copy_to(self.loss)

    def send(self) -> None:
        """Copy the parameters and buffers of the model of this process to the workers."""
        self.driver.load_state_dict(self.loss.state_dict())


def _rows(batch: Mapping[str, Any]) -> int:
    """How many rows a batch has: those of most of its tensors."""
    sizes = [value.shape[0] for value in batch.values() if isinstance(value, torch.Tensor) and value.dim()]
    return max(set(sizes), key=sizes.count, default=1)


def _first_rows(value: Any, rows: int, chunks: int) -> Any:
    """The part of an argument that the first micro-batch has."""
    cut = isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == rows
    return value[: -(-rows // chunks)] if cut else value


def _is_used(pipe: Pipe, name: str) -> bool:
    """Whether a stage computes with this input."""
    return any(
        str(node.target).lstrip("*") == name and node.users for node in pipe.split_gm.graph.find_nodes(op="placeholder")
    )
