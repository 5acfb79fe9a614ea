"""`driver.check`: the same step on the workers and by the plain model, compared.

workers     their state is set aside; a step; its gradients and buffers; an update; the state is put back
here        the plain model, with the workers' numbers: the step, and once more with other rounding
compared    if there are differences, the workers do the step again and note what each call takes and gives
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pippy.drivers.base.errors import DriverError, MicrobatchError
from pippy.drivers.base.interrupts import first_waits
from pippy.drivers.batch.division import Division
from pippy.drivers.compare.tolerance import floor_of
from pippy.drivers.driver.check.comparisons import computing_dtypes, floor_between
from pippy.drivers.driver.check.differences import Apart, ComparedKey, Comparison, Difference
from pippy.drivers.driver.check.origin import Origin, OriginSearch, by_place
from pippy.drivers.driver.check.report import CheckReport, stage_of_call, with_stages
from pippy.drivers.driver.check.rows import WholeRows
from pippy.drivers.driver.check.witness import HowWitnessed, Witness, named_outputs
from pippy.drivers.driver.steps.results import LossAndOutputs
from pippy.drivers.model.model_on_workers import ModelOnWorkers
from pippy.drivers.model.optimizers.optimizer import PipelineOptimizer
from pippy.drivers.model.recovery.points import ControllerState
from pippy.drivers.placement.replicas import RunningStatistics
from pippy.drivers.protocol.state import GiveState, HoldState, TensorLocation
from pippy.drivers.protocol.steps import SeenCall
from pippy.drivers.session.driver_commands import DriverCommands
from pippy.drivers.worker.gradients.worker_optimizer import MASTER
from pippy.ir.base.names import LOSS, first_names, named_state
from pippy.ir.base.readable import brief
from pippy.ir.base.trees import tensors
from pippy.ir.pipe import loss_of, model_of
from pippy.ir.record.compiled import Compiled
from pippy.ir.run.random_state import untouched_random_state


@dataclass(frozen=True)
class StepAside:
    """A step that was undone: its result, the weights of its losses, and what its calls took and gave."""

    result: Any
    weights: Sequence[float]
    seen: Sequence[SeenCall]


# Runs a step of a driver that is undone: with outputs or not, and what its calls take and give noted or not.
RunAside = Callable[[bool, bool], StepAside]


class PlainOptimizer:
    """The step of a driver's optimizer as plain torch does it, for the plain model: a copy of a `PipelineOptimizer` as it is
    now. Its state is fetched from the workers."""

    def __init__(self, optimizer: PipelineOptimizer) -> None:
        self.factory, self.master_dtype = optimizer.factory, optimizer.master_dtype
        state = optimizer.state_dict()
        self.groups: list[dict[str, Any]] = copy.deepcopy(state["param_groups"])
        self.state: Mapping[str, Mapping[str, Any]] = state["state"]
        self.names = [name for group in self.groups for name in group["params"]]

    def step(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Update the parameters by their gradients, once; the state stays as it is."""
        updated = {name: self._master(name, parameters[name]) for name in self.names}
        optimizer = self.factory(
            [{**group, "params": [updated[name] for name in group["params"]]} for group in self.groups]
        )
        for name in self.names:
            state = {key: copy.deepcopy(value) for key, value in self.state.get(name, {}).items() if key != MASTER}
            if state:
                device = parameters[name].device
                optimizer.state[updated[name]] = {
                    key: value.to(device) if isinstance(value, torch.Tensor) and key != "step" else value
                    for key, value in state.items()
                }
        optimizer.step()
        with torch.no_grad():
            for name in self.names:
                if updated[name] is not parameters[name] and updated[name].grad is not None:
                    parameters[name].copy_(updated[name])

    def _master(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor that torch's optimizer updates for a parameter: the parameter, or a copy of it with more bits."""
        dtype = self.master_dtype
        if dtype is None or not parameter.is_floating_point() or parameter.dtype == dtype:
            return parameter
        master = self.state.get(name, {}).get(MASTER, parameter).detach().to(parameter.device, dtype, copy=True)
        master.requires_grad_()
        master.grad = None if parameter.grad is None else parameter.grad.to(dtype)
        return master


class StepCheck:
    """Compares a step of a driver with a step of the plain model. All rows of ``division`` are in this process."""

    def __init__(
        self, driver: ModelOnWorkers, model: nn.Module, division: Division, trains: bool, run: RunAside
    ) -> None:
        self.driver, self.division, self.trains, self.run = driver, division, trains, run
        self.compiled, self.placed, self.model = driver.compiled_pipe, driver.placed, model
        self.left_out: list[str] = []
        norms = {name for name, each in self.model.named_modules() if isinstance(each, _BatchNorm) and each.training}
        if norms and trains:
            self.left_out.append(
                "statistics of batch norms: in a check they normalize by their running statistics, because "
                "micro-batches have statistics of their own"
            )
        self.uncompared = {
            f"{name}.{buffer}".lstrip(".")
            for name in norms
            for buffer, _ in self.model.get_submodule(name).named_buffers()
        }
        self.names = [name for name in first_names(driver.pipe).values() if self.placed.locations(name)]
        self.parameters = [name for name, _ in driver.pipe.named_parameters() if self.placed.locations(name)]

    def report(self) -> CheckReport:
        """Run both steps, and compare them."""
        before = self.driver._fetch(self.names)
        optimizers = [PlainOptimizer(each) for each in self.driver._optimizers] if self.trains else []
        if self.trains and not optimizers:
            self.left_out.append("parameters after an update, as the driver has no optimizer")
        plain = Witness(
            self.model, loss_of(self.driver.pipe) or self.compiled.loss_module, self.compiled, lambda: before
        )
        rows, how = WholeRows(self.division), HowWitnessed(self.trains, whole=True)
        with plain.with_numbers_of_workers():
            wanted = plain.step(rows.divided(1), how).numbers
            again = plain.rounded_otherwise(rows, how, wanted)
        try:
            numbers, weights, stale = self._on_workers(optimizers, outputs=True)
        except MicrobatchError as error:  # outputs that need a spec
            self.left_out.append(f"outputs, since {error}")
            wanted = {key: each for key, each in wanted.items() if key[0] != "output"}
            numbers, weights, stale = self._on_workers(optimizers, outputs=False)
        wanted = {key: each for key, each in wanted.items() if self._is_compared(key)}
        device = self.driver.cluster.device_type
        floor = floor_between(computing_dtypes(self.compiled, self.division, device), device, plain)
        comparison = Comparison(wanted, again, floor)
        if optimizers:
            comparison = self._with_updates(comparison, optimizers, before, numbers)
        differences = [*stale, *with_stages(self.placed, comparison.differences(numbers))]
        origin = self._origin(differences, weights, before, comparison.floor) if differences else None
        return CheckReport(
            self.division.chunks,
            tuple(differences),
            origin,
            Counter(kind for kind, _ in comparison.plain),
            comparison.largest(numbers),
            comparison.largest(again),
            tuple(self.left_out),
            RunningStatistics(self.compiled, 1).told(self.division.chunks) if self.trains else "",
        )

    def _on_workers(
        self, optimizers: Sequence[PlainOptimizer], outputs: bool
    ) -> tuple[dict[ComparedKey, Any], Sequence[float], list[Difference]]:
        """Run the step and an update on the workers, and undo them: the numbers, the weights of the losses, and copies of
        parameters that differ from the first."""
        with aside(self.driver.commands, self.driver._optimizers):
            step = self.run(outputs, False)
            numbers, stale = self._numbers(step.result), self._stale_copies()
            if optimizers:
                for each in self.driver._optimizers:
                    each.update_parameters()
                stale = stale or self._stale_copies()
                names = {name for each in optimizers for name in each.names}
                after = self.driver._fetch(name for name in self.parameters if name in names)
                numbers |= {("parameter", name): value for name, value in after.items()}
        return numbers, step.weights, stale

    def _numbers(self, result: Any) -> dict[ComparedKey, Any]:
        """The tensors of a step to compare: what it returned, and the gradients and buffers that it left."""
        numbers = result_numbers(result)
        if self.trains:
            gradients = self.driver.gradients(self.parameters)
            numbers |= {("gradient", name): each for name, each in gradients.items()}
        known = {*self.parameters, *self.uncompared}
        buffers = self.driver._fetch(name for name in self.names if name not in known)
        return numbers | {("buffer", name): each for name, each in buffers.items()}

    def _is_compared(self, key: ComparedKey) -> bool:
        kind, name = key
        return kind in ("loss", "output") or (name in self.names and name not in self.uncompared)

    def _with_updates(
        self,
        comparison: Comparison,
        optimizers: Sequence[PlainOptimizer],
        before: Mapping[str, torch.Tensor],
        numbers: Mapping[ComparedKey, Any],
    ) -> Comparison:
        """Add the parameters after an update. Both sides update by the workers' gradients, which are compared already."""
        own = dict(self.driver.pipe.named_parameters())
        parameters = {name: _alike(own[name], before[name], numbers["gradient", name]) for name in self.parameters}
        for optimizer in optimizers:
            optimizer.step(parameters)
        names = dict.fromkeys(name for each in optimizers for name in each.names)
        updated = {name: parameters[name].detach() for name in names if name in parameters}
        return replace(
            comparison,
            plain={**comparison.plain, **{("parameter", name): value for name, value in updated.items()}},
            known={("parameter", name): _of_update(before[name], value) for name, value in updated.items()},
        )

    def _stale_copies(self) -> list[Difference]:
        """The copies of parameters and buffers on the workers that differ from the first copy."""
        places = {name: self.placed.locations(name) for name in self.names}
        several = {name: locations for name, locations in places.items() if len(locations) > 1}
        wanted: dict[int, list[TensorLocation]] = {}
        for worker, place in [each for locations in several.values() for each in locations]:
            wanted.setdefault(worker, []).append(place)
        bodies = {worker: GiveState(tuple(locations)) for worker, locations in wanted.items()}
        answers = self.driver.commands.call(bodies) if bodies else {}
        held = {(worker, place): value for worker in wanted for place, value in answers[worker].tensors.items()}
        return [
            Difference(
                "parameter",
                name,
                off,
                0.0,
                stage_of_call(self.placed, place.call),
                f"the copy on {self._worker(worker)}",
            )
            for name, (first, *others) in several.items()
            for worker, place in others
            if (off := Apart.of(held[first], held[worker, place]).share)
        ]

    def _worker(self, worker: int) -> str:
        return self.driver.cluster.workers[worker]

    def _origin(
        self,
        differences: Sequence[Difference],
        weights: Sequence[float],
        before: Mapping[str, torch.Tensor],
        floor: float,
    ) -> Origin:
        """Where the differences begin, and on which workers."""
        origin = None
        if any(each.kind != "parameter" for each in differences) and self.division.slices == 1:
            with aside(self.driver.commands, self.driver._optimizers):
                seen = self.run(False, True).seen
            with untouched_random_state():
                origin = OriginSearch(self.driver.pipe, self.division, weights, seen, before, floor).find()
        origin = origin or by_place(differences)
        workers = self.placed.workers_of(origin.stage) if origin.stage in self.placed.nodes else ()
        return replace(origin, workers=tuple(map(self._worker, workers)))


@contextmanager
def aside(commands: DriverCommands, optimizers: Sequence[PipelineOptimizer]) -> Iterator[None]:
    """A context for steps and updates. It begins without gradients; at its end the driver is as before."""
    commands.call(dict.fromkeys(commands.workers, HoldState()))
    before = ControllerState.current(commands, optimizers, None)
    commands.set_aside()
    try:
        yield
    except BaseException as error:
        commands.session.give_up(error)
        raise
    finally:
        with first_waits():  # or some workers would have theirs again, and others not
            try:
                if not commands.session.broken:  # else `recover` goes back
                    commands.call(dict.fromkeys(commands.workers, HoldState(put_back=True)))
            finally:
                before.put_back()


def result_numbers(result: Any) -> dict[ComparedKey, Any]:
    """The loss in what a step gives, and its outputs."""
    numbers: dict[ComparedKey, Any] = {}
    if isinstance(result, LossAndOutputs):
        numbers |= named_outputs(result.outputs)
        result = result.loss
    return numbers if result is None else {**numbers, ("loss", ""): result}


def witness_of(on_workers: ModelOnWorkers, compiled: Compiled, is_fresh: Callable[[], bool]) -> Witness | None:
    """The user's model, for a graph of it; None if no process holds it. ``is_fresh`` says if its numbers are those
    of the workers."""
    model = model_of(on_workers.pipe)
    if model is None or any(each.is_meta for _, each in named_state(model)):
        return None

    def numbers() -> Mapping[str, Any]:
        if is_fresh():
            return {}
        names = [*first_names(on_workers.pipe).values(), *_buffers_of_loss(on_workers)]
        return on_workers._fetch(name for name in names if on_workers.placed.locations(name))

    return Witness(model, loss_of(on_workers.pipe), compiled, numbers)


def _buffers_of_loss(model: ModelOnWorkers) -> list[str]:
    """The names of the loss's buffers that its forward may have changed. Those that the script has set, steps are given."""
    loss, held = loss_of(model.pipe), model.placed.compiled.loss_module
    set_by_script = {name for _, name in model.watch.settings.get(LOSS, {})}
    if not isinstance(loss, nn.Module) or type(held) is not type(loss):
        return []
    return [f"{LOSS}.{name}" for name, _ in held.named_buffers() if name.rpartition(".")[2] not in set_by_script]


def checked_model(driver: ModelOnWorkers, given: Any) -> nn.Module:
    """The plain model to compare with: the one that is given, or the one that the Pipe was made from."""
    model = model_of(driver.pipe) if given is None else given
    if model is None:
        raise DriverError(
            "check() needs the plain model, but this Pipe is a copy, which does not hold the model that it was "
            "made from; give the model: check(4, x, target, model=model)"
        )
    if not isinstance(model, nn.Module):
        raise DriverError(
            f"check(model={brief(model)}): give the plain model, the nn.Module that the Pipe was made from"
        )
    if any(each.is_meta for each in tensors([*model.parameters(), *model.buffers()])):
        raise DriverError(
            "check() runs the plain model in this process, which cannot be done with a model on the meta device; "
            "check a smaller model of the same classes, with fewer or narrower layers"
        )
    pipe_shapes = {name: each.shape for name, each in named_state(driver.pipe) if not name.startswith(f"{LOSS}.")}
    model_shapes = {name: each.shape for name, each in named_state(model)}
    odd = sorted(
        name for name in pipe_shapes.keys() | model_shapes.keys() if pipe_shapes.get(name) != model_shapes.get(name)
    )
    if odd:
        raise DriverError(
            f"check(model=...) was given a {type(model).__name__} whose parameters and buffers are not those of the Pipe's "
            f"model; they differ in {', '.join(odd[:8])}"
        )
    return model


def _alike(parameter: nn.Parameter, number: torch.Tensor, gradient: torch.Tensor | None) -> nn.Parameter:
    """A parameter with other numbers and a gradient. It has the attributes that an optimizer may read."""
    found = nn.Parameter(number.detach().to(parameter.device, parameter.dtype, copy=True), parameter.requires_grad)
    vars(found).update(vars(parameter))
    found.grad = None if gradient is None else gradient.to(found.device, found.dtype)
    return found


def _of_update(before: torch.Tensor, after: torch.Tensor) -> float:
    """The tolerance for a parameter after an update: by the rounding of the update, and of the sum."""
    if not after.is_floating_point():
        return 0.0
    after = after.detach().cpu()
    size, update = float(after.abs().max()), float((after - before.to(after.dtype)).abs().max())
    return 4 * torch.finfo(after.dtype).eps + (floor_of(after.dtype) * update / size if size else 0.0)
