"""What a worker holds of the model for a driver, and the messages that make, read and change it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pippy.drivers.base.errors import DriverError
from pippy.drivers.files.safetensors_files import StoredTensor
from pippy.drivers.files.synced_files import WrittenFile
from pippy.drivers.plan.language.instructions import Instruction
from pippy.drivers.protocol.commands import NeedsPeers, others_in
from pippy.drivers.wire.pickling import Pickled
from pippy.ir.base.trees import tensors
from pippy.ir.run.copies import GradientHooks

# Where a worker has tensors of the model, and making them.


@dataclass(frozen=True)
class TensorLocation:
    """Where a worker finds a parameter or buffer: the name of the stage (or `_loss`), and the tensor's name in that stage."""

    call: str
    name: str


@dataclass(frozen=True)
class ElsewhereTensor:
    """Stands for a tensor of the model that this worker does not make."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "ElsewhereTensor":
        """What stands for a tensor of the model."""
        return cls(tuple(tensor.shape), tensor.dtype, isinstance(tensor, nn.Parameter))

    def made(self) -> torch.Tensor:
        """The tensor without numbers that takes its place."""
        tensor = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return nn.Parameter(tensor, requires_grad=False) if self.is_parameter else tensor


def unreadable(name: str) -> torch.Tensor:
    """What takes the place of a tensor that this worker does not have, in code that holds it and should not read it.

    >>> unreadable("a.weight").sum()
    Traceback (most recent call last):
    pippy.drivers.base.errors.DriverError: code on this worker reads 'a.weight', which is not here: ...
    """
    tensor = torch.empty(0).as_subclass(UnreadableTensor)
    tensor.__dict__["known_as"] = name
    return tensor


class UnreadableTensor(torch.Tensor):
    """See `unreadable`."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = next(each.__dict__["known_as"] for each in tensors((args, kwargs)) if type(each) is cls)
        raise DriverError(
            f"code on this worker reads {name!r}, which is not here: pipeline() has not seen that the code reaches it. Name "
            "the attribute in the code, as in model.layer.weight, or let a module register what it reads; then call pipeline()"
        )


@dataclass(frozen=True)
class Initialize:
    """Initialize the tensors with these names, the user's, at these locations: one location for each copy on the worker.

    ``model`` has the model, in which a name stands for each tensor, and the function that initializes its modules. The answer
    lists the names of the tensors that nothing has written.
    """

    model: Pickled
    tensors: Mapping[str, Sequence[TensorLocation]]
    seed: int


# What a worker holds for a driver, and how the controller takes it and puts it in place.


@dataclass(frozen=True)
class WorkerState:
    """Parameters and buffers, the states of optimizers by their numbers, and random numbers: all of them, or some.

    It goes to the files of a checkpoint, to a neighbour, or to the controller, and comes from there.
    """

    tensors: Mapping[TensorLocation, torch.Tensor] = field(default_factory=dict)
    optimizers: Mapping[int, Mapping[TensorLocation, Mapping[str, Any]]] = field(default_factory=dict)
    random: Any = None


