"""One step on a worker: what it is given, and what its instructions have made so far. Each handler gets it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from pippy.drivers.wire.gpu.copies import DeviceCopies
from pippy.drivers.wire.transport import Transport
from pippy.drivers.worker.gradients.gradient_sums import AddingUp
from pippy.drivers.worker.gradients.single_loss import SingleLoss
from pippy.drivers.worker.stage_call import Kept, Run, SliceCaches
from pippy.ir.base.trees import map_tensors
from pippy.ir.run.batch_norm import StepStatistics
from pippy.ir.run.random_state import DrawKey, RandomStep

Key = tuple[str, int]  # a value, by its name and micro-batch


@dataclass(frozen=True)
class StepDevice:
    """Where stages compute. ``copies`` are those between the host and the ``device``, if that is not the CPU.

    >>> StepDevice(torch.device("cpu")).takes_inputs_up
    False
    """

    device: torch.device
    copies: DeviceCopies | None = None

    @cached_property
    def takes_inputs_up(self) -> bool:
        """Whether inputs of the model have to be taken to the device."""
        return self.copies is not None or self.device.type != "cpu"

    def here(self, value: Any) -> Any:
        """A value on the device."""
        if self.copies is not None:
            return self.copies.to_device(value)
        return map_tensors(lambda tensor: tensor.to(self.device), value)

    def leaves(self, value: Any) -> Any:
        """Outputs do not wait on the device for the end of the step. Numbers do: they are fetched in one piece."""
        if self.copies is None:
            return map_tensors(_off_the_device, value)
        return value if is_number(value) else self.copies.to_host(value)


@dataclass
class StepContext:
    """What a step is given, with its ``number``, and below that what it has made.

    ``own_rows`` takes a micro-batch's rows from the inputs of the loss, if each of those is the whole mini-batch. ``returns``
    are the values to return, if not those of the program, each with the place of the loss if only that is wanted. ``random``
    says of which step the random numbers are. ``adding`` makes the sums of gradients, in a step that adds them up. A step that
    only ``tries`` something records no graphs. One that is ``given_up`` ends at the next computation. ``choose`` chooses tokens
    for a micro-batch, from logits. Programs that make tokens run many times in one step: ``earlier`` is how many micro-batches
    the earlier runs had.

    ``not_repeated`` has what those forwards gave that cannot be run again: what runs behind them again takes it from there.
    ``slices`` has the keys and values of earlier slices, if micro-batches are slices of sequences. ``live`` is how many
    micro-batches the stages hold. ``casts`` says whether autocast is on.
    """

    number: int
    inputs: Mapping[str, Sequence[Any]]
    weights: Sequence[float]
    trains: bool
    transport: Transport
    place: StepDevice
    statistics: StepStatistics | None = None
    given_up: Callable[[], bool] = lambda: False
    own_rows: Callable[[Any, int], Any] | None = None
    returns: Mapping[str, Any] | None = None
    random: RandomStep | None = None
    adding: AddingUp | None = None
    tries: bool = False
    choose: Callable[[int, torch.Tensor], Any] | None = None
    earlier: int = 0

    values: dict[Key, Any] = field(default_factory=dict)
    runs: dict[Key, Run] = field(default_factory=dict)
    kept: dict[Key, Kept] = field(default_factory=dict)
    not_repeated: dict[Key, Any] = field(default_factory=dict)
    returned: dict[str, dict[int, Any]] = field(default_factory=dict)
    single: SingleLoss | None = None
    slices: SliceCaches | None = None
    draw_keys: Mapping[int | None, DrawKey] = field(default_factory=dict)
    casts: bool = False
    live: int = 0
    peak_live: int = 0

    @property
    def of_graphs(self) -> int | None:
        """The number of the step for which stages run as graphs; None if they do not."""
        return None if self.tries else self.number

    def drop(self) -> None:
        """Drop all values, also where a failure still holds the step."""
        for each in (self.values, self.runs, self.kept, self.not_repeated, self.returned):
            each.clear()
        self.single = self.slices = None


def is_number(value: Any) -> bool:
    """Whether this is a tensor without dimensions."""
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _off_the_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu() if tensor.dim() else tensor
