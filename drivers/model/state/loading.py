"""The controller's part of `driver.load`: all is compared and read first, and then put in place at once.

    load: all names, shapes and dtypes are compared with those of the model
         ──ReadState──▶ each worker reads its part, beside what it has
         ──TakeState──▶ each worker puts it in place

If something does not fit, or cannot be read, that is an error before the last line, and nothing has changed.
"""

import copy
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from pippy.drivers.base.errors import CheckpointError, StepError
from pippy.drivers.base.interrupts import first_waits
from pippy.drivers.files.contents import MODEL, RANDOM_STATE, Contents, contents_of
from pippy.drivers.files.manifest import random_state
from pippy.drivers.files.safetensors_files import StoredTensor
from pippy.drivers.model.optimizers.optimizer import PipelineOptimizer
from pippy.drivers.model.optimizers.stale_models import StaleModels
from pippy.drivers.model.state.filling import Filling
from pippy.drivers.model.state.saving import SavedNames, check_is_of
from pippy.drivers.placement.placed_pipe import PlacedPipe
from pippy.drivers.protocol.state import ReadState, TakeState
from pippy.drivers.session.driver_commands import DriverCommands, StepNumbers
from pippy.drivers.worker.gradients.worker_optimizer import MASTER
from pippy.ir.base.public_calls import check_flag
from pippy.ir.base.readable import first_listed
from pippy.ir.base.trees import describe
from pippy.ir.pipe import Pipe

_log = logging.getLogger(__name__)
_SHOWN = 8  # names in one line of an error


class LoadedValues(dict[str, Any]):
    """The plain values of a checkpoint, as a dict, and the names that only the model, or only the checkpoint, has.

    >>> loaded = LoadedValues({"step": 10}, missing_keys=["head.weight"], unexpected_keys=[])
    >>> loaded, loaded.missing_keys
    ({'step': 10}, ['head.weight'])
    """

    def __init__(self, values: Mapping[str, Any], missing_keys: list[str], unexpected_keys: list[str]) -> None:
        super().__init__(values)
        self.missing_keys, self.unexpected_keys = missing_keys, unexpected_keys


