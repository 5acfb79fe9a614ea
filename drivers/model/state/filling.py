"""Gives numbers to the parameters and buffers of workers whose model is on the meta device.

with torch.device("meta"): model = ...    ─▶  Pipe  ─▶  driver: the workers have memory for their parts, without numbers
driver.initialize()        each worker makes its own     ─┐
driver.load_state_dict()   they are sent                  ┴─▶  driver.run(...)
"""

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from pippy.drivers.base.errors import DriverError
from pippy.drivers.placement.placed_pipe import PlacedPipe
from pippy.drivers.protocol.state import ElsewhereTensor, Initialize, TensorLocation
from pippy.drivers.session.driver_commands import DriverCommands
from pippy.drivers.wire.pickling import pickle_by_value
from pippy.drivers.worker.state.initialization import Function, function_of_hugging_face, reset_function
from pippy.ir.base.errors import InitializationError
from pippy.ir.base.names import named_state
from pippy.ir.base.readable import brief, first_listed
from pippy.ir.base.trees import describe
from pippy.ir.pipe import Pipe, model_of
from pippy.ir.run.layers import spec_of

_SHOWN = 6  # names in an error


class Filling:
    """The tensors of one driver that have no numbers yet, by the user's names. `initialize` gives them numbers."""

    def __init__(self, pipe: Pipe, placed: PlacedPipe, commands: DriverCommands) -> None:
        self.pipe, self.placed, self.commands = pipe, placed, commands
        self.empty = set(placed.empty)
        self._initialized: tuple[Function | None, int] | None = None
        self.can_begin_again = True  # whether what the workers were given first is known

    def filled(self, names: Iterable[str]) -> None:
        """Note that the workers have numbers for these tensors."""
        canonical = self.placed.compiled.qualnames.canonical
        given = {canonical.get(name, name) for name in names}
        self.can_begin_again &= given.isdisjoint(self.placed.empty)
        self.empty -= given

    def begin_again(self) -> None:
        """Initialize again as before: the workers have new stages without numbers."""
        self.empty = set(self.placed.empty)
        if self._initialized is not None:
            self.initialize(*self._initialized)

    def check(self, what: str) -> None:
        """Raise if some tensors have no numbers: ``what`` needs them."""
        if self.empty:
            raise DriverError(
                f"{what} needs numbers, and {len(self.empty)} parameters and buffers of the model were made on the meta device "
                f"and have none: {_listed(self.empty)}; driver.initialize() has each worker make those of its stages, "
                "driver.load(folder) has it read them from a checkpoint, and driver.load_state_dict(state) gives them"
            )

    def initialize(self, function: Function | None, seed: int | None) -> None:
        """Have the workers make the tensors that have no numbers."""
        if function is not None and not callable(function):
            raise InitializationError(
                f"function={brief(function)} is called with each module of the model; give a function of a module"
            )
        if not self.empty:
            raise InitializationError(
                "initialize() has nothing to do, because all parameters and buffers of this driver have numbers; "
                "it is for a model on the meta device"
            )
        model = model_of(self.pipe)
        if model is None:
            raise InitializationError(
                "initialize() needs the model that the Pipe was made from, which this Pipe, a copy, does not hold; "
                "make the driver from the Pipe that pipeline() returned"
            )
        if function is None:
            _check_modules(model, self._empty_tensors(model))
        seed = torch.initial_seed() if seed is None else seed
        self._initialized = function, seed
        bodies = {worker: self._body(worker, model, function, seed) for worker in self.commands.workers}
        answers = self.commands.call(bodies)
        unwritten = {name for names in answers.values() for name in names}
        self.empty = unwritten
        if unwritten:
            tensors = dict(named_state(model))
            shown = ", ".join(f"{name!r} ({describe(tensors[name])})" for name in sorted(unwritten)[:_SHOWN])
            raise InitializationError(
                f"the modules were initialized, but nothing wrote all of {shown}. On the meta device, what __init__ "
                "computes is lost: compute it in reset_parameters() too, or give initialize() a function that does "
                "so, or make the buffer inside of `with torch.device('cpu'):`"
            )

    def _empty_tensors(self, model: nn.Module) -> dict[int, str]:
        """The names of the tensors to be filled, by their ids."""
        return {id(tensor): name for name, tensor in named_state(model) if name in self.empty}

    def _body(self, worker: int, model: nn.Module, function: Function | None, seed: int) -> Initialize:
        places = {name: self._locations(name, worker) for name in sorted(self.empty)}
        here = {name: locations for name, locations in places.items() if locations}
        held: dict[int, Any] = {}
        for name, tensor in named_state(model):
            canonical = self.placed.compiled.qualnames.canonical[name]
            held[id(tensor)] = canonical if canonical in here else ElsewhereTensor.of(tensor)
        return Initialize(pickle_by_value((model, function), held), here, seed)

    def _locations(self, name: str, worker: int) -> list[TensorLocation]:
        return [place for rank, place in self.placed.locations(name) if rank == worker]


def _check_modules(model: nn.Module, empty: dict[int, str]) -> None:
    """Raise if a module has a tensor without numbers, and no function that initializes it."""
    for path, module in _initialized_by_rule("", model):
        for name in ("_init_weights", "init_weights"):
            if callable(getattr(module, name, None)):
                where = f"model.{path}.{name}" if path else f"model.{name}"
                raise InitializationError(
                    f"{path or 'the model'} ({type(module).__name__}) has {name}, and initialize() does not know "
                    f"whether its constructor calls that for its modules; if so, call initialize({where}), "
                    "otherwise initialize(lambda module: None)"
                )
        module_tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        without_numbers = [empty[id(tensor)] for tensor in module_tensors if id(tensor) in empty]
        if without_numbers and not _takes_nothing(reset_function(module)):
            raise InitializationError(
                f"{path or 'the model'} ({type(module).__name__}) has {_listed(without_numbers)}, and no reset_parameters() "
                "that initializes this; write one, as modules of torch have it, or give initialize() a function "
                "that is called with each module and initializes it: initialize(function)"
            )


def _initialized_by_rule(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules but those that a model of Hugging Face initializes, and those that a constructor makes on the worker."""
    if function_of_hugging_face(module) is None and spec_of(module) is None:
        yield path, module
        for name, child in module.named_children():
            yield from _initialized_by_rule(f"{path}.{name}" if path else name, child)


def _takes_nothing(function: Any) -> bool:
    if function is None:
        return False
    parameters = inspect.signature(function).parameters.values()
    return all(
        each.default is not each.empty or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters
    )


def _listed(names: Iterable[str]) -> str:
    return first_listed(map(repr, sorted(names)), _SHOWN)
