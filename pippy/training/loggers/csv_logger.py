"""Writes the numbers of a training to a CSV file."""

import csv
import io
import os
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

import torch

from pippy.drivers.base.errors import DriverError
from pippy.ir.base.trees import describe

_STEP = "step"  # the first column
_Row = dict[str, str]


class CSVLogger:
    """Writes a line for each step to the file ``path``: the step, and a column for each value.

    Each line is in the file when `log` returns. A value that comes for the first time in a later step gets a column, which is
    empty in the lines before. A training that goes on from a checkpoint goes on in the same file: the lines of later steps are
    replaced. If the file has only such lines, it is of another training, and gets another name: ``metrics-1.csv``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     logger = CSVLogger(f"{folder}/metrics.csv")
    ...     logger.log(1, {"loss": 0.5})
    ...     logger.log(2, {"loss": 0.25, "evaluation/loss": 0.375})
    ...     logger.close()
    ...     print(open(logger.path).read())
    step,loss,evaluation/loss
    1,0.5,
    2,0.25,0.375
    <BLANKLINE>
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)) or os.path.isdir(path):
            raise DriverError(f"CSVLogger({describe(path)}): give the path of a file, as metrics.csv")
        self.path = os.fspath(path)
        self._file: BinaryIO | None = None
        self._columns = [_STEP]
        self._last: _Row = {}
        self._at = 0  # where the last line begins
        self._rows()  # raises if the file is of another kind

    def begin(self, step: int) -> None:
        """Go on after this step: lines of later ones are dropped."""
        self.close()
        os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
        rows = self._rows()
        kept = [each for each in rows if int(each[_STEP]) <= step]
        if rows and not kept:
            os.replace(self.path, self._free_name())
        if kept:
            self._columns = list(kept[0])
        self._write_anew(kept)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Write a line, or add these values to the last line, if it is of this step."""
        if self._file is None:
            self.begin(step - 1)
        row = {_STEP: str(step), **{name: _text(value) for name, value in values.items()}}
        assert self._file is not None
        if self._last.get(_STEP) == row[_STEP]:
            row = {**self._last, **row}
            self._file.truncate(self._at)
        self._last = row
        new = [name for name in row if name not in self._columns]
        if new:
            rows = self._rows()
            self._columns += new
            self._write_anew(rows)
        self._at = self._file.seek(0, os.SEEK_END)
        self._file.write(self._lines([row]))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file, self._columns, self._last = None, [_STEP], {}

    def _rows(self) -> list[_Row]:
        """The lines of the file, without one that was not written to its end."""
        if not os.path.exists(self.path):
            return []
        with open(self.path, newline="", encoding="utf-8") as file:
            text = file.read()
        rows = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
        if text and next(iter(rows.fieldnames or [""])) != _STEP:
            raise DriverError(
                f"{self.path} is no file of a CSVLogger, whose first column is {_STEP!r}; give the path of another file"
            )
        return list(rows)

    def _write_anew(self, rows: Iterable[_Row]) -> None:
        """Have a file with these lines. A process that dies meanwhile leaves the old one."""
        if self._file is not None:
            self._file.close()
        new = f"{self.path}.new"
        with open(new, "wb") as file:
            file.write(self._lines([dict(zip(self._columns, self._columns)), *rows]))
        os.replace(new, self.path)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - until it is closed

    def _lines(self, rows: Iterable[_Row]) -> bytes:
        text = io.StringIO()
        csv.DictWriter(text, self._columns, restval="", lineterminator="\n").writerows(rows)
        return text.getvalue().encode()

    def _free_name(self) -> str:
        name, ending = os.path.splitext(self.path)
        number = 1
        while os.path.exists(found := f"{name}-{number}{ending}"):
            number += 1
        return found


def _text(value: Any) -> str:
    """
    >>> _text(torch.tensor(0.5)), _text(0.1), _text(7), _text(None)
    ('0.5', '0.1', '7', '')
    """
    return "" if value is None else str(value.item() if isinstance(value, torch.Tensor) else value)