class Loading:
    """Loads checkpoints into one driver's model, its optimizers and other objects."""

    def __init__(
        self, pipe: Pipe, placed: PlacedPipe, commands: DriverCommands, stale: StaleModels, filling: Filling
    ) -> None:
        self.pipe, self.placed, self.commands, self.stale, self.filling = pipe, placed, commands, stale, filling
        self.path = ""  # of what was loaded last

    def load(
        self, path: str | os.PathLike[str], strict: bool, arguments: Mapping[str, Any], all_random: bool = False
    ) -> LoadedValues:
        """Load a checkpoint, and return its plain values. With ``all_random``, random states are loaded in any case."""
        every = "to have every name of the model and of the checkpoint"
        check_flag("strict", strict, CheckpointError, true=every, false="for those that both have")
        contents = contents_of(path)
        names = SavedNames.of(self.pipe, self.placed)
        tensors, missing, unexpected = _fitting(contents, names, strict)
        parts = {name: each for name, each in arguments.items() if name != RANDOM_STATE}
        optimizers, objects = self._checked(contents, parts)
        has_random = all_random and "random" in contents.values
        goes_on = (has_random or bool(optimizers or objects)) and self._takes_random_state(contents, arguments)
        self.commands.wait()
        unused = self._read(contents, tensors, names, optimizers)
        with first_waits():  # or a part would be loaded, and a part not
            self._put_in_place(contents, tensors, names, unused, optimizers, objects, goes_on)
        self.path = contents.path
        _log.info("checkpoint loaded: %s", contents.path)
        return LoadedValues(contents.values.get("values", {}), missing, unexpected)

    def _takes_random_state(self, contents: Contents, arguments: Mapping[str, Any]) -> bool:
        """Whether random states are loaded. Raises if they cannot be, unless ``arguments`` leaves them out by name."""
        if RANDOM_STATE in arguments:
            if arguments[RANDOM_STATE] is not None:
                raise CheckpointError(
                    f"{RANDOM_STATE}={describe(arguments[RANDOM_STATE])}: random states are loaded if this is left out, and "
                    f"left as they are with {RANDOM_STATE}=None"
                )
            return False
        was_keyed, is_keyed = contents.values["random"].get("keyed") is not None, self.commands.numbers is not None
        if was_keyed != is_keyed:
            words = {True: "depend on a seed and the step", False: "are the workers' own, by keyed_random=False"}
            was, now = words[was_keyed], words[is_keyed]
            remedy = f"{'without' if was_keyed else 'with'} keyed_random=False"
            raise CheckpointError(
                f"the random numbers of {contents.path} {was}, and those of this driver {now}, so that a run with "
                f"dropout would not go on as it was, and nothing was loaded; make the driver {remedy}, or say "
                f"{RANDOM_STATE}=None: load(path, ..., {RANDOM_STATE}=None) leaves random states as they are"
            )
        return True

    def _put_in_place(
        self,
        contents: Contents,
        tensors: Mapping[str, StoredTensor],
        names: SavedNames,
        unused: Mapping[str, torch.Tensor],
        optimizers: Mapping[str, PipelineOptimizer],
        objects: Mapping[str, Any],
        goes_on: bool,
    ) -> None:
        load_objects(contents.values.get("states", {}), objects)
        self._take(contents, optimizers, goes_on)
        self.filling.filled(tensors)
        with torch.no_grad():
            for name, value in unused.items():
                names.tensors[name].copy_(value)
        extra = contents.values.get("extra", {})
        for name in [name for name in names.extra if name in extra]:
            self.pipe.get_submodule(name.rpartition(".")[0]).set_extra_state(extra[name])
        for name, optimizer in optimizers.items():
            optimizer.take_options(contents.values["optimizers"][name]["groups"])
        self.commands.zero_grad()
        self.stale.updated()
        if goes_on:
            random_state(contents.values["random"]["controller"], tuple(range(torch.cuda.device_count()))).restore()
            if self.commands.numbers is not None and (numbers := contents.values["random"].get("keyed")) is not None:
                self.commands.go_on_at(StepNumbers(**numbers))

    def _checked(
        self, contents: Contents, parts: Mapping[str, Any]
    ) -> tuple[dict[str, PipelineOptimizer], dict[str, Any]]:
        """The optimizers and the objects that are loaded, if the checkpoint has what they need."""
        saved = {**contents.values.get("optimizers", {}), **contents.values.get("states", {})}
        wanted = {name: each for name, each in parts.items() if each is not None}
        lacking = [name for name in parts if name not in saved]
        if lacking:
            has = ", ".join(map(repr, saved)) or "none"
            raise CheckpointError(f"{contents.path} has no state for {', '.join(map(repr, lacking))}; it has {has}")
        left = [name for name in saved if name not in parts]
        if wanted and left:
            raise CheckpointError(
                f"{contents.path} also has a state for {', '.join(map(repr, left))}, which a resumed run needs; "
                f"give it to load(), or give {left[0]}=None to ignore it"
            )
        optimizers, objects = {}, {}
        for name, each in wanted.items():
            if name in contents.values["optimizers"]:
                optimizers[name] = self._checked_optimizer(name, each, contents)
            elif not hasattr(each, "load_state_dict") or isinstance(each, PipelineOptimizer):
                raise CheckpointError(
                    f"{name}={describe(each)} cannot load the saved state, which is of another kind of object; give "
                    "an object of the kind that was saved, with a load_state_dict()"
                )
            else:
                objects[name] = each
        return optimizers, objects

    def _checked_optimizer(self, name: str, optimizer: Any, contents: Contents) -> PipelineOptimizer:
        if not isinstance(optimizer, PipelineOptimizer):
            raise CheckpointError(
                f"{name}= is a {type(optimizer).__name__}, but the saved state is of an optimizer on workers; give what "
                "driver.instantiate_optimizer returned (for an optimizer of this process, use "
                "pippy.load_checkpoint)"
            )
        check_is_of(name, optimizer, self.commands)
        saved = contents.values["optimizers"][name]
        mine = optimizer.optimizer_class.__name__
        if saved["class"] != mine:
            raise CheckpointError(
                f"{name}= is of {mine}, but the saved state is of {saved['class']}; give an optimizer of that class"
            )
        groups_now = [set(group["params"]) for group in optimizer.named_groups()]
        groups_saved = [set(group["params"]) for group in saved["groups"]]
        if groups_now != groups_saved:
            sizes = [[len(group) for group in groups] for groups in (groups_saved, groups_now)]
            odd = sorted(set[str]().union(*groups_now) ^ set[str]().union(*groups_saved))[:_SHOWN]
            apart = f", and {', '.join(map(repr, odd))} on one side only" if odd else ""
            raise CheckpointError(
                f"{name}= has other groups of parameters than the saved optimizer: it has groups of {sizes[1]} "
                f"parameters, and the saved one had groups of {sizes[0]}{apart}"
            )
        has_masters = any(MASTER in state for state in contents.optimizers.get(name, {}).values())
        if has_masters and optimizer.master_dtype is None:
            raise CheckpointError(
                f"{name}= was saved with copies of the parameters in a dtype with more bits, and this one has none; "
                "make the optimizer with their dtype: instantiate_optimizer(..., master_dtype=torch.float32)"
            )
        return optimizer

    def _read(
        self,
        contents: Contents,
        tensors: Mapping[str, StoredTensor],
        names: SavedNames,
        optimizers: Mapping[str, PipelineOptimizer],
    ) -> dict[str, torch.Tensor]:
        """Have each worker read its part, beside the tensors that it has. Returns the tensors that no stage uses."""
        places = self.placed.for_all_copies(tensors)
        states = {
            each.number: self.placed.for_all_copies(contents.optimizers.get(name, {}), each.divided)
            for name, each in optimizers.items()
        }
        bodies = {
            worker: ReadState(entries, {number: by_worker[worker] for number, by_worker in states.items()})
            for worker, entries in places.items()
        }
        try:
            unused = {
                name: tensors[name].read() for name in names.unused if name in tensors and name not in names.nowhere
            }
            self.commands.call(bodies)
        except BaseException as error:
            with suppress(Exception):
                self.commands.call(dict.fromkeys(self.placed.workers, TakeState(take=False)))
            if isinstance(error, StepError | OSError):
                why = str(error).partition("\n\n")[0]
                raise CheckpointError(f"{contents.path} could not be read, and nothing was loaded: {why}") from error
            raise
        return unused

    def _take(self, contents: Contents, optimizers: Mapping[str, PipelineOptimizer], goes_on: bool) -> None:
        """Have each worker put in place what it has read."""
        others = {
            each.number: self.placed.for_all_copies(contents.values["optimizers"][name]["others"], each.divided)
            for name, each in optimizers.items()
        }
        randoms = contents.values["random"]["workers"] if goes_on else []
        self.commands.call(
            {
                worker: TakeState(
                    True,
                    {number: by_worker[worker] for number, by_worker in others.items()},
                    randoms[at] if at < len(randoms) else None,
                )
                for at, worker in enumerate(self.placed.workers)
            }
        )


