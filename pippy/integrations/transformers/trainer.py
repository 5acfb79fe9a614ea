"""`PipelineTrainer`: the Trainer of transformers, whose model is on the workers of a pipeline.

The loop is the Trainer's own. These of its methods do their work on the workers:

    the Trainer calls                     here
    ───────────────────────────────────────────────────────────────────────────────────────────────────────
    create_optimizer                      a plain optimizer, whose steps the workers do      pipelined_model.py
    training_step, for each batch         waits for the last of an update; then all are one step of the pipeline
    accelerator.clip_grad_norm_           the norm of the gradients on the workers
    prediction_step                       the same stages, without gradients
    save_model, checkpoints               the parameters are fetched first; the files are the Trainer's
    loads of a model                      the parameters are sent afterwards
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from logging import WARNING
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pippy.drivers.base.errors import ClusterError, DriverError
from pippy.drivers.engines.cluster import Cluster, current_cluster
from pippy.drivers.engines.open_cluster import cluster as open_cluster
from pippy.integrations.transformers.arguments import (
    PipelineArguments,
    check_training_arguments,
    in_words_of_trainers,
    logger,
)
from pippy.integrations.transformers.pipelined_model import (
    ACCUMULATED,
    ITEMS,
    OptimizerOfTrainer,
    PipelinedModel,
    TracedLoss,
    labels_that_count,
    shifted_labels_that_count,
)
from pippy.ir.base.errors import PippyError
from pippy.ir.base.logs import is_muted
from pippy.ir.base.readable import brief

_RANDOM_STATE = "pippy_random_state.json"


class PipelineTrainer(Trainer):
    """A `transformers.Trainer` that trains its model on the workers of a pipeline, with the numbers of a plain one.

    Takes what a Trainer takes, and ``stages``, into how many the model is cut; or as ``pipeline`` all that is said of the
    pipeline, a `PipelineArguments`. The workers are those of ``cluster``, or of the cluster that is open, or new ones, which
    `close` ends. ``driver_options`` are further arguments of the driver, as messages may advise them.

    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
    >>> from pippy.integrations.transformers import PipelineTrainer
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=4, n_head=1, n_layer=2, n_positions=8))
    >>> data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
    >>> args = TrainingArguments(max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no")
    >>> trainer = PipelineTrainer(model, args, train_dataset=data, stages=2)
    >>> result = trainer.train()
    {'train_runtime': ...}
    >>> trainer.close()
    >>> result.global_step
    2
    """

    def __init__(
        self,
        *args: Any,
        stages: int | None = None,
        pipeline: PipelineArguments | None = None,
        cluster: Cluster | None = None,
        driver_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        training_arguments = args[1] if len(args) > 1 else kwargs.get("args")
        if training_arguments is not None:
            check_training_arguments(training_arguments)
        self.pipeline_arguments = _checked_pipeline(stages, pipeline)
        self._cluster = _open_cluster() if cluster is None else cluster
        self._own_cluster: Cluster | None = None
        self.pipeline_arguments.checked(None if self._cluster is None else len(self._cluster))
        self._driver_options = dict(driver_options or {})
        self._pipelined: PipelinedModel | None = None
        self._waiting: list[dict[str, Any]] = []  # batches that run with the last one of the update
        self._to_come = 0  # how many batches the update still has
        self._has_trained = False  # in the update that is under way
        self._random_state: dict[str, int] | None = None  # of a checkpoint, for the first step
        super().__init__(*args, **kwargs)
        if training_arguments is None:
            check_training_arguments(self.args)
        self.callback_handler.call_event = partial(self._call_event, self.callback_handler.call_event)  # type: ignore[method-assign]

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, which leaves the model of this process as it is."""
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp = False
        self.accelerator.scaler = torch.amp.GradScaler("cpu") if self.args.fp16 else None
        self.accelerator.clip_grad_norm_ = self._clip_grad_norm_of_workers

    def autocast_smart_context_manager(self, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        """The autocast that surrounds a step."""
        if not (self.args.bf16 or self.args.fp16):
            return nullcontext()
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16
        return torch.autocast(self._workers_of().device_type, dtype=dtype)

    # The model on the workers

    @property
    def driver(self) -> Any:
        """The driver, or None before the first batch."""
        return None if self._pipelined is None else self._pipelined.driver

    def _workers_of(self) -> Cluster:
        if self._cluster is None or self._cluster.closed:
            self._say("starting the workers")
            arguments = self.pipeline_arguments
            self._cluster = self._own_cluster = open_cluster(arguments.stages_on(1) * arguments.replicas)
        return self._cluster

    def _pipelined_for(self, batch: Mapping[str, Any], trains: bool = False) -> PipelinedModel:
        """The model on the workers; made if it is not there, or if the Trainer has another model now.

        Stages that were made for an evaluation, or another training, are made again if batches for training have other
        arguments.
        """
        there = self._pipelined
        if there is not None and (
            there.model is not self.model or (trains and not there.is_training and not there.takes(batch))
        ):
            self._drop()
        if self._pipelined is None:
            assert self.model is not None
            loss = TracedLoss(self.model, partial(type(self).compute_loss, self), self._counted())
            accumulated = self.args.gradient_accumulation_steps
            cluster, arguments = self._workers_of(), self.pipeline_arguments
            self._say(f"tracing {type(self.model).__name__}, and cutting it into stages")
            self._pipelined = PipelinedModel(loss, arguments, cluster, self._driver_options, batch, accumulated)
            self._say("running the first step")
            if self.args.fp16:
                self.accelerator.scaler = self._pipelined.scale(self.accelerator.scaler)
        if self._random_state is not None:
            self._pipelined.driver.random_state, self._random_state = self._random_state, None
        if isinstance(self.optimizer, OptimizerOfTrainer):
            self.optimizer.bind(self._pipelined.driver)
            self.optimizer.scaler = self._pipelined.scaler
        return self._pipelined

    def _say(self, text: str) -> None:
        """Say what goes on before the first step is done: beside the bars of the Trainer, or else to its log."""
        if self.args.disable_tqdm:
            logger.info("PipelineTrainer: %s", text)
        elif logger.isEnabledFor(WARNING) and not is_muted():
            tqdm.write(f"PipelineTrainer: {text}", file=sys.stderr)

    def _counted(self) -> Callable[..., Any] | None:
        """What smoothed labels are a mean over, where the Trainer does not divide by ``num_items_in_batch``."""
        if self.label_smoother is None or self.compute_loss_func is not None:
            return None
        model: Any = self.model
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        shifts = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        return shifted_labels_that_count if shifts else labels_that_count

    def _drop(self) -> None:
        """Take the model from the workers; the cluster goes on."""
        if self._pipelined is not None:
            if isinstance(self.optimizer, OptimizerOfTrainer):
                self.optimizer.unbind()
            if self._pipelined.scaler is not None:
                self.accelerator.scaler = torch.amp.GradScaler("cpu")
                self.accelerator.scaler.load_state_dict(self._pipelined.scaler.state_dict())
            self._pipelined.driver.close()
        self._pipelined = None
        self._waiting.clear()

    def update_model(self) -> nn.Module:
        """Copy the parameters from the workers into ``trainer.model``, and return it: in a callback, say.

        The Trainer's own calls, `train`, `save_model` and so on, do that by themselves.
        """
        if self._pipelined is not None and not self._pipelined.driver.stale.is_current:
            self._pipelined.fetch()
        assert self.model is not None
        return self.model

    def close(self) -> None:
        """End the workers that this trainer has started, with the trained parameters in ``trainer.model``.

        The trainer can be used on: it then starts others.
        """
        self.update_model()
        self._drop()
        if self._own_cluster is not None:
            self._own_cluster.close()
            self._cluster = self._own_cluster = None

    def end(self) -> None:
        """What a Trainer does at the end of a script, and `close`."""
        self.close()
        end = getattr(super(), "end", None)  # older versions have none
        if end is not None:
            end()

    @contextmanager
    def _changes_model(self) -> Iterator[None]:
        """Inside, the Trainer loads parameters into its model; they are sent to the workers afterwards."""
        self.update_model()
        yield
        if self._pipelined is not None:
            self._pipelined.send()

    # Training

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, as a Trainer does; afterwards ``trainer.model`` has the trained parameters."""
        try:
            result = super().train(*args, **kwargs)
        except BaseException:
            with suppress(PippyError):  # as of workers that are lost
                self._end_training()
            raise
        self._end_training()
        return result

    def _end_training(self) -> None:
        self._waiting.clear()
        self.update_model()
        if self._pipelined is not None:
            self._pipelined.is_training = False

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer that the arguments ask for, or that was given, on the workers."""
        if not isinstance(self.optimizer, OptimizerOfTrainer):
            self.optimizer = OptimizerOfTrainer(super().create_optimizer(*args, **kwargs), self._check_trained)
        if self._pipelined is not None and self._pipelined.model is self.model:
            self.optimizer.bind(self._pipelined.driver)
            self.optimizer.scaler = self._pipelined.scaler
            self._pipelined.driver.zero_grad()
        return self.optimizer

    def _check_trained(self) -> None:
        """Raise if the workers have no gradients for the update that comes."""
        if not self._has_trained:
            raise DriverError(
                f"training_step of {type(self).__name__} has trained nothing on the workers; have it call "
                "super().training_step(model, inputs, num_items_in_batch), and change the loss in compute_loss"
            )

    def _call_event(self, call_event: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the callbacks. The model that they are given is that of the workers, if they read it."""
        with nullcontext() if self.driver is None else self.driver.copied_when_read(), in_words_of_trainers():
            return call_event(*args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The batches of an update, as the Trainer reads them."""
        batches, items = super().get_batch_samples(*args, **kwargs)
        self._to_come, self._has_trained = len(batches), False
        return batches, items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run the batches of an update, when its last one comes, and return their loss. For the others return 0."""
        model.train()
        self._waiting.append(self._call(inputs, num_items_in_batch, self._accumulated()))
        self._to_come -= 1
        if self._to_come > 0:
            return torch.zeros((), device=self.args.device)
        batches, self._waiting = self._waiting, []
        with in_words_of_trainers(), self.compute_loss_context_manager():
            pipelined = self._pipelined_for(batches[0], trains=True)
            is_checked = pipelined.driver.checked is not None
            loss = pipelined.train(batches)
        if not is_checked and pipelined.driver.checked is not None:
            self._say(str(pipelined.driver.checked))
        self._has_trained = True
        return loss.to(self.args.device)

    def _accumulated(self) -> int:
        """How many batches the update has that is computed now."""
        return int(getattr(self, "current_gradient_accumulation_steps", 1))

    def _call(self, inputs: Any, items: Any, accumulated: int) -> dict[str, Any]:
        """The arguments of `TracedLoss` for a batch."""
        call = dict(self._prepare_inputs(inputs))
        if items is not None:
            call[ITEMS] = torch.as_tensor(items)
        if not self._loss_is_scaled(items):
            call[ACCUMULATED] = accumulated
        return call

    def _loss_is_scaled(self, items: Any) -> bool:
        """Whether the loss is divided by what all batches of an update hold."""
        said = getattr(self, "loss_is_scaled_for_ga", None)
        if said is not None:
            return bool(said)
        return (self.model_accepts_loss_kwargs and items is not None) or self.compute_loss_func is not None

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        """Of a Trainer that clips gradients: whether some are of other device meshes than others. All are on the workers."""
        return False

    def _clip_grad_norm_of_workers(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """In the place of the accelerator's: clips the gradients on the workers, and gives their norm."""
        self._check_trained()
        if max_norm == float("inf"):
            return self.driver.grad_norm(norm_type)
        return self.driver.clip_grad_norm_(max_norm, norm_type)

    # Evaluation

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """Evaluate a batch on the workers, or, if they cannot take it, in this process: one without labels, say."""

        def here(**arguments: Any) -> Any:
            return self._model_here()(**arguments)

        self.compute_loss = partial(self._loss_of_workers, not prediction_loss_only)  # type: ignore[method-assign]
        try:
            stand_in: Any = here
            with in_words_of_trainers():
                return super().prediction_step(stand_in, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        finally:
            del self.compute_loss

    def _loss_of_workers(
        self, with_outputs: bool, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """In the place of `compute_loss` while a batch is evaluated."""
        call = self._call(inputs, num_items_in_batch, 1)
        pipelined = self._pipelined_for(call)
        if not pipelined.takes(call):
            return type(self).compute_loss(self, self._model_here(), inputs, return_outputs, num_items_in_batch)
        loss, outputs = pipelined.evaluate(call, with_outputs)
        loss = loss.to(self.args.device)
        return (loss, outputs) if return_outputs else loss

    def _model_here(self) -> nn.Module:
        """The model of this process, with the parameters of the workers, for a batch that they cannot take."""
        logger.warning_once(
            "PipelineTrainer: batches with other arguments than those that the stages were made for are computed by the model "
            "in this process, and not by the workers"
        )
        return self.update_model()

    # Checkpoints

    def _save(self, *args: Any, **kwargs: Any) -> None:
        self.update_model()
        super()._save(*args, **kwargs)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._changes_model():
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_best_model(self) -> None:
        with self._changes_model():
            super()._load_best_model()

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.driver is not None:
            with open(os.path.join(output_dir, _RANDOM_STATE), "w") as file:
                json.dump(self.driver.random_state, file)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        path = os.path.join(checkpoint or "", _RANDOM_STATE)
        if checkpoint is not None and os.path.isfile(path):
            with open(path) as file:
                self._random_state = json.load(file)


def _checked_pipeline(stages: Any, pipeline: Any) -> PipelineArguments:
    if pipeline is None:
        return PipelineArguments(stages=stages)
    if not isinstance(pipeline, PipelineArguments):
        raise DriverError(f"pipeline={brief(pipeline)}: give a PipelineArguments, as in PipelineArguments(stages=4)")
    if stages is not None:
        raise DriverError(
            f"stages={brief(stages)} and pipeline= are both given; say PipelineArguments(stages={brief(stages)})"
        )
    return pipeline


def _open_cluster() -> Cluster | None:
    """The cluster that is open, if one is."""
    try:
        return current_cluster()
    except ClusterError:
        return None
