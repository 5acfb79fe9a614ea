"""What of a checkpoint is read without running code: plain values, and the manifest, `checkpoint.json`.

The manifest says which files the checkpoint has, and has a hash of itself.

    {
     "format": "pippy checkpoint",
     "version": 2,
     "number": 3,                                              one more than the checkpoints before it in the run
     "model": ["model-00001-of-00001.safetensors"],            the files with parameters and buffers
     "tied": {"head.weight": "embedding.weight"},              further names of tensors
     "optimizers": {"adam": ["adam-00001-of-00001.safetensors"]},
     "files": {"values.pt": {"bytes": 3, "hashes": {"all": "2c26b4…"}}, …},
     "hash": "9f86d0…"                                         of this file as it was before the hash was added
    }

A manifest of version 1 has no hash. Nothing of a manifest is used before all of it is found to have this form.
"""

import hashlib
import io
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch

from pippy.drivers.base.errors import CheckpointError
from pippy.drivers.files.synced_files import read_file, regular_size
from pippy.ir.base.public_calls import is_whole
from pippy.ir.base.readable import shortened
from pippy.ir.base.trees import describe
from pippy.ir.run.random_state import RandomState

# Values that are read without running code: numbers, strings, tensors, and containers of them.
#
# They are written with `torch.save` and read with ``weights_only=True``, which makes no other objects, whatever a file has.


_DICTS = "values", "states", "optimizers", "extra", "random"  # what a checkpoint has by name


def packed(values: Mapping[str, Any]) -> bytes:
    """Values as bytes.

    >>> unpacked(packed({"step": 10}))
    {'step': 10}
    """
    stream = io.BytesIO()
    torch.save(dict(values), stream)
    return stream.getvalue()


def unpacked(data: bytes, path: str = "values") -> dict[str, Any]:
    """The values that `packed` made bytes of. ``path`` is their file. Raises a CheckpointError for other bytes.

    The error does not repeat torch's message, which advises to run the code in the file.

    >>> unpacked(b"something else", "values.pt")
    Traceback (most recent call last):
    pippy.drivers.base.errors.CheckpointError: values.pt was not written by pippy: ...
    """
    try:
        values = _loaded(data)
        dicts = [each for name, each in values.items() if name in _DICTS]
        if not all(isinstance(each, dict) and all(isinstance(key, str) for key in each) for each in (values, *dicts)):
            raise TypeError
    except Exception:  # torch and pickle have no one error
        raise CheckpointError(
            f"{path} was not written by pippy: it holds something other than numbers, strings, tensors and "
            "containers of them. Loading that may run code, so nothing was loaded; load another checkpoint"
        ) from None
    return values


