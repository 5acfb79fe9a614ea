"""The manifest of a checkpoint, `checkpoint.json`: which files the checkpoint has, and a hash of the manifest itself.

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
import os
from typing import Any

from pippy.drivers.base.errors import CheckpointError
from pippy.drivers.files.plain_values import plain_json
from pippy.drivers.files.synced_files import read_file, regular_size
from pippy.ir.base.checked import is_whole
from pippy.ir.base.readable import shortened

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
