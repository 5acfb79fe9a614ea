"""Writes the numbers of a training for TensorBoard."""

import os
from collections.abc import Mapping
from typing import Any

from pippy.drivers.base.errors import DriverError
from pippy.ir.base.trees import describe
from pippy.training.loggers.logger import imported_for


class TensorBoardLogger:
    """Writes scalars to a folder that ``tensorboard --logdir`` shows. It needs the package tensorboard.

    What was logged is on disk when `log` returns. A training that goes on from a checkpoint goes on in the same folder:
    TensorBoard drops what it has of later steps.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     logger = TensorBoardLogger(folder)
    ...     logger.log(1, {"loss": 0.5})
    ...     logger.close()
    ...     len(os.listdir(folder))
    1
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if not isinstance(folder, (str, os.PathLike)) or os.path.isfile(folder):
            raise DriverError(f"TensorBoardLogger({describe(folder)}): give the path of a folder")
        imported_for("TensorBoardLogger", "tensorboard", "tensorboard")
        self.folder = os.fspath(folder)
        self._writer: Any = None

    def begin(self, step: int) -> None:
        """Go on after this step: TensorBoard drops later ones that were logged before."""
        from torch.utils.tensorboard import SummaryWriter  # it takes long to import

        self.close()
        self._writer = SummaryWriter(self.folder, purge_step=step + 1)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Write a scalar for each value."""
        if self._writer is None:
            self.begin(step - 1)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None
