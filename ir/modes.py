"""How a model and its graph depend on the mode: training or evaluation."""

from dataclasses import dataclass, field


@dataclass
class Modes:
    """How a model and its graph depend on the mode. True is training, as in `model.train(True)`.

    ``fixed`` has the training flags that the graph needs, by the path of the module, where the graph is right in one
    mode only; ``fixed_at`` is the line from which the other mode does something else. ``after`` has, for each mode, the
    flags that `model.train(mode)` sets to the opposite, which takes a module with a `train` of its own.

    >>> modes = Modes(fixed={"encoder": True})
    >>> modes.allows(True), modes.allows(False)
    (True, False)
    """

    fixed: dict[str, bool] = field(default_factory=dict)
    fixed_at: str = ""
    after: dict[bool, dict[str, bool]] = field(default_factory=dict)

    def flag(self, path: str, mode: bool) -> bool:
        """The training flag of a module after `train(mode)`."""
        return self.after.get(mode, {}).get(path, mode)

    def allows(self, mode: bool) -> bool:
        """Whether the graph is right in ``mode``."""
        return all(self.flag(path, mode) == needed for path, needed in self.fixed.items())
