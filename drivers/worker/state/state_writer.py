"""Writes what a worker holds to the files of a checkpoint: parameters, buffers, states of optimizers."""

import threading
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch

from pippy.drivers.files.safetensors_files import check_writable, write_tensors
from pippy.drivers.files.synced_files import not_there
from pippy.drivers.protocol.commands import Failure
from pippy.drivers.protocol.state import WriteState, WrittenState
from pippy.drivers.wire.received_values import Interrupted
from pippy.drivers.worker.state.snapshots import Snapshots

_Files = Mapping[str, Mapping[str, torch.Tensor]]  # by the name of the file, then of the tensor


class _Beside:
    """What is written on a thread beside the worker's, and what became of it."""

    def __init__(self, write: Callable[[], WrittenState] | None = None) -> None:
        self._write, self.outcome = write, cast(WrittenState | Failure | None, None)

    def run(self) -> None:
        """Write."""
        assert self._write is not None
        try:
            self.outcome = self._write()
        except BaseException as error:
            self.outcome = Failure(f"{type(error).__name__}: {error}", traceback.format_exc(), where="WriteState")
        self._write = None  # the copies are of no use any more


class StateWriter:
    """Writes for one driver, on the thread of the worker, or on one of its own while the worker goes on."""

    def __init__(self, snapshots: Snapshots, given_up: Callable[[], bool]) -> None:
        self._snapshots, self._given_up = snapshots, given_up
        self._beside = _Beside()

    def write(self, message: WriteState) -> WrittenState | None:
        """Write the files; with ``copy``, begin to."""
        wanted = {number: tuple(places.values()) for number, (_, places) in message.optimizers.items()}
        state = self._snapshots.snapshot(message.tensors.values(), wanted)
        files = {message.file: {name: state.tensors[place] for name, place in message.tensors.items()}}
        others: dict[int, dict[str, dict[str, Any]]] = {}
        for number, (file, places) in message.optimizers.items():
            own = state.optimizers[number]
            files[file], others[number] = _parted({name: own.get(place, {}) for name, place in places.items()})
        files = {name: tensors for name, tensors in files.items() if tensors}
        for tensors in files.values():
            check_writable(tensors)
        if not message.copy:
            return self._written(message, files, others, state.random, self._check)
        copied = {file: {name: _copied(each) for name, each in own.items()} for file, own in files.items()}
        self._beside = _Beside(partial(self._written, message, copied, others, state.random, lambda: None))
        threading.Thread(target=self._beside.run, name="pippy checkpoint", daemon=True).start()
        return None

    def ask(self) -> WrittenState | Failure | None:
        """What became of what is written on a thread; None while it is under way. Any thread may call this."""
        return self._beside.outcome

    def _check(self) -> None:
        if self._given_up():
            raise Interrupted("the checkpoint was given up")

    def _written(
        self, message: WriteState, files: _Files, others: Any, random: Any, goes_on: Callable[[], None]
    ) -> WrittenState:
        written = []
        for name, tensors in files.items():
            metadata = {**(message.tied if name == message.file else {}), "format": "pt"}
            try:
                written.append(write_tensors(message.folder, name, tensors, metadata, goes_on))
            except FileNotFoundError as error:
                raise not_there(message.folder) from error
        return WrittenState(tuple(written), others, random)


def _parted(states: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """The tensors of some states by "parameter/key", and what is no tensor by the parameters and keys."""
    tensors: dict[str, torch.Tensor] = {}
    others: dict[str, dict[str, Any]] = {}
    for name, state in states.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and isinstance(key, str) and "/" not in key:
                tensors[f"{name}/{key}"] = value
            else:
                others.setdefault(name, {})[key] = value
    return tensors, others


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
