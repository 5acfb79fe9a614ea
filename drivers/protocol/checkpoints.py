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

    ``tensors`` has the locations of parameters and buffers, by their names in ``file``. ``optimizers`` has the file of each
    optimizer, by its number, and the locations of its parameters. With ``copy``, the worker copies all that, and writes the
    copies while other commands run; `AskWritten` asks for the result.
    """

    file: str
    folder: str
    tensors: Mapping[str, TensorLocation]
    tied: Mapping[str, str]
    optimizers: Mapping[int, tuple[str, Mapping[str, TensorLocation]]]
    copy: bool


@dataclass(frozen=True)
class WrittenState:
    """What a worker has written. ``random`` is the state of its random numbers. ``others`` has what is no tensor in the states
    of optimizers, by the optimizer's number and the parameter's name."""

    files: tuple[WrittenFile, ...]
    others: Mapping[int, Mapping[str, Mapping[str, Any]]]
    random: Mapping[str, Any]


@dataclass(frozen=True)
class AskWritten:
    """Urgent: answer with the `WrittenState` of a `WriteState` with ``copy``, with a `Failure`, or None while it is written."""

    driver: int


@dataclass(frozen=True)
class ReadState:
    """Read tensors from files, and keep them beside those that the worker has, until `TakeState`.

    ``tensors`` says where to read each parameter and buffer, ``optimizers`` where to read each item of their states.
    """

    tensors: Mapping[TensorLocation, StoredTensor]
    optimizers: Mapping[int, Mapping[TensorLocation, Mapping[str, StoredTensor]]]


@dataclass(frozen=True)
class TakeState:
    """Use what was read, or drop it. ``others`` has what is no tensor in the states of optimizers."""

    take: bool
    others: Mapping[int, Mapping[TensorLocation, Mapping[str, Any]]] = field(default_factory=dict)
    random: Mapping[str, Any] | None = None
