"""What a checkpoint contains: where each tensor is, by the user's names, and the plain values.

A checkpoint of pippy's is a folder with

    model-00001-of-00002.safetensors …      parameters and buffers, each once, by its first name in the model
    model.safetensors.index.json            which file has which: what Hugging Face's tools read
    optimizer-00001-of-00002.safetensors …  states of the optimizer that was saved as ``optimizer``: "parameter/key"
    values.pt                               plain values, states of schedulers, options of optimizers, random numbers
    checkpoint.json                         the names, lengths and hashes of these files, and tied names

Folders of safetensors files, with or without an index, can be read too, and so can one such file.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pippy.drivers.base.errors import CheckpointError
from pippy.drivers.files.plain_values import unpacked
from pippy.drivers.files.run_folder import MANIFEST, checkpoints_in, read_manifest
from pippy.drivers.files.safetensors_files import StoredTensor, read_header
from pippy.drivers.files.synced_files import check_hash, read_file
from pippy.ir.base.readable import shortened

MODEL = "model"
RANDOM_STATE = "random_state"
TAKEN = MODEL, RANDOM_STATE, "strict"  # names that mean something else in `load`
VALUES = "values.pt"
INDEX = f"{MODEL}.safetensors.index.json"
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
    if os.path.isfile(path):
        return Contents(path, read_header(path))
    if not os.path.isdir(path):
        raise CheckpointError(
            f"{shortened(path, 1000)} is not there, or this host does not see it; give the folder that save() was given, one "
            "of the checkpoints in it, or a folder of safetensors files"
        )
    manifest = read_manifest(path)
    if manifest is not None:
        return _own(path, manifest)
    saved = checkpoints_in(path)
    if saved:
        return contents_of(saved[-1])
    return Contents(path, _of_files(path, _files_of_model(path)))


def _own(path: str, manifest: Mapping[str, Any]) -> Contents:
    try:
        return _listed_in(manifest, path)
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # it is no dict where one is written
        why = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{os.path.join(path, MANIFEST)} is not as pippy writes it ({why}); load another checkpoint"
        ) from error


def _listed_in(manifest: Mapping[str, Any], path: str) -> Contents:
    files = manifest["files"]
    for name, noted in files.items():
        if os.path.basename(name) != name:
            raise CheckpointError(
                f"{path} lists {name!r}, which is not the name of a file in its folder, so pippy has not written "
                "it; load another checkpoint"
            )
        try:
            size = os.stat(os.path.join(path, name)).st_size
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} lacks {name}, which its checkpoint.json lists; load another checkpoint"
            ) from None
        if size != noted["bytes"]:
            raise CheckpointError(
                f"{os.path.join(path, name)} has {size} bytes, and {noted['bytes']} were written; load another checkpoint"
            )
    values = read_file(os.path.join(path, VALUES))
    check_hash(os.path.join(path, VALUES), values, files[VALUES]["hashes"]["all"])
    optimizers: dict[str, dict[str, dict[str, StoredTensor]]] = {}
    for name, shards in manifest["optimizers"].items():
        states = optimizers[name] = {}
        for key, stored in _of_files(path, shards, files).items():
            parameter, _, item = key.rpartition("/")
            states.setdefault(parameter, {})[item] = stored
    plain = unpacked(values, os.path.join(path, VALUES))
    return Contents(path, _of_files(path, manifest["model"], files), manifest["tied"], optimizers, plain)


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
        names = sorted(set(json.loads(read_file(os.path.join(path, index)))["weight_map"].values()))
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
