"""Gives the numbers of a training to Weights & Biases."""

from collections.abc import Mapping
from typing import Any

from pippy.training.loggers.logger import imported_for


class WandbLogger:
    """Gives values to Weights & Biases. It needs the package wandb; ``options`` are those of `wandb.init`.

    If the script has called `wandb.init` itself, its run gets the values, and stays open. With ``mode="offline"`` they are
    written to a folder, which ``wandb sync`` sends. A training that goes on from a checkpoint goes on in the same run if
    ``id=`` and ``resume="allow"`` are given. A run has each step once: steps that it has are left out.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     logger = WandbLogger(project="demo", mode="disabled", dir=folder)
    ...     logger.log(1, {"loss": 0.5})
    ...     logger.close()
    """

    def __init__(self, **options: Any) -> None:
        self._wandb = imported_for("WandbLogger", "wandb", "wandb")
        self.options = options
        self._run: Any = None
        self._last = 0  # the last step that the run has

    def begin(self, step: int) -> None:
        """Go on after this step. Steps that the run has are left out."""
        if self._run is None:
            self._is_own = self._wandb.run is None
            self._run = self._wandb.init(**self.options) if self._is_own else self._wandb.run
            self._last = step

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Give the values of a step to the run."""
        if self._run is None:
            self.begin(step - 1)
        if step >= self._last:
            self._run.log(dict(values), step=step)
            self._last = step

    def close(self) -> None:
        """Finish the run, if it was begun here."""
        if self._run is not None and self._is_own:
            self._run.finish()
        self._run = None
