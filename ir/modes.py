"""How a model and its graph depend on train and eval."""

from dataclasses import dataclass, field


@dataclass
class Modes:
    """How a model and its graph depend on train and eval.

    ``fixed`` holds the flags that the graph's structure is bound to, by module, and ``fixed_at`` the line where the modes
    part. ``after`` holds the flags that differ from the mode after `model.train(mode)`, where a module has a `train` of
    its own.
    """

    fixed: dict[str, bool] = field(default_factory=dict)
    fixed_at: str = ""
    after: dict[bool, dict[str, bool]] = field(default_factory=dict)

    def flag(self, path: str, mode: bool) -> bool:
        """The training flag of a module after `train(mode)`."""
        return self.after.get(mode, {}).get(path, mode)

    def allows(self, mode: bool) -> bool:
        """Whether the graph is right in ``mode``."""
        return all(self.flag(path, mode) == traced for path, traced in self.fixed.items())
