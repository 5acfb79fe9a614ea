"""Datasets that inputs of steps are loaded from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pippy.drivers.wire.pickling import Pickled


@dataclass(frozen=True)
class AddDataset:
    """A dataset that inputs of steps are loaded from, under a number: sent once.

    ``dataset`` is the dataset, or for some of its columns a dataset of each; or "package.module:function", which makes it.
    ``collate`` puts items together; None for torch's own. ``keys`` are the columns that this worker needs. ``sample`` is an
    index, whose row is compared among workers that make the dataset. ``rules`` has the Pipe's guards and what weighs losses,
    once for a driver. The datasets with the numbers ``gone`` are dropped. ``beside``: mini-batches that come next are loaded on
    threads, beside the steps.
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
