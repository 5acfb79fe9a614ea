"""How a model and its graph depend on the mode: training or evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class ModelModes:
    """How a model and its graph depend on the mode. True is training, as in `model.train(True)`.

    ``traced`` has the flags that forward reads, by the path of the module, as they were when it was traced. ``refused`` has
    the modes in which the graph is wrong, each with the line where the model does something else. ``after`` has, for each mode,
    the flags that `model.train(mode)` sets to the opposite; only a module with a `train` of its own does that.

    >>> modes = ModelModes(traced={"": True, "head": True}, refused={False: "net.py:3, in forward"})
    >>> modes.mode_of({"": False, "head": False})
    False
    """

    traced: dict[str, bool] = field(default_factory=dict)
    refused: dict[bool, str] = field(default_factory=dict)
    after: dict[bool, dict[str, bool]] = field(default_factory=dict)

    def flag(self, path: str, mode: bool) -> bool:
        """The training flag of a module after `train(mode)`."""
        return self.after.get(mode, {}).get(path, mode)

    def mode_of(self, flags: Mapping[str, bool]) -> bool | None:
        """The mode to which all these flags belong, of those that forward reads; None if some belong to another."""
        for mode in (True, False):
            if all(flags.get(path) == self.flag(path, mode) for path in self.traced):
                return mode
        return None

    def is_as_traced(self, flags: Mapping[str, bool]) -> bool:
        """Whether all flags that forward reads are as when it was traced."""
        return all(flags.get(path) == flag for path, flag in self.traced.items())
