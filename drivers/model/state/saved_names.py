"""The names of a driver's tensors in a checkpoint: it has each tensor once, by one of its names in the state dict."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pippy.drivers.placement.placed_pipe import PlacedPipe
from pippy.ir.pipe import Pipe


@dataclass(frozen=True)
class SavedNames:
    """``tensors`` has each tensor of the state dict by the name that it is saved by. ``names`` has all names of each.

    ``extra`` has the items of the state dict that are no tensors; ``unused`` the names of tensors that no stage uses, which are
    in this process alone.

    >>> from pippy import Pipe
    >>> first, last = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    >>> last.weight = first.weight
    >>> pipe = Pipe.from_sequential(torch.nn.Sequential(first, last))
    >>> from pippy.ir.pipe import compiled_of
    >>> saved = SavedNames.of(pipe, PlacedPipe(compiled_of(pipe), [0, 1]))
    >>> saved.names["0.weight"], saved.tied
    (('0.weight', '1.weight'), {'1.weight': '0.weight'})
    """

    tensors: Mapping[str, torch.Tensor]
    names: Mapping[str, tuple[str, ...]]
    extra: Mapping[str, Any]
    unused: tuple[str, ...]

    @classmethod
    def of(cls, pipe: Pipe, placed: PlacedPipe) -> "SavedNames":
        """The names for a Pipe whose stages are placed."""
        canonical = placed.compiled.qualnames.canonical
        state = pipe.state_dict(keep_vars=True)
        groups: dict[str, list[str]] = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                groups.setdefault(canonical.get(name, name), []).append(name)
        names = {first if first in all_names else all_names[0]: tuple(all_names) for first, all_names in groups.items()}
        return cls(
            {name: state[name] for name in names},
            names,
            {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)},
            tuple(name for name in names if not placed.locations(name)),
        )

    @property
    def nowhere(self) -> set[str]:
        """The names of tensors on the meta device that no stage uses. They have no numbers anywhere."""
        return {name for name in self.unused if self.tensors[name].is_meta}

    def with_numbers(self) -> "SavedNames":
        """The names without those of `nowhere`."""
        gone = self.nowhere
        tensors = {name: each for name, each in self.tensors.items() if name not in gone}
        names = {name: own for name, own in self.names.items() if name not in gone}
        return SavedNames(tensors, names, self.extra, tuple(name for name in self.unused if name not in gone))

    @property
    def tied(self) -> dict[str, str]:
        """The name that a tensor is saved by, for each of its other names."""
        return {other: name for name, own in self.names.items() for other in own if other != name}
