"""What workers write to the files of a checkpoint, and read from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pippy.drivers.files.safetensors_files import StoredTensor
from pippy.drivers.files.synced_files import WrittenFile
from pippy.drivers.protocol.parameters import TensorLocation


@dataclass(frozen=True)
class WriteState:
    """Write what the worker holds to files in a folder, and give a `WrittenState`.

    ``tensors`` has the locations of parameters and buffers, by their names in ``file``. ``optimizers`` has for each
    optimizer, by its number, its file and the locations of its parameters. With ``copy``, copy all that, and write it while
    other commands run: `AskWritten` asks what became of it.
    """

    file: str
    folder: str
    tensors: Mapping[str, TensorLocation]
    tied: Mapping[str, str]
    optimizers: Mapping[int, tuple[str, Mapping[str, TensorLocation]]]
    copy: bool


@dataclass(frozen=True)
class WrittenState:
    """What a worker has written. ``others`` has what is no tensor of the states of optimizers, by their numbers and by the
    names of parameters; ``random`` the state of the worker's random numbers."""

    files: tuple[WrittenFile, ...]
    others: Mapping[int, Mapping[str, Mapping[str, Any]]]
    random: Mapping[str, Any]


@dataclass(frozen=True)
class AskWritten:
    """Urgent: give the `WrittenState` of what a driver's worker writes, a `Failure`, or None while it is under way."""

    driver: int


@dataclass(frozen=True)
class ReadState:
    """Read tensors from files, and keep them beside those that the worker has, until `TakeState`.

    ``tensors`` has where each parameter and buffer is read from; ``optimizers`` so for each item of the states of optimizers.
    """

    tensors: Mapping[TensorLocation, StoredTensor]
    optimizers: Mapping[int, Mapping[TensorLocation, Mapping[str, StoredTensor]]]


@dataclass(frozen=True)
class TakeState:
    """Take what was read, or drop it. ``others`` has what is no tensor of the states of optimizers."""

    take: bool
    others: Mapping[int, Mapping[TensorLocation, Mapping[str, Any]]] = field(default_factory=dict)
    random: Mapping[str, Any] | None = None
