"""Datasets that inputs of steps are loaded from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pippy.drivers.wire.pickling import Pickled


@dataclass(frozen=True)
class AddDataset:
    """A dataset that inputs of steps are loaded from, under a number: sent once.

    ``dataset`` is the dataset, or a dataset for each of some columns, or "package.module:function", which makes it. ``collate``
    puts items together; None stands for torch's own. ``keys`` are the columns that this worker needs. Workers that make the
    dataset compare their row ``sample``. ``rules`` has the Pipe's guards and what weighs losses, and is sent once for a driver.
    The datasets with the numbers ``gone`` are dropped. With ``beside``, threads load the next mini-batches during the steps.
    """

    number: int
    dataset: Pickled | Mapping[Any, Pickled] | str
    collate: Pickled | None
    keys: tuple[Any, ...]
    sample: tuple[Any, ...]
    rules: Pickled | None = None
    gone: tuple[int, ...] = ()
    beside: bool = False


@dataclass(frozen=True)
class DatasetSeen:
    """What a worker has made of the name of a dataset: its class, how many rows it has, and a digest of the sample."""

    kind: str = ""
    rows: int | None = None
    digest: str = ""
