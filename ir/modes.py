"""How a model and its graph depend on the mode: training or evaluation."""

from dataclasses import dataclass, field


@dataclass
class Modes:
    """How a model and its graph depend on the mode. True is training, as in `model.train(True)`.

    ``refused`` has the modes in which the graph is not right, each with the line from which the model does something else.
    ``after`` has, for each mode, the flags that `model.train(mode)` sets to the opposite, which takes a module with a
    `train` of its own.

    >>> modes = Modes(refused={False: "net.py:3, in forward"})
    >>> modes.allows(True), modes.allows(False)
    (True, False)
    """

    refused: dict[bool, str] = field(default_factory=dict)
    after: dict[bool, dict[str, bool]] = field(default_factory=dict)

    def flag(self, path: str, mode: bool) -> bool:
        """The training flag of a module after `train(mode)`."""
        return self.after.get(mode, {}).get(path, mode)

    def allows(self, mode: bool) -> bool:
        """Whether the graph is right in ``mode``."""
        return mode not in self.refused
