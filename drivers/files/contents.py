"""What a checkpoint contains: where each tensor is, by the user's names, and the plain values.

A checkpoint of pippy's is a folder with

    model-00001-of-00002.safetensors …      parameters and buffers, each once, by its first name in the model
    model.safetensors.index.json            which file has which: what Hugging Face's tools read
    optimizer-00001-of-00002.safetensors …  states of the optimizer that was saved as ``optimizer``: "parameter/key"
    values.pt                               plain values, states of schedulers, options of optimizers, random numbers
    checkpoint.json                         the manifest: the names, lengths and hashes of these files, and tied names

Folders of safetensors files, with or without an index, can be read too, and so can one such file.

The folder of a run: its checkpoints, each in a folder of its own. A checkpoint is complete, or it is not there.

    run/
      step-10/               a checkpoint
      step-20/               a later one
      .saving-step-30-5f0c/  one that is being written; one rename makes it step-30
      .lock                  locked by the process that writes

A process that is killed leaves a folder whose name begins with a dot. Nobody reads it, and the next save removes it.
Checkpoints are numbered, each with one more than those before it: the largest number is the newest checkpoint.
"""

import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pippy.drivers.base.errors import CheckpointError
from pippy.drivers.files.manifest import (
    FORMAT,
    INDEX,
    MANIFEST,
    MODEL,
    VALUES,
    VERSION,
    WHOLE_HASH,
    damaged,
    plain_json,
    read_manifest,
    sealed,
    unpacked,
)
from pippy.drivers.files.safetensors_files import StoredTensor, read_header
from pippy.drivers.files.synced_files import (
    check_hash,
    open_unbuffered,
    read_file,
    regular_size,
    sync_folder,
    write_file,
)
from pippy.ir.base import source
from pippy.ir.base.compiling import original_of
from pippy.ir.base.public_calls import placing_words
from pippy.ir.base.readable import shortened

_SAVING, _REMOVED, _LOCK = ".saving-", ".removed-", ".lock"


def checkpoints_in(folder: str) -> list[str]:
    """The paths of a run's checkpoints, the oldest first. Raises if one is damaged: it may be the newest.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoints_in(folder)
    []
    """
    checkpoints, damaged = _numbered_checkpoints(folder)
    for error in damaged:
        raise error
    return [path for _, path in checkpoints]


def _numbered_checkpoints(folder: str) -> tuple[list[tuple[int, str]], list[CheckpointError]]:
    """The checkpoints with their numbers, in this order, and the errors of those that are damaged."""
    checkpoints, damaged = [], []
    for entry in os.scandir(folder):
        if entry.is_dir() and not entry.name.startswith("."):
            try:
                if manifest := read_manifest(entry.path):
                    checkpoints.append((manifest["number"], entry.path))
            except CheckpointError as error:
                damaged.append(error)
    return sorted(checkpoints), damaged


