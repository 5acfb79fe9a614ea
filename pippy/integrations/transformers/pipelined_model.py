"""The model of a Trainer on workers, and its optimizer: a Pipe and its driver, made for the first batch that comes.

The Trainer needs an optimizer before the first batch is there, and the stages are made for the first batch. So there is a plain
optimizer first. It keeps the options, by which schedulers work, and a state that was loaded, until the workers have it. To
schedulers and checkpoints it stays a plain one, whose steps are done by the workers.
"""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pippy.drivers.base.errors import OptimizerError
from pippy.drivers.batch.items import call_of_items
from pippy.drivers.driver.driver_base import PipelineDriverBase
from pippy.drivers.driver.drivers import PipelineDriver
from pippy.drivers.engines.cluster import Cluster
from pippy.drivers.model.optimizers.grad_scaler import PipelineGradScaler
from pippy.drivers.model.optimizers.optimizer import PipelineOptimizer
from pippy.integrations.transformers.arguments import PipelineArguments, logger
from pippy.ir.base.errors import BalanceError, LossError, TracingError
from pippy.ir.base.trees import describe
from pippy.ir.loss.loss_function import LossWrapper
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
        except (TracingError, BalanceError) as error:
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


class OptimizerOfTrainer(Optimizer):
    """A plain optimizer over the parameters of this process, and, once there is a driver, that of the driver.

    Its state dict is that of the plain optimizer, with the state of the workers.
    """

    _is_accelerate_prepared = True  # or accelerate would wrap it
    step_was_skipped = False  # by a scaler, which found a gradient that is not finite
    scaler: PipelineGradScaler | None = None

    def __init__(self, plain: Optimizer, check: Callable[[], None]) -> None:
        if not isinstance(plain, Optimizer) or hasattr(plain, "train"):
            raise OptimizerError(
                f"a {type(plain).__name__} changes parameters outside of its step, which on workers it cannot; choose an "
                "optimizer of torch's: TrainingArguments(optim='adamw_torch')"
            )
        self.plain, self.check = plain, check  # which raises if the workers have no gradients of this update
        self.driver: PipelineDriverBase | None = None
        self.on_workers: PipelineOptimizer | None = None
        self._names: dict[int, str] = {}  # of parameters, by their numbers in the plain optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the plain optimizer."""
        return self.plain.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the plain optimizer."""
        return self.plain.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state in this process, which is empty while the workers have it."""
        return self.plain.state

    def __repr__(self) -> str:
        return f"<OptimizerOfTrainer: {self.on_workers or type(self.plain).__name__ + ', not on workers yet'}>"

    def bind(self, driver: PipelineDriverBase) -> None:
        """Make the optimizer on the workers of a driver, with the state that is here."""
        if self.driver is driver:
            return
        self.unbind()
        named = {id(parameter): name for name, parameter in driver.pipe.named_parameters()}
        every = [each for group in self.param_groups for each in group["params"]]
        self._names = {number: named[id(each)] for number, each in enumerate(every) if id(each) in named}
        groups = [
            {**group, "params": [each for each in group["params"] if id(each) in named]} for group in self.param_groups
        ]
        takes = inspect.signature(type(self.plain)).parameters
        options = {name: value for name, value in self.defaults.items() if name in takes}
        self.driver = driver
        self.on_workers = driver.instantiate_optimizer(type(self.plain), param_groups=groups, **options)
        self._send_state()

    def unbind(self) -> None:
        """Take the state back from the workers, before their driver is closed."""
        if self.on_workers is not None:
            state = self.state_dict()
            self.driver = self.on_workers = None
            self.plain.load_state_dict(state)

    def _send_state(self) -> None:
        """Give the workers the state that was loaded here."""
        assert self.on_workers is not None
        if self.plain.state:
            state = self.plain.state_dict()["state"]
            by_name = {self._names[number]: its for number, its in state.items() if number in self._names}
            self._set_options()
            self.on_workers.load_state_dict({"state": by_name, "param_groups": self.on_workers.named_groups()})
            self.plain.state.clear()

    def _set_options(self) -> None:
        assert self.on_workers is not None
        for its, own in zip(self.on_workers.param_groups, self.param_groups):
            its.update({name: value for name, value in own.items() if name != "params"})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters on the workers, and drop their gradients there."""
        self.check()
        assert self.on_workers is not None and self.driver is not None
        self._set_options()
        if self.scaler is None:
            self.on_workers.step(closure)
        else:
            scale = self.scaler.get_scale()
            self.scaler.step(self.on_workers)
            self.scaler.update()
            self.step_was_skipped = self.scaler.get_scale() < scale
        self.driver.zero_grad()
        self.plain._opt_called = True  # type: ignore[attr-defined]  # for a scheduler of the plain optimizer, which warns else

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients on the workers."""
        if self.driver is not None:
            self.driver.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The state dict of a plain optimizer, whose parameters have numbers."""
        state = self.plain.state_dict()
        if self.on_workers is not None:
            by_name = self.on_workers.state_dict()["state"]
            state["state"] = {number: by_name[name] for number, name in self._names.items() if name in by_name}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of a plain optimizer, or of this."""
        self.plain.load_state_dict(dict(state_dict))
        if self.on_workers is not None:
            self._send_state()