@dataclass(frozen=True)
class GiveState:
    """Give the `WorkerState` at these locations: that of tensors, and that of optimizers for parameters."""

    tensors: tuple[TensorLocation, ...] = ()
    optimizers: Mapping[int, tuple[TensorLocation, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class RestoreState:
    """Put a state in place. An optimizer that is in it has no other state afterwards."""

    state: WorkerState


# The gradients on the workers, and which worker adds up those of copies.


@dataclass(frozen=True)
class ReplicatedParameter:
    """A parameter with copies: the user's name, and the worker and location of each copy.

    Copies are in the order of the replicas of the pipeline, and within a replica in that of the stages."""

    name: str
    copies: tuple[tuple[int, TensorLocation], ...]


@dataclass(frozen=True)
class GradientBucket:
    """Parameters with copies on the same workers. The worker ``owner`` adds up their gradients together, as a part of the
    ``sum`` of a program."""

    owner: int
    parameters: tuple[ReplicatedParameter, ...]
    sum: str = ""

    @property
    def workers(self) -> list[int]:
        """The workers that have copies."""
        return list(dict.fromkeys(worker for worker, _ in self.parameters[0].copies))


@dataclass(frozen=True)
class FetchGradients:
    """Give the gradients of the parameters at these locations; with ``norm_type``, the norm of each.

    With ``reduce``, add up those of replicated parameters first.
    """

    locations: tuple[TensorLocation, ...]
    norm_type: float | None = None
    reduce: bool = False


@dataclass(frozen=True)
class ChangeGradients:
    """Multiply all gradients by ``factor``, and clamp every element between -limit and ``limit``.

    With ``reduce``, add up those of replicated parameters first.
    """

    reduce: bool
    factor: float = 1.0
    limit: float | None = None


# The hooks on the gradients of parameters, as a worker is told them.


@dataclass(frozen=True)
class NamedHooks:
    """The hooks of the parameter that has this name in the user's model."""

    name: str
    hooks: GradientHooks


@dataclass(frozen=True)
class WorkerHooks:
    """What one worker is told of the hooks of a model.

    ``places`` has the parameters on the worker that have hooks, and whether some hooks are called after the accumulation.
    ``functions`` has the `NamedHooks` of those whose gradients become complete on this worker, by location; None if none do.
    """

    places: Mapping[TensorLocation, bool] = field(default_factory=dict)
    functions: Pickled | None = None

    def is_like(self, other: "WorkerHooks") -> bool:
        """Whether these are the same hooks, and hold the same objects."""
        one, two = self.functions, other.functions
        return self.places == other.places and (one is two if one is None or two is None else same_bytes(one, two))


def same_bytes(one: Pickled, other: Pickled) -> bool:
    """Whether two objects were pickled alike, with the same numbers in their tensors.

    >>> same_bytes(Pickled(b"", [torch.zeros(1)]), Pickled(b"", [torch.ones(1)]))
    False
    """
    pairs = zip(one.tensors, other.tensors)
    return (
        one.data == other.data and len(one.tensors) == len(other.tensors) and all(torch.equal(*each) for each in pairs)
    )


# Optimizers on the workers.


@dataclass(frozen=True)
class MakeOptimizer:
    """Make an optimizer, and keep it under a number. A group has the locations of its parameters, and its options.

    With ``master_dtype`` the optimizer updates copies, of this dtype, of the parameters that have another dtype. If there are
    replicas of the pipeline, ``names`` are those of all its parameters. If its state is divided, a worker has only that of the
    parameters whose gradients it adds up, and ``passes_on`` says how it sends these to other workers, and takes theirs.
    ``attributes`` are those that the script has set on parameters, by location: an optimizer may read them.
    """

    optimizer: int
    factory: Pickled
    groups: tuple[tuple[tuple[TensorLocation, ...], Mapping[str, Any]], ...]
    master_dtype: torch.dtype | None = None
    names: tuple[str, ...] = ()
    passes_on: tuple[Instruction, ...] | None = None
    attributes: Mapping[TensorLocation, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerStep:
    """Run an optimizer's step. ``groups`` has the options of each group, or None if they did not change; ``attributes`` in the
    same way has those of parameters."""

    optimizer: int
    groups: tuple[Mapping[str, Any], ...] | None
    reduce: bool
    attributes: Mapping[TensorLocation, Mapping[str, Any]] | None = None


# What workers write to the files of a checkpoint, and read from them.


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


# A driver's state on its workers is set aside while a step is tried, and is put back after it.


@dataclass(frozen=True)
class HoldState:
    """Set aside the driver's state on the worker, without its programs. The driver goes on without gradients.

    With ``put_back``, put back what was set aside: all changes since then are undone.
    """

    put_back: bool = False


# Copies of what workers hold, in the memory of their neighbours.


@dataclass(frozen=True)
class PassStates(NeedsPeers):
    """Exchange copies of what workers hold at a point, as ``order`` says."""

    point: int
    order: tuple[Instruction, ...]

    def peers(self, worker: int) -> set[int]:
        """The workers that copies go to, or come from."""
        return others_in(self.order)


@dataclass(frozen=True)
class KeepState(PassStates):
    """Copy what the worker holds, and exchange copies with neighbours. Copies of other points than ``before`` are dropped."""

    before: int | None = None


@dataclass(frozen=True)
class TakeKept(PassStates):
    """Go back to a point: send the copies that other workers lack, and take those that this worker lacks.

    The stages that the worker has now were on the workers ``sources`` then: it takes their state from the copies of these.
    """

    sources: tuple[int, ...] = ()