class NewCheckpoint:
    """A checkpoint that is being written to ``path``, beside those of a run. Only one can be at a time.

    `put_in_place` makes it a checkpoint of the run. If the context ends before that, what was written is removed.
    """

    def __init__(self, folder: str, step: int | None) -> None:
        os.makedirs(folder, exist_ok=True)
        self.folder = folder
        self._lock: FileIO | None = _locked(folder)
        try:
            self._remove_left_over()
            there, damaged = _numbered_checkpoints(folder)
            for error in damaged:  # or the script would learn of them when it is started again, and cannot load the run
                source.warn(str(error))
            self.number = 1 + max((number for number, _ in there), default=0)
            self.name = self._free_name("save" if step is None else "step", self.number if step is None else step)
            self.path = os.path.join(folder, f"{_SAVING}{self.name}-{secrets.token_hex(4)}")
            os.mkdir(self.path)
        except BaseException:
            self._unlock()
            raise

    def __enter__(self) -> "NewCheckpoint":
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()

    def _free_name(self, word: str, number: int) -> str:
        """A name for a checkpoint of this step. If there is one already, the name gets a second number, and the other stays."""
        name, again = f"{word}-{number}", 1
        while os.path.lexists(os.path.join(self.folder, name)):
            again += 1
            name = f"{word}-{number}.{again}"
        return name

    def put_in_place(self, content: Mapping[str, Any]) -> str:
        """Write the manifest, ``content``, and rename the folder. All other files must be on the disk."""
        manifest = {"format": FORMAT, "version": VERSION, "number": self.number, **content}
        write_file(self.path, MANIFEST, [(WHOLE_HASH, sealed(json.dumps(manifest, indent=1).encode()))])
        read_manifest(self.path)  # it raises: a checkpoint that cannot be loaded must not be put in place
        sync_folder(self.path)
        place = os.path.join(self.folder, self.name)
        os.rename(self.path, place)
        sync_folder(self.folder)
        return place

    def remove_older(self, keep: int) -> None:
        """Remove the oldest checkpoints of the run, so that ``keep`` are left."""
        for _, path in _numbered_checkpoints(self.folder)[0][:-keep]:
            # First the name, so that nobody takes what is left of it for a checkpoint.
            gone = os.path.join(self.folder, f"{_REMOVED}{secrets.token_hex(4)}")
            os.rename(path, gone)
            shutil.rmtree(gone)

    def end(self) -> None:
        """Remove what was not put in place, and let others save."""
        if self._lock is not None:
            try:
                if os.path.isdir(self.path):
                    shutil.rmtree(self.path, ignore_errors=True)
            finally:
                self._unlock()

    def _remove_left_over(self) -> None:
        """Remove the folders that killed processes left. Nobody else writes, as this process has the lock."""
        for name in os.listdir(self.folder):
            if name.startswith((_SAVING, _REMOVED)):
                shutil.rmtree(os.path.join(self.folder, name), ignore_errors=True)

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()


def _locked(folder: str) -> FileIO:
    file = open_unbuffered(os.path.join(folder, _LOCK), "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise CheckpointError(
            f"another driver or another process is saving to {folder} now; give each run a folder of its own"
        ) from None
    except OSError:  # a file system without locks: then nobody looks
        pass
    return file


RANDOM_STATE = "random_state"
TAKEN = MODEL, RANDOM_STATE, "strict"  # names that mean something else in `load`
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True)
class Contents:
    """Where the tensors of a checkpoint are, and its plain values.

    ``tied`` maps further names of a tensor to the name that it is stored by. ``optimizers`` has the states by the name that an
    optimizer was saved by, the parameter's, and the state's. ``values`` are those of `values.pt`; empty if it is not pippy's.
    """

    path: str
    model: Mapping[str, StoredTensor]
    tied: Mapping[str, str] = field(default_factory=dict)
    optimizers: Mapping[str, Mapping[str, Mapping[str, StoredTensor]]] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)


def shard(name: str, number: int, count: int) -> str:
    """The name of file ``number`` of ``count``.

    >>> shard("model", 0, 2)
    'model-00001-of-00002.safetensors'
    """
    return f"{name}-{number + 1:05}-of-{count:05}.safetensors"


def contents_of(path: str | os.PathLike[str]) -> Contents:
    """The contents of a checkpoint, of the newest one of a run, of a folder of safetensors files, or of one such file."""
    path = os.path.abspath(os.fspath(path))
    if not os.path.exists(path):
        raise CheckpointError(
            f"{shortened(path, 1000)} is not there, or this host does not see it; give the folder that save() was given, one "
            "of the checkpoints in it, or a folder of safetensors files"
        )
    try:
        if not os.path.isdir(path):
            return Contents(path, read_header(path))
        if manifest := read_manifest(path):
            return _listed_in(manifest, path)
        if saved := checkpoints_in(path):
            return contents_of(saved[-1])
        return Contents(path, _of_files(path, _files_of_model(path)))
    except OSError as error:
        raise CheckpointError(f"nothing was loaded: {error}; load another checkpoint by its own path") from error


