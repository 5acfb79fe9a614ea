"""Values that are read without running code: numbers, strings, tensors, and containers of them.

They are written with `torch.save` and read with ``weights_only=True``, which makes no other objects, whatever a file has.
"""

import io
import json
import sys
from collections.abc import Mapping
from typing import Any

import torch

from pippy.drivers.base.errors import CheckpointError
from pippy.ir.base.trees import describe
from pippy.ir.run.random_state import RandomState

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
