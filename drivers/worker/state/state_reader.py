"""Reads a worker's part of a checkpoint: first all of it beside what the worker has, and then in its place."""

from collections.abc import Mapping

import torch

from pippy.drivers.base.errors import CheckpointError
from pippy.drivers.files.safetensors_files import StoredTensor
from pippy.drivers.files.synced_files import not_there
from pippy.drivers.protocol.state import ReadState, TakeState, TensorLocation, WorkerState
from pippy.drivers.worker.state.snapshots import Snapshots
from pippy.ir.base.trees import describe


class StateReader:
    """Reads for one driver. What was read is kept until it is taken or dropped, so that a fault in it changes nothing."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots, self._found = snapshots, WorkerState()

    def read(self, message: ReadState) -> None:
        """Read all, and check it."""
        self._found = WorkerState()
        try:
            self._found = WorkerState(
                self._tensors(message.tensors),
                {
                    number: {
                        place: {key: each.read() for key, each in state.items()} for place, state in states.items()
                    }
                    for number, states in message.optimizers.items()
                },
            )
        except FileNotFoundError as error:
            raise not_there(error.filename) from error

    def take(self, message: TakeState) -> None:
        """Put what was read where it belongs, or drop it."""
        found, self._found = self._found, WorkerState()
        if message.take:
            states = {
                number: {
                    place: {**read.get(place, {}), **others.get(place, {})} for place in read.keys() | others.keys()
                }
                for number, others in message.others.items()
                for read in [found.optimizers.get(number, {})]
            }
            self._snapshots.restore(WorkerState(found.tensors, states, message.random), is_kept=False)

    def _tensors(self, stored_at: Mapping[TensorLocation, StoredTensor]) -> dict[TensorLocation, torch.Tensor]:
        once: dict[StoredTensor, torch.Tensor] = {}  # copies of a parameter are read once
        for place, stored in stored_at.items():
            own = self._snapshots.tensor(place)
            if own.shape != stored.shape or own.dtype != stored.dtype:
                raise CheckpointError(
                    f"{place.name} is {describe(own)} on the worker, and in the checkpoint "
                    f"{describe(torch.empty(stored.shape, dtype=stored.dtype, device='meta'))}"
                )
            if stored not in once:
                once[stored] = stored.read()
        return {place: once[stored] for place, stored in stored_at.items()}
