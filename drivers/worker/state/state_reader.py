"""Reads a worker's part of a checkpoint: first all of it beside what the worker has, and then in its place."""

import socket
from typing import Any

import torch

from pippy.drivers.base.errors import CheckpointError
from pippy.drivers.files.safetensors_files import StoredTensor
from pippy.drivers.protocol.checkpoints import ReadState, TakeState
from pippy.drivers.protocol.parameters import TensorLocation
from pippy.drivers.protocol.states import WorkerState
from pippy.drivers.worker.state.snapshots import Snapshots
from pippy.ir.base.trees import describe


class StateReader:
    """Reads for one driver. What was read is kept until it is taken or dropped, so that a fault in it changes nothing."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._tensors: dict[TensorLocation, torch.Tensor] = {}
        self._states: dict[int, dict[TensorLocation, dict[str, Any]]] = {}

    def read(self, message: ReadState) -> None:
        """Read all, and check it."""
        self._drop()
        try:
            once: dict[StoredTensor, torch.Tensor] = {}  # copies of a parameter are read once
            for place, stored in message.tensors.items():
                own = self._snapshots.tensor(place)
                if own.shape != stored.shape or own.dtype != stored.dtype:
                    raise CheckpointError(
                        f"{place.name} is {describe(own)} on the worker, and in the checkpoint "
                        f"{describe(torch.empty(stored.shape, dtype=stored.dtype, device='meta'))}"
                    )
                self._tensors[place] = once[stored] if stored in once else once.setdefault(stored, stored.read())
            for number, states in message.optimizers.items():
                self._states[number] = {
                    place: {key: stored.read() for key, stored in state.items()} for place, state in states.items()
                }
        except FileNotFoundError as error:
            self._drop()
            raise CheckpointError(
                f"{error.filename} is not there on {socket.gethostname()}; give a folder on a file system that all hosts "
                "share, at the same path"
            ) from error
        except BaseException:
            self._drop()
            raise

    def take(self, message: TakeState) -> None:
        """Put what was read where it belongs, or drop it."""
        if message.take:
            states = {
                number: {
                    place: {**read.get(place, {}), **others.get(place, {})} for place in read.keys() | others.keys()
                }
                for number, others in message.others.items()
                for read in [self._states.get(number, {})]
            }
            self._snapshots.restore(WorkerState(self._tensors, states, message.random), is_kept=False)
        self._drop()

    def _drop(self) -> None:
        self._tensors, self._states = {}, {}