def _listed_in(manifest: Mapping[str, Any], path: str) -> Contents:
    files = manifest["files"]
    for name, noted in files.items():
        try:
            size = regular_size(os.path.join(path, name))
        except (OSError, ValueError) as error:  # a ValueError: there can be no file of this name
            raise damaged(path, f"it lists {name!r}, which this checkpoint lacks ({error})") from error
        if size != noted["bytes"]:
            raise damaged(path, f"it has {size} bytes, and {noted['bytes']} were written", name)
    values = read_file(os.path.join(path, VALUES))
    check_hash(os.path.join(path, VALUES), values, files[VALUES]["hashes"].get(WHOLE_HASH, "no hash"))
    optimizers: dict[str, dict[str, dict[str, StoredTensor]]] = {}
    for name, shards in manifest["optimizers"].items():
        states = optimizers[name] = {}
        for key, stored in _of_files(path, shards, files).items():
            parameter, _, item = key.rpartition("/")
            states.setdefault(parameter, {})[item] = stored
    plain = unpacked(values, os.path.join(path, VALUES))
    if optimizers.keys() != (held := plain.get("optimizers", {})).keys():
        raise damaged(path, f"it has states of optimizers {list(optimizers)}, and {VALUES} options of {list(held)}")
    model = _of_files(path, manifest["model"], files)
    if wrong := [name for name, stored in manifest["tied"].items() if name in model or stored not in model]:
        raise damaged(path, f"tied has {wrong[0]!r}, which is not a further name of a tensor of the model")
    return Contents(path, model, manifest["tied"], optimizers, plain)


def _of_files(path: str, names: Iterable[str], noted: Mapping[str, Any] | None = None) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        for key, stored in read_header(
            os.path.join(path, name), noted[name]["hashes"] if noted is not None else None
        ).items():
            if key in tensors:
                raise CheckpointError(
                    f"{path} has {key!r} in two files, {os.path.basename(tensors[key].path)} and {name}; remove one "
                    "of them from the folder, or give the path of one file"
                )
            tensors[key] = stored
    return tensors


def _files_of_model(path: str) -> list[str]:
    """The names of the safetensors files that hold a model."""
    there = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
    indexes = sorted(name for name in os.listdir(path) if name.endswith(".safetensors.index.json"))
    if INDEX in indexes or len(indexes) == 1:
        return _listed(path, INDEX if INDEX in indexes else indexes[0], there)
    if f"{MODEL}.safetensors" in there:
        return [f"{MODEL}.safetensors"]
    if not there:
        inside = ", ".join(sorted(os.listdir(path))[:8]) or "nothing"
        raise CheckpointError(
            f"{path} is no checkpoint: it has neither checkpoints of pippy nor safetensors files in it, but {inside}; give the "
            "folder that save() was given (what torch.save wrote is read with torch.load(path, weights_only=True), and loaded "
            "with driver.load_state_dict)"
        )
    _check_complete(path, there)
    return there


