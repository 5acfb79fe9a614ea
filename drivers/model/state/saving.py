"""The controller's part of `driver.save`: it tells each worker what to write, and puts the checkpoint in place.

    save ──WriteState──▶ each worker: its parameters, buffers, states of optimizers ──▶ files, synced
         ◀─WrittenState─ their lengths and hashes
         ──▶ the index, the values, the manifest ──▶ one rename

With ``wait=False`` each worker answers when it has made copies, and then writes the copies. A thread of the controller asks the
workers from time to time whether they are done, and does the rest.

The names of a driver's tensors in a checkpoint: it has each tensor once, by one of its names in the state dict.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from pippy.drivers.base.beside import beside
from pippy.drivers.base.errors import CheckpointError, StepError
from pippy.drivers.base.interrupts import uninterrupted
from pippy.drivers.engines.cluster import Cluster
from pippy.drivers.files.contents import TAKEN, NewCheckpoint, shard
from pippy.drivers.files.manifest import INDEX, MODEL, VALUES, WHOLE_HASH, check_plain, packed, random_values, unpacked
from pippy.drivers.files.safetensors_files import check_writable, write_tensors
from pippy.drivers.files.synced_files import WrittenFile, write_file
from pippy.drivers.model.optimizers.optimizer import PipelineOptimizer
from pippy.drivers.model.state.filling import Filling
from pippy.drivers.placement.placed_pipe import PlacedPipe
from pippy.drivers.protocol.commands import Failure
from pippy.drivers.protocol.state import AskWritten, WriteState, WrittenState
from pippy.drivers.session.driver_commands import DriverCommands
from pippy.ir.base import source
from pippy.ir.base.public_calls import check_count
from pippy.ir.base.readable import bytes_text, shortened
from pippy.ir.pipe import Pipe
from pippy.ir.run.random_state import RandomState


@dataclass(frozen=True)
class SavedNames:
    """``tensors`` has each tensor of the state dict by the name that it is saved by. ``names`` has all names of each.

    ``extra`` has the items of the state dict that are no tensors; ``unused`` the names of tensors that no stage uses, which are
    in this process alone.

    >>> from pippy import Pipe
    >>> first, last = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    >>> last.weight = first.weight
    >>> pipe = Pipe.from_sequential(torch.nn.Sequential(first, last))
    >>> from pippy.ir.pipe import compiled_of
    >>> saved = SavedNames.of(pipe, PlacedPipe(compiled_of(pipe), [0, 1]))
    >>> saved.names["0.weight"], saved.tied
    (('0.weight', '1.weight'), {'1.weight': '0.weight'})
    """

    tensors: Mapping[str, torch.Tensor]
    names: Mapping[str, tuple[str, ...]]
    extra: Mapping[str, Any]
    unused: tuple[str, ...]

    @classmethod
    def of(cls, pipe: Pipe, placed: PlacedPipe) -> "SavedNames":
        """The names for a Pipe whose stages are placed."""
        canonical = placed.compiled.qualnames.canonical
        state = pipe.state_dict(keep_vars=True)
        groups: dict[str, list[str]] = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                groups.setdefault(canonical.get(name, name), []).append(name)
        names = {first if first in all_names else all_names[0]: tuple(all_names) for first, all_names in groups.items()}
        return cls(
            {name: state[name] for name in names},
            names,
            {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)},
            tuple(name for name in names if not placed.locations(name)),
        )

    @property
    def nowhere(self) -> set[str]:
        """The names of tensors on the meta device that no stage uses. They have no numbers anywhere."""
        return {name for name in self.unused if self.tensors[name].is_meta}

    def with_numbers(self) -> "SavedNames":
        """The names without those of `nowhere`."""
        gone = self.nowhere
        tensors = {name: each for name, each in self.tensors.items() if name not in gone}
        names = {name: own for name, own in self.names.items() if name not in gone}
        return SavedNames(tensors, names, self.extra, tuple(name for name in self.unused if name not in gone))

    @property
    def tied(self) -> dict[str, str]:
        """The name that a tensor is saved by, for each of its other names."""
        return {other: name for name, own in self.names.items() for other in own if other != name}


_log = logging.getLogger(__name__)
_LONGEST_PAUSE = 1.0  # seconds between two questions


@dataclass(frozen=True)
class GivenObjects:
    """What `save` was given by name: optimizers of the driver, objects with a state dict, and plain values.

    >>> GivenObjects.sorted({"step": 10}, None).values
    {'step': 10}
    """

    optimizers: dict[str, PipelineOptimizer] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def sorted(cls, given: Mapping[str, Any], commands: DriverCommands | None) -> "GivenObjects":
        """Sort the objects into optimizers, objects with a state dict, and plain values."""
        objects = cls()
        for name, value in given.items():
            if name in TAKEN:
                raise CheckpointError(
                    f"{name}= cannot be used, because a checkpoint or load() uses that name for something else; "
                    "choose another name"
                )
            if isinstance(value, PipelineOptimizer):
                check_is_of(name, value, commands)
                objects.optimizers[name] = value
            elif hasattr(value, "state_dict") and not isinstance(value, type):
                objects.objects[name] = value
            else:
                objects.values[name] = value
        return objects


def check_is_of(name: str, optimizer: PipelineOptimizer, commands: DriverCommands | None) -> None:
    """Raise unless an optimizer is one of this driver's."""
    if optimizer.commands is not commands:
        raise CheckpointError(
            f"{name}= is an optimizer of another driver; give those that this driver's instantiate_optimizer made"
        )