def _loaded(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return found


def plain_json(text: bytes | bytearray) -> Any:
    """What some JSON says. Raises a ValueError for all else: a key that stands twice, objects that are nested too deep.

    >>> plain_json(b'{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: it is no JSON that can be read: a key stands twice in an object
    """
    try:
        return json.loads(text.decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON that can be read: {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice in an object")
    return found


def check_plain(name: str, value: Any) -> None:
    """Raise unless a value can be written, and read again without running code.

    >>> check_plain("step", 10)
    >>> check_plain("step", print)
    Traceback (most recent call last):
    pippy.drivers.base.errors.CheckpointError: step=<built-in function print> cannot be saved ...
    """
    try:
        _loaded(packed({name: value}))
    except Exception as error:  # pickle has no one error
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{name}={describe(value)} cannot be saved ({why}): a checkpoint can only hold numbers, strings, "
            "tensors and containers of them, which are read without running code; give these, or an object whose "
            "state_dict() holds only these"
        ) from error


def random_values(state: RandomState) -> dict[str, Any]:
    """The state of random number generators as plain values. `random_state` is the inverse.

    >>> import torch
    >>> random_state(unpacked(packed(random_values(RandomState.current())))).is_current()
    True
    """
    pythons, numpys = state.pythons, state.numpys
    return {
        "python": None if pythons is None else (pythons[0], _tensor(pythons[1]), pythons[2]),
        "torch": state.cpu,
        "devices": list(state.devices.values()),
        "numpy": None if numpys is None else (numpys[0], _tensor(numpys[1].tolist()), *map(float, numpys[2:])),
    }


def random_state(values: Mapping[str, Any], devices: tuple[Any, ...] = ()) -> RandomState:
    """The inverse of `random_values`. The states of GPUs become those of ``devices``."""
    pythons, numpys = values["python"], values["numpy"] if "numpy" in sys.modules else None
    if pythons is not None:
        pythons = pythons[0], tuple(pythons[1].tolist()), pythons[2]
    if numpys is not None:
        import numpy

        name, keys, position, has_gauss, gauss = numpys
        numpys = name, numpy.array(keys.tolist(), dtype=numpy.uint32), int(position), int(has_gauss), gauss
    return RandomState(pythons, values["torch"], dict(zip(devices, values["devices"])), numpys)


def _tensor(numbers: Any) -> torch.Tensor:
    """Numbers as a tensor: to pickle them one by one takes long."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


MANIFEST, MODEL, VALUES = "checkpoint.json", "model", "values.pt"
INDEX = f"{MODEL}.safetensors.index.json"
FORMAT, VERSION = "pippy checkpoint", 2
WHOLE_HASH = "all"  # the hash of a file that is hashed as one piece
_MOST = 1 << 27  # bytes; the manifest of a checkpoint with 700,000 tensors has fewer
_SCHEMA = {  # [kind] is a list of any length, and {...: kind} an object with any keys
    "format": str,
    "version": int,
    "number": int,
    "model": [str],
    "tied": {...: str},
    "optimizers": {...: [str]},
    "files": {...: {"bytes": int, "hashes": {...: str}}},
}
_WORDS = {str: "a string", int: "a whole number below 2**63", list: "a list", dict: "an object"}


def sealed(text: bytes) -> bytes:
    """The JSON of an object with one entry a line, and the hash of this text as a further entry.

    >>> print(sealed(b'{\\n "a": 1\\n}').decode())
    {
     "a": 1,
     "hash": "4c7b..."
    }
    """
    return b'%s,\n "hash": "%s"\n}' % (text[:-2], hashlib.sha256(text).hexdigest().encode())


def damaged(folder: str, why: str, file: str = MANIFEST) -> CheckpointError:
    """The error of a checkpoint that has a file which is not as pippy writes it."""
    return CheckpointError(
        f"{os.path.join(folder, file)} is damaged, or was not written by pippy: {why}. It may belong to the newest "
        f"checkpoint of its run; load another checkpoint by its own path, or move {os.path.basename(folder)} out of the run"
    )


def read_manifest(folder: str) -> dict[str, Any] | None:
    """The content of a folder's `checkpoint.json`; None if the folder is no checkpoint of pippy's."""
    path = os.path.join(folder, MANIFEST)
    try:
        if regular_size(path) > _MOST:
            raise ValueError(f"it has more than {_MOST} bytes")
        return _checked(read_file(path))
    except (FileNotFoundError, NotADirectoryError):
        if all(os.path.lexists(os.path.join(folder, name)) for name in (INDEX, VALUES)):
            raise damaged(folder, f"it is not there, and {INDEX} and {VALUES} are") from None
        return None
    except (ValueError, OSError) as error:
        raise damaged(folder, str(error)) from error


def _checked(text: bytes) -> dict[str, Any]:
    """The content of a manifest. Raises a ValueError that says what is wrong with it."""
    content = plain_json(text)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f'it does not say "format": "{FORMAT}"')
    version = content.get("version")
    if version not in (1, VERSION):
        raise ValueError(f"version is {_brief(version)}, not 1 or {VERSION}; if a newer pippy wrote it, update pippy")
    if version == VERSION and sealed(text.rpartition(b',\n "hash"')[0] + b"\n}") != text:
        raise ValueError("the hash of its bytes is not the hash of what was written")
    _check_kind(content, _SCHEMA if version == 1 else {**_SCHEMA, "hash": str}, "manifest")
    shards = [name for names in content["optimizers"].values() for name in names]
    named, hashed = sorted([*content["model"], *shards, INDEX, VALUES]), sorted(content["files"])
    if named != hashed or any(os.path.basename(name) != name for name in named):
        raise ValueError(f"files and the other lists differ at {_brief(min({*named} ^ {*hashed}, default=named[0]))}")
    return content


def _check_kind(value: Any, kind: Any, at: str) -> None:
    """Raise a ValueError if a value is not of its kind in the schema."""
    wanted: Any = kind if isinstance(kind, type) else type(kind)
    if not isinstance(value, wanted) or (kind is int and not (is_whole(value, 0) and value < 1 << 63)):
        raise ValueError(f"{at} is {_brief(value)}, and must be {_WORDS[wanted]}")
    if isinstance(kind, list):
        value, kind = dict(enumerate(value)), {...: kind[0]}
    if isinstance(kind, dict):
        kinds = dict.fromkeys(value, kind[...]) if ... in kind else kind
        for key in value.keys() ^ kinds.keys():
            raise ValueError(f"{at} {'lacks' if key in kinds else 'has, and must not have,'} {_brief(key)}")
        for key, each in value.items():
            _check_kind(each, kinds[key], f"{at}[{_brief(key)}]")


def _brief(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, dict | list) else shortened(repr(value), 60)
