"""A model whose stages are on the workers: its parameters, gradients, optimizers and checkpoints."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import nn

from pippy.drivers.base.errors import DriverError, OptimizerError
from pippy.drivers.base.interrupts import first_waits
from pippy.drivers.engines.cluster import Cluster
from pippy.drivers.model.optimizers.grad_scaler import PipelineGradScaler
from pippy.drivers.model.optimizers.optimizer import PipelineOptimizer, with_groups
from pippy.drivers.model.optimizers.stale_models import CopiedWhenRead, StaleModels
from pippy.drivers.model.recovery.recovery import Recovery
from pippy.drivers.model.state.filling import Filling
from pippy.drivers.model.state.loading import LoadedValues, Loading
from pippy.drivers.model.state.saving import Saving
from pippy.drivers.placement.placed_pipe import PlacedPipe
from pippy.drivers.protocol.state import (
    ChangeGradients,
    FetchGradients,
    GiveState,
    RestoreState,
    WorkerState,
)
from pippy.drivers.session.driver_commands import DriverCommands, GradientState, checked_numbers, in_turn
from pippy.ir.base.compiling import original_of
from pippy.ir.base.names import LOSS, named_state
from pippy.ir.base.public_calls import placing_words, refuse_words
from pippy.ir.base.readable import brief, near_names
from pippy.ir.loss.loss_function import LossWrapper
from pippy.ir.pipe import Pipe, compiled_of, model_of, models_of
from pippy.ir.record.model_watch import ModelWatch


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or (
        one.shape == other.shape and torch.allclose(one, other, 0.0, 0.0, equal_nan=True)
    )


def _check_limit(name: str, given: Any) -> None:
    """Raise unless this is a number that gradients can be clipped to."""
    is_number = given.numel() == 1 if isinstance(given, torch.Tensor) else isinstance(given, Real)
    if not is_number or isinstance(given, bool):
        raise DriverError(f"{name}={brief(given)}: give a number, as in {name}=1.0")


@placing_words(
    methods={
        "instantiate_optimizer": "driver.instantiate_optimizer(torch.optim.AdamW)",
        "clip_grad_norm_": "driver.clip_grad_norm_(max_norm)",
        "save": "driver.save(folder)",
    },
    owner="driver",
)
class ModelOnWorkers:
    """The methods that drivers have for the state of their model; `PipelineDriverBase` adds the steps."""

    def __init__(
        self, pipe: Pipe, placed: PlacedPipe, commands: DriverCommands, cluster: Cluster, watch: ModelWatch
    ) -> None:
        self.pipe, self.compiled_pipe = pipe, compiled_of(pipe)
        self.placed, self.commands, self.cluster = placed, commands, cluster
        self.stale, self.watch = StaleModels(pipe), watch
        self.filling = Filling(pipe, placed, commands)
        self.loading = Loading(pipe, placed, commands, self.stale, self.filling)
        self._optimizers: list[PipelineOptimizer] = []
        self._grad_scalers: list[PipelineGradScaler] = []
        own = pipe, placed, commands, cluster, self.filling
        self.recovery = Recovery(*own, self.loading, self._optimizers, self._grad_scalers)
        self.saving = Saving(*own, self.recovery.saving)

    @property
    def _grad_scaler(self) -> PipelineGradScaler | None:
        return self.recovery.scaler

    @property
    def random_state(self) -> dict[str, int] | None:
        """Which step of which run the random numbers of the next step are of: a seed, and how many steps there were.

        A driver of any split goes on with it where another one was: it can be saved, and set. Steps that train are counted
        by themselves. None if the driver was made with ``keyed_random=False``. See docs/running.md.

        >>> from pippy import Pipe, PipelineDriver1F1B, local_cluster
        >>> pipe = Pipe.from_sequential(torch.nn.Sequential(torch.nn.Dropout(), torch.nn.ReLU()))
        >>> with local_cluster(2, threads=1) as cluster:
        ...     driver = PipelineDriver1F1B(pipe, cluster, keyed_random=7)
        ...     one = driver.run(2, torch.ones(64, 2))
        ...     print(driver.random_state)
        ...     driver.random_state = {"seed": 7, "steps": 0, "evaluations": 0}
        ...     print(torch.equal(driver.run(2, torch.ones(64, 2)), one))
        {'seed': 7, 'steps': 0, 'evaluations': 1}
        True
        """
        self.commands.wait()
        return None if self.commands.numbers is None else self.commands.numbers.state()

    @random_state.setter
    def random_state(self, state: Mapping[str, int] | None) -> None:
        self.commands.wait()
        self.commands.go_on_at(checked_numbers(state, self.commands.numbers))
        self.recovery.begin_at()

    # Gradients

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.commands.zero_grad()

    def reduce_gradients(self) -> None:
        """Add up the gradients of replicated parameters, if that was not done; whatever reads gradients does it first."""
        if self.commands.known.state is GradientState.UNREDUCED:
            self._change_gradients()

    def get_grad(self, name: str) -> torch.Tensor | None:
        """The gradient of the parameter that the user calls ``name``, fetched from its worker."""
        return self.gradients([name])[name]

    def gradients(self, names: Sequence[str] | None = None) -> dict[str, torch.Tensor | None]:
        """The gradients of all parameters, or of some, by the user's names.

        They are copies: after an edit of them, an update is refused, and to ask again. To change gradients on the workers, call
        `clip_grad_norm_` or `clip_grad_value_`, or put hooks on the parameters (``register_hook``).
        """
        wanted = self._names() if names is None else names
        self.commands.check_not_edited()  # or else these would not be those of the script
        self.reduce_gradients()
        found = self._fetch(wanted, gradients=True)
        self.commands.fetched += [(each, each._version) for each in found.values() if each is not None]
        return found

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their norm, taken over the whole model, is at most ``max_norm``; gives the norm.

        As `torch.nn.utils.clip_grad_norm_` for the whole model; a replicated parameter counts once.
        """
        _check_limit("max_norm", max_norm)
        self.commands.check_not_edited()
        total = self.grad_norm(norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise DriverError(
                f"the norm of the gradients is {total.item()}; pass error_if_nonfinite=False to clip anyway"
            )
        factor = float(torch.clamp(max_norm / (total + 1e-6), max=1.0))  # min() would take 1.0 for a norm that is NaN
        with first_waits():  # or some workers might have scaled theirs, and others not
            self._change_gradients(factor=factor)
        return total

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every element of all gradients between -clip_value and ``clip_value``: `torch.nn.utils.clip_grad_value_`."""
        _check_limit("clip_value", clip_value)
        self.commands.check_not_edited()
        self.commands.wait()
        with first_waits():
            self._change_gradients(limit=float(clip_value))

    def _change_gradients(self, **change: float) -> None:
        """Add up the gradients of copies, if that was not done, and change all."""
        workers = self.commands.workers
        self.commands.call_reducing(lambda reduce: dict.fromkeys(workers, ChangeGradients(reduce, **change)))

    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of all gradients together."""
        names = self._names()
        by_worker = self.placed.first_locations(names, owned=True)
        locations = {worker: tuple(by_worker.get(worker, {}).values()) for worker in self.commands.workers}
        answers = self.commands.call_reducing(
            lambda reduce: {worker: FetchGradients(places, norm_type, reduce) for worker, places in locations.items()}
        )
        norms: dict[str, Any] = {}
        for worker, values in answers.items():
            norms.update(zip(by_worker.get(worker, {}), values))
        there = [norms[name] for name in names if norms.get(name) is not None]
        return torch.linalg.vector_norm(torch.stack(there), norm_type) if there else torch.tensor(0.0)

    def _names(self) -> list[str]:
        return [name for name, _ in self.pipe.named_parameters()]

    # Parameters

    def initialize(self, function: Callable[[torch.nn.Module], Any] | None = None, *, seed: int | None = None) -> None:
        """Have each worker make the parameters and buffers of its stages, of a model that is on the meta device.

        As when the model is made elsewhere: the ``reset_parameters`` of each module is called, and then ``function`` with each
        module, as by ``model.apply(function)``; in a model of Hugging Face, that is its ``_init_weights`` if it is left out.
        What becomes of a parameter depends on ``seed``, by default that of `torch.manual_seed`, as for a model that is made in
        this process (and not that of ``keyed_random=``), and on its name, and not on how the model is cut or on how many
        workers there are. See docs/large_models.md.

        >>> from pippy import Pipe, PipelineDriver1F1B, local_cluster
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> with local_cluster(2, threads=1) as cluster:
        ...     driver = PipelineDriver1F1B(Pipe.from_sequential(model), cluster)
        ...     driver.initialize(seed=0)
        ...     print(driver.run(2, torch.ones(4, 2)).shape)
        torch.Size([4, 1])
        """
        self.filling.initialize(function, seed)

    def state_dict(self) -> dict[str, Any]:
        """The model's state dict, with the parameters and buffers as they are on the workers."""
        self.filling.check("state_dict()")
        state = self.pipe.state_dict()
        state.update(self._fetch(self._on_workers(state)))
        for name in [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]:
            del state[name]  # no stage uses it, so nobody has given it numbers
        return state

    def copy_to(self, model: torch.nn.Module) -> None:
        """Copy the parameters and buffers on the workers into a model of this process: the user's own, or one with its names.

        The driver trains copies of them, and the model in this process stays as it was. Nothing is copied if the names or
        shapes differ.

        >>> from pippy import Pipe, PipelineDriver1F1B, cluster
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> with cluster(2, threads=1) as workers:
        ...     driver = PipelineDriver1F1B(Pipe.from_sequential(model, torch.nn.MSELoss()), workers)
        ...     optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
        ...     loss = driver.run(2, torch.ones(4, 2), torch.ones(4, 1))
        ...     optimizer.step()
        ...     driver.copy_to(model)
        ...     print(torch.equal(model[0].weight, driver.state_dict()["0.weight"]))
        True
        """
        self.filling.check("copy_to()")
        model = self._with_loss(original_of(model))
        names = list(self.placed.compiled.qualnames.canonical)
        pipe_tensors, model_tensors = dict(named_state(self.pipe)), dict(named_state(model))
        differ = sorted(
            name for name in names if name not in model_tensors or model_tensors[name].shape != pipe_tensors[name].shape
        )
        differ += sorted(name for name in model_tensors if name not in pipe_tensors)
        if differ:
            raise DriverError(
                f"copy_to was given a {type(model).__name__} whose parameters and buffers are not those of the model, and "
                f"nothing was copied; they differ in {', '.join(differ[:8])}"
            )
        if any(model_tensors[name].is_meta for name in names):
            raise DriverError(
                "copy_to was given a model on the meta device, which cannot hold numbers; give one that was made on another "
                "device, or save driver.state_dict()"
            )
        values = {**pipe_tensors, **self._fetch([name for name in names if self.placed.locations(name)])}
        if all(model_tensors[name] is pipe_tensors[name] for name in names):
            self.stale.end()  # before what follows, which is no read of old numbers
        with torch.no_grad():
            for name in names:
                if not values[name].is_meta:  # else no stage uses it, so nobody has given it numbers
                    if model_tensors[name].shape != values[name].shape:  # forward has resized it, as observers do
                        model_tensors[name].resize_(values[name].shape)
                    model_tensors[name].copy_(values[name])
        self.watch.note_numbers(model_tensors[name] for name in names)

    def copied_when_read(self) -> AbstractContextManager[None]:
        """A context for a callback of a training loop: if it reads the model of this process, the workers' numbers are copied
        there first.

        >>> from pippy import Pipe, PipelineDriver1F1B, cluster
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> with cluster(2, threads=1) as workers:
        ...     driver = PipelineDriver1F1B(Pipe.from_sequential(model, torch.nn.MSELoss()), workers)
        ...     optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
        ...     loss = driver.run(2, torch.ones(4, 2), torch.ones(4, 1))
        ...     optimizer.step()
        ...     with driver.copied_when_read():
        ...         average = torch.zeros(2, 2).lerp(model[0].weight, 0.1)
        ...     print(torch.equal(model[0].weight, driver.state_dict()["0.weight"]))
        True
        """
        model = model_of(self.pipe)
        if model is None or self.stale.is_current:
            return nullcontext()
        return CopiedWhenRead(self.stale, model, partial(self.copy_to, model))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a state dict, in the model's names, into the Pipe and into all workers."""
        self.commands.wait()
        with first_waits():  # or some workers might have the state, and others not
            loaded = self.pipe.load_state_dict(state_dict, strict)
            values = {name: state_dict[name].detach().cpu() for name in self._on_workers(state_dict)}
            stores = self.placed.for_all_copies(values)
            self.commands.call({worker: RestoreState(WorkerState(tensors)) for worker, tensors in stores.items()})
            self.filling.filled(values)
            here = dict(named_state(self.pipe))
            self.watch.note_numbers(here[name] for name in state_dict if name in here)
            if not loaded.missing_keys:
                self.stale.end()
        return loaded

    def _fetch(self, names: Iterable[str], gradients: bool = False) -> dict[str, Any]:
        """Parameters and buffers, or their gradients. None for one that no stage uses."""
        wanted = list(names)
        by_worker = self.placed.first_locations(wanted, owned=gradients)
        by_name: dict[str, Any] = dict.fromkeys(wanted)
        kind = FetchGradients if gradients else GiveState
        bodies = {worker: kind(tuple(locations.values())) for worker, locations in by_worker.items()}
        for worker, answer in self.commands.call(bodies).items():
            locations = by_worker[worker]
            by_name.update(
                zip(locations, answer) if gradients else {name: answer.tensors[locations[name]] for name in locations}
            )
        return by_name

    def _check_written(self) -> None:
        """Raise if the script has written numbers into its model that are not those on the workers."""
        written = [name for name in self.watch.written() if self.placed.locations(name)]
        here = {name: each for name, each in named_state(self.pipe) if name in written and not each.is_meta}
        there = self._fetch(here) if here else {}
        other = [name for name, each in here.items() if not _are_equal(each.detach().cpu(), there[name])]
        if other:
            get = "get_parameter" if isinstance(here[other[0]], nn.Parameter) else "get_buffer"
            raise DriverError(
                f"{', '.join(map(repr, other[:6]))}{' and others' * (len(other) > 6)} of the model in this process was "
                "written, and the workers have other numbers. What to do: to have those of this process, call "
                f"driver.load_state_dict({{{other[0]!r}: model.{get}({other[0]!r})}}, strict=False); to have those of the "
                "workers, driver.copy_to(model)"
            )

    def _with_loss(self, model: nn.Module) -> nn.Module:
        """The `LossWrapper` that a model of the Pipe's is in: the names are those of the wrapper."""
        wrappers = [each for each in models_of(self.pipe) if isinstance(each, LossWrapper)]
        return next((each for each in wrappers if each.module is model), model)

    def _on_workers(self, state: Mapping[str, Any]) -> list[str]:
        """The names of the tensors in a state dict that some stage uses."""
        known = self.placed.compiled.qualnames.canonical
        return [
            name
            for name, value in state.items()
            if isinstance(value, torch.Tensor)
            and (name in known or name.startswith(f"{LOSS}."))
            and self.placed.locations(name)
        ]

    @in_turn
    def save(
        self, folder: str | os.PathLike[str], /, *, wait: bool = True, keep: int | None = None, **given: Any
    ) -> str:
        """Write a checkpoint: the parameters and buffers on the workers, and what is given by name. Gives its path.

        Given may be optimizers of this driver, anything with a ``state_dict()``, and plain values; ``step=10`` also names the
        checkpoint. Each worker writes what it holds, as safetensors files. The checkpoint is put into ``folder`` whole, beside
        those that are there; with ``keep=3`` the three newest are left. With ``wait=False`` the workers copy what they hold and
        write while the run goes on. Random states are included, gradients are not. See docs/checkpoints.md.

        >>> import tempfile
        >>> from pippy import Pipe, PipelineDriver1F1B, local_cluster
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> with tempfile.TemporaryDirectory() as folder, local_cluster(2, threads=1) as cluster:
        ...     driver = PipelineDriver1F1B(Pipe.from_sequential(model, torch.nn.MSELoss()), cluster)
        ...     optimizer = driver.instantiate_optimizer(torch.optim.Adam, lr=0.1)
        ...     loss = driver.run(2, torch.ones(4, 2), torch.ones(4, 1))
        ...     optimizer.step()
        ...     path = driver.save(folder, optimizer=optimizer, step=1)
        ...     values = driver.load(folder, optimizer=optimizer)
        ...     print(os.path.basename(path), values)
        step-1 {'step': 1}
        """
        misspelt = {word: value for word, value in given.items() if near_names(word, ("wait", "keep"), cutoff=0.8)}
        refuse_words("driver.save", misspelt, ("wait", "keep"))
        return self.saving.save(folder, wait, keep, given)

    @in_turn
    def load(self, path: str | os.PathLike[str], /, *, strict: bool = True, **given: Any) -> LoadedValues:
        """Read what `save` has written, by this driver or another, into the workers and into what is given by name.

        Gives the plain values that were saved, as a dict. ``path`` is a checkpoint, or the folder of a run, for its newest; or
        a folder of safetensors files as Hugging Face has them. Each worker reads its part. If something does not fit, nothing
        is changed. With ``strict=False``, parameters and buffers that only the model or only the checkpoint has are left alone,
        as by `load_state_dict`; ``missing_keys`` and ``unexpected_keys`` of the result have their names.
        Without optimizers and the like only the parameters and buffers are read; with them the random states are, too, and
        something that was saved and is to be left must be said so: ``scheduler=None``, ``random_state=None``. Gradients are
        dropped.
        """
        self.saving.finish()
        loaded = self.loading.load(path, strict, given)
        self.recovery.loaded(self.loading.path, given, whole=not loaded.missing_keys)
        return loaded

    @in_turn
    def protect(self, **given: Any) -> None:
        """Make a point in the memory of the workers, from which `recover` goes on: as `save`, but without a disk.

        Each worker copies what it holds, all optimizers of the driver included, and sends the copy to a neighbour; so one lost
        worker loses nothing. That takes memory for two copies, and for two more while the next point is made. Given by name
        are objects with a ``state_dict()``, and plain values, as for `save`. See docs/checkpoints.md.

        >>> from pippy import Pipe, PipelineDriver1F1B, local_cluster
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> with local_cluster(2, threads=1) as cluster:
        ...     driver = PipelineDriver1F1B(Pipe.from_sequential(model, torch.nn.MSELoss()), cluster)
        ...     driver.protect(step=3)
        ...     print(driver.recover())
        {'step': 3}
        """
        self.recovery.protect(*self.saving.kept_values(given))

    def instantiate_optimizer(self, optimizer_class: type, *args: Any, **kwargs: Any) -> PipelineOptimizer:
        """An optimizer of torch's, on all workers, for the parameters where they are.

        Takes what the class takes, with or without ``model.parameters()`` before it. Groups are given as torch's are, or as
        ``param_groups=[{"params": names, ...}]``, with names, patterns as for a shell, or parameters of the model, or with
        ``"params": ...`` for all that no other group names. As in torch, it leaves alone what is in no group, so that a driver
        may have several optimizers. Without groups, it has all parameters. With ``master_dtype=torch.float32`` it updates
        float32 copies of the parameters that have 16 bits. With ``divide_state=True`` each replica of the pipeline has a part
        of the state. See docs/replicas.md.
        """
        if self.compiled_pipe.loss is None:
            raise OptimizerError(
                "the Pipe has no loss, so there will be no gradients for an optimizer; give pipeline() a loss_fn. "
                "If the model returns its loss, give pipeline() an example in which it does so, for instance with "
                "labels"
            )
        parameters, number = dict(self.pipe.named_parameters()), len(self._optimizers) + 1
        given = with_groups(args, kwargs)
        optimizer = PipelineOptimizer(
            parameters, self.placed, self.commands, self.stale, number, optimizer_class, *given
        )
        self._optimizers.append(optimizer)
        return optimizer

    def instantiate_grad_scaler(self, **options: Any) -> PipelineGradScaler:
        """A `torch.amp.GradScaler` for this driver: from now on, `run` scales the loss on the workers and unscales there.

        Takes what torch's takes after the device. Its `unscale_`, `step`, `update` and states are those of torch's; `scale`
        and `backward` are left out.
        """
        if self.compiled_pipe.loss is None:
            raise DriverError(
                "a GradScaler needs a loss to scale, and the Pipe has none; give one: pipeline(model, loss_fn)"
            )
        self._grad_scalers.append(PipelineGradScaler(self.commands, self._grad_scalers, **options))
        return self._grad_scalers[-1]

    def close(self) -> None:
        """Drop the stages, programs and optimizers from the workers; the cluster goes on."""
        try:
            self.saving.finish()
        finally:
            self.stale.end()
            self.commands.close()