def _fitting(
    contents: Contents, names: SavedNames, strict: bool
) -> tuple[dict[str, StoredTensor], list[str], list[str]]:
    """The stored tensor for each tensor of the model, the names that the checkpoint lacks, and those that the model lacks.

    Raises an error that lists all faults; without ``strict``, a name that one side lacks is no fault.
    """
    stored_tensors, taken = {}, set()
    for name, all_names in names.names.items():
        there = [each for each in all_names if each in contents.model]
        taken.update(there)
        if there:
            stored_tensors[name] = contents.model[there[-1]]  # as load_state_dict of torch, where the last one wins
    faults = []
    missing = [name for name in names.tensors if name not in stored_tensors and name not in names.nowhere]
    unknown = [name for name in contents.model if name not in taken]
    extra, saved_extra = names.extra.keys(), contents.values.get("extra", {}).keys()
    if contents.values:
        missing, unknown = [*missing, *sorted(extra - saved_extra)], [*unknown, *sorted(saved_extra - extra)]
    for kind, which in (("the checkpoint lacks", missing), ("the model has no", unknown)):
        if which and strict:
            faults.append(f"{kind} {first_listed(which, _SHOWN)}")
    for name, stored in stored_tensors.items():
        tensor = names.tensors[name]
        if tensor.shape != stored.shape or tensor.dtype != stored.dtype:
            stored_is = describe(torch.empty(stored.shape, dtype=stored.dtype, device="meta"))
            faults.append(f"{name} is {stored_is} in the checkpoint, and {describe(tensor)} in the model")
    if faults:
        left = [f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        lines = "\n- ".join([*faults[:_SHOWN], *left])
        raise CheckpointError(
            f"{contents.path} is not of this model, and nothing was loaded:\n- {lines}\n(driver.load(path, strict=False) takes "
            f"the names that both have, and driver.load_state_dict(state, strict=False) other dtypes, too; state = "
            f'pippy.load_checkpoint({contents.path!r})["{MODEL}"])'
        )
    return stored_tensors, [name for first in missing for name in names.names.get(first, (first,))], unknown


def load_objects(states: Mapping[str, Any], objects: Mapping[str, Any]) -> None:
    """Load states into objects of the script: into all of them, or into none if one raises."""
    before = {name: copy.deepcopy(each.state_dict()) for name, each in objects.items()}
    for at, (name, each) in enumerate(objects.items()):
        try:
            each.load_state_dict(states[name])
        except Exception as error:
            for other in list(objects)[: at + 1]:
                with suppress(Exception):
                    objects[other].load_state_dict(before[other])
            raise CheckpointError(
                f"{name}, a {type(each).__name__}, refused the state that was saved, and nothing was loaded: "
                f"{type(error).__name__}: {error}"
            ) from error