def _listed(path: str, index: str, there: list[str]) -> list[str]:
    try:
        names = sorted(set(plain_json(read_file(os.path.join(path, index)))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{os.path.join(path, index)} cannot be read: {type(error).__name__}: {error}") from error
    lacking = [name for name in names if name not in there]
    if lacking:
        raise CheckpointError(
            f"{path} lacks {', '.join(lacking)}, which {index} lists; it was copied or downloaded in part: get the rest"
        )
    return names


def _check_complete(path: str, there: list[str]) -> None:
    """Raise if one of several numbered files is missing."""
    for name in there:
        match = _SHARD.fullmatch(name)
        wanted = [shard(match[1], number, int(match[3])) for number in range(int(match[3]))] if match else []
        lacking = [each for each in wanted if each not in there]
        if lacking:
            raise CheckpointError(
                f"{path} has {name}, and lacks {', '.join(lacking[:8])}; it was copied or downloaded in part: get the rest"
            )


# Checkpoints for plain PyTorch, in a process without workers.


@placing_words()
def load_checkpoint(path: str | os.PathLike[str], /, **objects: Any) -> dict[str, Any]:
    """Read a checkpoint in plain PyTorch, without workers. Returns what was saved, by the names given to `driver.save`.

    Give objects by name, and their state is loaded: ``model=`` a module; optimizers of torch, schedulers and other objects by
    the names that they had in `driver.save`. An optimizer's state finds its parameters by their names in the model. Everything
    else is returned: values as they were, and state dicts. In the state dict of an optimizer, parameters are numbered in the
    order of its groups, and ``param_names`` of each group has their names.

    The path is that of a checkpoint, or of a run, for its newest checkpoint, or of a folder of safetensors files, which has the
    model alone.

    >>> import tempfile, torch
    >>> from pippy import Pipe, PipelineDriver1F1B, load_checkpoint, local_cluster
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with local_cluster(2, threads=1) as cluster:
    ...         driver = PipelineDriver1F1B(Pipe.from_sequential(model, torch.nn.MSELoss()), cluster)
    ...         path = driver.save(folder, step=10)
    ...     saved = load_checkpoint(folder)
    ...     print(load_checkpoint(folder, model=model))
    {'step': 10}
    >>> saved["step"], torch.equal(saved["model"]["1.weight"], model[1].weight)
    (10, True)
    """
    contents = contents_of(path)
    saved = _state_dicts(contents)
    optimizers = {name: each for name, each in objects.items() if isinstance(each, Optimizer)}
    for name, each in objects.items():
        if name not in saved or not hasattr(each, "load_state_dict"):
            raise CheckpointError(
                f"{contents.path} has no state for {name}={type(each).__name__}; it has {', '.join(map(repr, saved))}"
            )
    states = {name: _ordered(name, each, saved, objects.get(MODEL)) for name, each in optimizers.items()}
    for name, each in objects.items():
        each.load_state_dict(states.get(name, saved.pop(name)))
    return saved


def _state_dicts(contents: Contents) -> dict[str, Any]:
    model = {name: stored.read() for name, stored in contents.model.items()}
    model.update({name: model[stored] for name, stored in contents.tied.items()})
    values = contents.values
    model.update(values.get("extra", {}))
    state_dicts = {MODEL: model, **values.get("states", {}), **values.get("values", {})}
    for name, saved in values.get("optimizers", {}).items():
        tensors, others = contents.optimizers.get(name, {}), saved["others"]
        states = {
            parameter: {
                **{key: stored.read() for key, stored in tensors.get(parameter, {}).items()},
                **others.get(parameter, {}),
            }
            for parameter in tensors.keys() | others.keys()
        }
        state_dicts[name] = _numbered(states, saved["groups"], [group["params"] for group in saved["groups"]])
    return state_dicts


def _numbered(
    states: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """The state dict of an optimizer, as torch has it: parameters are numbered by group, in the order of ``names``."""
    numbers = {name: number for number, name in enumerate(name for group_names in names for name in group_names)}
    return {
        "state": {number: states[name] for name, number in numbers.items() if name in states},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group_names], "param_names": list(group_names)}
            for group, group_names in zip(groups, names)
        ],
    }


def _ordered(name: str, optimizer: Optimizer, saved: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """A saved state dict of an optimizer, with parameters in the order that ``optimizer`` has."""
    if not isinstance(model, nn.Module):
        raise CheckpointError(
            f"the state of {name}={type(optimizer).__name__} has parameters by their names in a model; give model= too"
        )
    names = {id(parameter): path for path, parameter in original_of(model).named_parameters()}
    mine = [[names.get(id(each), "?") for each in group["params"]] for group in optimizer.param_groups]
    groups = saved[name]["param_groups"]
    if [sorted(group) for group in mine] != [sorted(group["param_names"]) for group in groups]:
        raise CheckpointError(
            f"{name}= has groups of {[len(group) for group in mine]} parameters, which do not match the saved groups of "
            f"{[len(group['params']) for group in groups]}; make it with the groups that the driver's optimizer had"
        )
    states = {
        path: saved[name]["state"].get(number)
        for group in groups
        for path, number in zip(group["param_names"], group["params"])
    }
    return _numbered({path: state for path, state in states.items() if state is not None}, groups, mine)