class Saving:
    """Saves one driver's model, its optimizers and other objects."""

    def __init__(
        self,
        pipe: Pipe,
        placed: PlacedPipe,
        commands: DriverCommands,
        cluster: Cluster,
        filling: Filling,
        begin_point: Callable[[GivenObjects], Callable[[str], None]],
    ) -> None:
        """``begin_point`` notes that a checkpoint is begun, and gives what is called with the path when it is in place."""
        self.pipe, self.placed, self.commands, self.cluster, self.filling = pipe, placed, commands, cluster, filling
        self._begin_point = begin_point
        self._beside: Future[None] | None = None

    def save(self, folder: str | os.PathLike[str], wait: bool, keep: int | None, parts: Mapping[str, Any]) -> str:
        """Save, and return the path of the checkpoint. There is nothing at this path before the checkpoint is complete."""
        self.finish()
        check_count("keep", keep, "how many checkpoints to keep", CheckpointError, none="for all")
        step, what = parts.get("step"), "the number of the step, which names the checkpoint"
        check_count("step", step, what, CheckpointError, least=0, none="for none")
        self.filling.check("save()")
        objects = GivenObjects.sorted(parts, self.commands)
        names = SavedNames.of(self.pipe, self.placed).with_numbers()
        # A tensor of the meta device is on a worker, where it has numbers.
        check_writable({name: tensor for name, tensor in names.tensors.items() if not tensor.is_meta})
        values = self._values(objects, names)
        self._wait_for_steps(bool(objects.optimizers))
        folder = os.path.abspath(os.fspath(folder))
        new = None
        try:
            with _refused(folder):
                with uninterrupted():  # or nobody would unlock the folder
                    new = NewCheckpoint(folder, step)
                work = _Work(new, names, objects, values, self.placed, keep, self._begin_point(objects))
                work.write_unused()
                written = self.commands.call(work.bodies(copy=not wait))
                if wait:
                    return work.end(written)
            with uninterrupted():
                self._begin_beside(work)
            return os.path.join(folder, new.name)
        finally:
            if new is not None and self._beside is None:
                with uninterrupted():
                    new.end()

    def kept_values(self, given: Mapping[str, Any]) -> tuple[GivenObjects, dict[str, Any]]:
        """The objects that `protect` was given, and their values as they are now."""
        self.filling.check("protect()")
        objects = GivenObjects.sorted(given, self.commands)
        values = self._values(objects, SavedNames.of(self.pipe, self.placed).with_numbers())
        self._wait_for_steps(True)
        return objects, values

    def _wait_for_steps(self, goes_on: bool) -> None:
        self.commands.wait()
        if self.commands.known.unapplied and goes_on:
            source.warn(
                "this checkpoint leaves out gradients that no optimizer.step() has used yet, because a checkpoint "
                "holds no gradients; save after optimizer.step(), or call driver.zero_grad() first"
            )

    def _begin_beside(self, work: "_Work") -> None:
        self._beside = beside(partial(self._finish_beside, work), "pippy save", daemon=False)
        self.cluster.unfinished.append(self.finish)

    def finish(self) -> None:
        """Wait for the checkpoint that is still being written, and raise its error."""
        work = self._beside
        if work is not None:
            wait_for([work])
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the error of a checkpoint that was written beside the run, once."""
        work = self._beside
        if work is not None and work.done():
            self._beside = None
            with suppress(ValueError):  # another thread may have waited, too
                self.cluster.unfinished.remove(self.finish)
            work.result()

    def _values(self, objects: GivenObjects, names: SavedNames) -> dict[str, Any]:
        """The plain values, as they are now."""
        states = {name: each.state_dict() for name, each in objects.objects.items()}
        optimizers = {
            name: {"class": each.optimizer_class.__name__, "groups": each.named_groups()}
            for name, each in objects.optimizers.items()
        }
        values = {"values": objects.values, "states": states, "optimizers": optimizers, "extra": dict(names.extra)}
        try:
            values = unpacked(packed(values))  # copies: the script may change what it gave before all is written
        except Exception:
            for name, value in {**objects.values, **states, **optimizers, **names.extra}.items():
                check_plain(name, value)
            raise
        numbers = None if self.commands.numbers is None else self.commands.numbers.state()
        return {**values, "random": {"controller": random_values(RandomState.current()), "keyed": numbers}}

    def _finish_beside(self, work: "_Work") -> None:
        with _refused(work.new.folder), work.new:
            work.end({worker: self._ask(worker) for worker in self.placed.workers})

    def _ask(self, worker: int) -> WrittenState:
        """What a worker has written. Waits until it is done."""
        session, driver = self.commands.session, self.commands.driver
        clock, pause = threading.Event(), 0.01
        while True:
            answer = session.answer(session.urgent(worker, AskWritten(driver)))
            if isinstance(answer, Failure):
                raise StepError(f"worker {worker} ({session.workers[worker].name}): {answer.message}")
            if answer is not None:
                return answer
            clock.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


class _Work:
    """One checkpoint: the part of each worker, and the files that list what the workers have written."""

    def __init__(
        self,
        new: NewCheckpoint,
        names: SavedNames,
        objects: GivenObjects,
        values: dict[str, Any],
        placed: PlacedPipe,
        keep: int | None,
        note: Callable[[str], None],
    ) -> None:
        self.note, self.began = note, time.monotonic()
        self.new, self.names, self.objects = new, names, objects
        self.values, self.placed, self.keep = values, placed, keep
        self.held = placed.first_locations(names.tensors)
        count = len(self.held) + bool(names.unused)
        self.files = {worker: shard(MODEL, at, count) for at, worker in enumerate(self.held)}
        self.own_file = shard(MODEL, count - 1, count)
        self.states: dict[str, dict[int, Any]] = {
            name: placed.first_locations((parameter for parameter, _ in each.named_parameters()), each.divided)
            for name, each in objects.optimizers.items()
        }
        self.unused: list[WrittenFile] = []

    def bodies(self, copy: bool) -> dict[int, WriteState]:
        """The message for each worker."""
        return {worker: self._body(worker, copy) for worker in self.placed.workers}

    def _body(self, worker: int, copy: bool) -> WriteState:
        locations = self.held.get(worker, {})
        optimizers = {}
        for name, places in self.states.items():
            if worker in places:
                file = shard(name, list(places).index(worker), len(places))
                optimizers[self.objects.optimizers[name].number] = file, places[worker]
        return WriteState(self.files.get(worker, ""), self.new.path, locations, self._tied(locations), optimizers, copy)

    def _tied(self, own: Mapping[str, Any]) -> dict[str, str]:
        """For each further name of these tensors the stored name, in the form of `safetensors.torch.save_model`."""
        return {other: name for other, name in self.names.tied.items() if name in own}

    def write_unused(self) -> None:
        """Write the tensors that no stage uses, so that no worker has them."""
        own = {name: self.names.tensors[name].detach() for name in self.names.unused}
        if own:
            metadata = {**self._tied(own), "format": "pt"}
            self.unused = [write_tensors(self.new.path, self.own_file, own, metadata)]

    def end(self, written: Mapping[int, WrittenState]) -> str:
        """Write the other files, and put the checkpoint in place. Returns its path."""
        files = [*self.unused, *(file for state in written.values() for file in state.files)]
        self._check_lengths(files)
        self._add_workers_values(written)
        files += [self._write(INDEX, self._index(files)), self._write(VALUES, packed(self.values))]
        there = {file.name for file in files}
        optimizers = {
            name: [file for at in range(len(places)) if (file := shard(name, at, len(places))) in there]
            for name, places in self.states.items()
        }
        models = [*self.files.values(), *([self.own_file] if self.unused else [])]
        path = self.new.put_in_place(
            {
                "model": models,
                "tied": self.names.tied,
                "optimizers": optimizers,
                "files": {file.name: {"bytes": file.bytes, "hashes": file.hashes} for file in files},
            }
        )
        self.note(path)
        size, seconds = bytes_text(sum(file.bytes for file in files)), time.monotonic() - self.began
        _log.info("checkpoint written: %s, %s in %.1f s", path, size, seconds)
        if self.keep is not None:
            try:
                self.new.remove_older(self.keep)
            except OSError as error:
                raise CheckpointError(
                    f"{path} was written, but an older checkpoint could not be removed: {error}"
                ) from error
        return path

    def _check_lengths(self, files: list[WrittenFile]) -> None:
        """Raise unless this process sees the files as the workers have written them."""
        for file in files:
            path = os.path.join(self.new.path, file.name)
            size = os.stat(path).st_size if os.path.exists(path) else None
            if size != file.bytes:
                raise CheckpointError(
                    f"a worker has written {file.bytes} bytes to {path}, and this host sees "
                    f"{'no such file' if size is None else f'{size}'}; give a folder that all hosts share"
                )

    def _add_workers_values(self, written: Mapping[int, WrittenState]) -> None:
        for name, optimizer in self.objects.optimizers.items():
            others: dict[str, Any] = {}
            for state in written.values():
                others.update(state.others.get(optimizer.number, {}))
            self.values["optimizers"][name]["others"] = others
        self.values["random"]["workers"] = [written[worker].random for worker in self.placed.workers]

    def _index(self, files: list[WrittenFile]) -> bytes:
        places = {name: self.files[worker] for worker, own in self.held.items() for name in own}
        places.update(dict.fromkeys(self.names.unused, self.own_file))
        total = sum(each.numel() * each.element_size() for each in self.names.tensors.values())
        return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1).encode()

    def _write(self, name: str, data: bytes) -> WrittenFile:
        return write_file(self.new.path, name, [(WHOLE_HASH, data)])


@contextmanager
def _refused(folder: str) -> Iterator[None]:
    """Turn an error of a worker, or of a file, into one that says that the checkpoint was not written."""
    try:
        yield
    except (OSError, StepError) as error:
        why = str(error).partition("\n\n")[0] if isinstance(error, StepError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"no checkpoint was written to {shortened(folder, 1000)}, and those that are there are as they were: "
            f"{shortened(why, 1000)}"
        ) from error
