"""What a checkpoint contains: where each tensor is, by the user's names, and the plain values.

A checkpoint of pippy's is a folder with

    model-00001-of-00002.safetensors …      parameters and buffers, each once, by its first name in the model
    model.safetensors.index.json            which file has which: what Hugging Face's tools read
    optimizer-00001-of-00002.safetensors …  states of the optimizer that was saved as ``optimizer``: "parameter/key"
    values.pt                               plain values, states of schedulers, options of optimizers, random numbers
    checkpoint.json                         the manifest: the names, lengths and hashes of these files, and tied names

Folders of safetensors files, with or without an index, can be read too, and so can one such file.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pippy.drivers.base.errors import CheckpointError
from pippy.drivers.files.manifest import INDEX, MODEL, VALUES, WHOLE_HASH, damaged, plain_json, read_manifest, unpacked
from pippy.drivers.files.run_folder import checkpoints_in
from pippy.drivers.files.safetensors_files import StoredTensor, read_header
from pippy.drivers.files.synced_files import check_hash, read_file, regular_size
from pippy.ir.base.compiling import original_of
from pippy.ir.base.public_calls import placing_words
from pippy.ir.base.readable import shortened

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
