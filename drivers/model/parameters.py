"""The parameters of one driver's Pipe where they are, on the workers, and their gradients."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import nn

from pippy.drivers.base.errors import DriverError
from pippy.drivers.base.interrupts import first_waits
from pippy.drivers.model.optimizers.stale_models import StaleModels
from pippy.drivers.model.state.filling import Filling
from pippy.drivers.placement.placed_pipe import PlacedPipe
from pippy.drivers.protocol.state import (
    ClampGradients,
    FetchGradients,
    GiveState,
    GradientNorms,
    ReduceGradients,
    RestoreState,
    ScaleGradients,
    WorkerState,
)
from pippy.drivers.session.driver_commands import DriverCommands, GradientState
from pippy.ir.base.compiling import original_of
from pippy.ir.base.names import LOSS, named_state
from pippy.ir.base.readable import brief
from pippy.ir.loss.loss_function import LossWrapper
from pippy.ir.pipe import Pipe, models_of
from pippy.ir.record.model_watch import ModelWatch


class RemoteParameters:
    """Reads and changes the parameters, buffers and gradients on the workers, by the user's names."""

    def __init__(
        self,
        pipe: Pipe,
        placed: PlacedPipe,
        commands: DriverCommands,
        stale: StaleModels,
        filling: Filling,
        watch: ModelWatch,
    ) -> None:
        self.pipe, self.placed, self.commands, self.stale, self.filling = pipe, placed, commands, stale, filling
        self.watch = watch

    def fetch(self, names: Iterable[str], gradients: bool = False) -> dict[str, Any]:
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

    # Gradients

    def reduce_gradients(self) -> None:
        """Add up the gradients of replicated parameters, if that was not done."""
        if self.commands.gradients is GradientState.UNREDUCED:
            self.commands.call_reducing(lambda _: dict.fromkeys(self.commands.workers, ReduceGradients()))

    def gradients(self, names: Sequence[str] | None = None) -> dict[str, torch.Tensor | None]:
        """The gradients of these parameters, or of all: copies, of which it is noted that nobody edits them."""
        wanted = self._names() if names is None else names
        self.commands.check_not_edited()  # or else these would not be those of the script
        self.reduce_gradients()
        found = self.fetch(wanted, gradients=True)
        self.commands.fetched += [(each, each._version) for each in found.values() if each is not None]
        return found

    def grad_norm(self, norm_type: float) -> torch.Tensor:
        """The norm of all gradients together."""
        names = self._names()
        by_worker = self.placed.first_locations(names, owned=True)
        locations = {worker: tuple(by_worker.get(worker, {}).values()) for worker in self.commands.workers}
        answers = self.commands.call_reducing(
            lambda reduce: {worker: GradientNorms(places, norm_type, reduce) for worker, places in locations.items()}
        )
        norms: dict[str, Any] = {}
        for worker, values in answers.items():
            norms.update(zip(by_worker.get(worker, {}), values))
        there = [norms[name] for name in names if norms.get(name) is not None]
        return torch.linalg.vector_norm(torch.stack(there), norm_type) if there else torch.tensor(0.0)

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``, and give the norm."""
        _check_limit("max_norm", max_norm)
        self.commands.check_not_edited()
        total = self.grad_norm(norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise DriverError(
                f"the norm of the gradients is {total.item()}; pass error_if_nonfinite=False to clip anyway"
            )
        factor = float(torch.clamp(max_norm / (total + 1e-6), max=1.0))  # min() would take 1.0 for a norm that is NaN
        with first_waits():  # or some workers might have scaled theirs, and others not
            self.commands.call(dict.fromkeys(self.commands.workers, ScaleGradients(factor)))
        return total

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every element of all gradients between -clip_value and ``clip_value``."""
        _check_limit("clip_value", clip_value)
        self.commands.check_not_edited()
        limit = float(clip_value)
        self.commands.wait()
        with first_waits():
            self.commands.call_reducing(
                lambda reduce: dict.fromkeys(self.commands.workers, ClampGradients(limit, reduce))
            )

    # State dicts

    def check_written(self) -> None:
        """Raise if the script has written numbers into its model that are not those on the workers."""
        written = [name for name in self.watch.written() if self.placed.locations(name)]
        here = {name: each for name, each in named_state(self.pipe) if name in written and not each.is_meta}
        there = self.fetch(here) if here else {}
        other = [name for name, each in here.items() if not _are_equal(each.detach().cpu(), there[name])]
        if other:
            get = "get_parameter" if isinstance(here[other[0]], nn.Parameter) else "get_buffer"
            raise DriverError(
                f"{', '.join(map(repr, other[:6]))}{' and others' * (len(other) > 6)} of the model in this process was "
                "written, and the workers have other numbers. What to do: to have those of this process, call "
                f"driver.load_state_dict({{{other[0]!r}: model.{get}({other[0]!r})}}, strict=False); to have those of the "
                "workers, driver.copy_to(model)"
            )

    def state_dict(self) -> dict[str, Any]:
        """The model's state dict, with the parameters and buffers as they are on the workers."""
        self.filling.check("state_dict()")
        state = self.pipe.state_dict()
        state.update(self.fetch(self._on_workers(state)))
        for name in [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]:
            del state[name]  # no stage uses it, so nobody has given it numbers
        return state

    def copy_to(self, model: nn.Module) -> None:
        """Copy the parameters and buffers on the workers into a model with the same names."""
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
        values = {**pipe_tensors, **self.fetch([name for name in names if self.placed.locations(name)])}
        if all(model_tensors[name] is pipe_tensors[name] for name in names):
            self.stale.end()  # before what follows, which is no read of old numbers
        with torch.no_grad():
            for name in names:
                if not values[name].is_meta:  # else no stage uses it, so nobody has given it numbers
                    if model_tensors[name].shape != values[name].shape:  # forward has resized it, as observers do
                        model_tensors[name].resize_(values[name].shape)
                    model_tensors[name].copy_(values[name])
        self.watch.note_numbers(model_tensors[name] for name in names)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool) -> Any:
        """Load a state dict into the Pipe and into all workers."""
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

    def _with_loss(self, model: nn.Module) -> nn.Module:
        """The `LossWrapper` that a model of the Pipe's is in: the names are those of the wrapper."""
        wrappers = [each for each in models_of(self.pipe) if isinstance(each, LossWrapper)]
        return next((each for each in wrappers if each.module is model), model)

    def _names(self) -> list[str]:
        return [name for name, _ in self.pipe.named_parameters()]

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


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or (
        one.shape == other.shape and torch.allclose(one, other, 0.0, 0.0, equal_nan=True)
    )


def _check_limit(name: str, given: Any) -> None:
    """Raise unless this is a number that gradients can be clipped to."""
    is_number = given.numel() == 1 if isinstance(given, torch.Tensor) else isinstance(given, Real)
    if not is_number or isinstance(given, bool):
        raise DriverError(f"{name}={brief(given)}: give a number, as in {name}=1.0")
