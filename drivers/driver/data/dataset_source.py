"""A dataset as workers get it: by value, or by the name of a function that makes it."""

import itertools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

from torch.utils.data import default_collate

from pippy.drivers.base.errors import DriverError, PackingError
from pippy.drivers.batch.columns import check_dataset, columns_of
from pippy.drivers.wire.pickling import Pickled, pickle_by_value
from pippy.ir.base.checked import check_count
from pippy.ir.base.trees import describe

_numbers = itertools.count()


class DatasetSource:
    """A dataset, its number, and the forms in which it is sent. ``rows`` is its number of rows, if that is known.

    >>> DatasetSource("package.module:function", None).rows
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any] | None, prefetch: int = 0) -> None:
        self.number, self.dataset, self.collate = next(_numbers), dataset, collate
        self.columns: dict[Hashable, Any] | None = None
        self.rows: int | None = None
        self._sent: dict[Any, Pickled] = {}
        self.prefetch = prefetch
        check_count(
            "prefetch", prefetch, "how many mini-batches a worker loads ahead of its steps", DriverError, least=0
        )
        if collate is not None and not callable(collate):
            raise DriverError(
                f"collate_fn={describe(collate)}: give a function of a list of rows, or None for torch's own"
            )
        if isinstance(dataset, str):
            module, _, function = dataset.partition(":")
            if not module or not function:
                raise DriverError(
                    f"dataset={dataset!r}: give a dataset, or the name of a function that makes it on each worker that needs "
                    "it, as 'package.module:function'"
                )
            return
        check_dataset(dataset, "dataset")
        self.columns = columns_of(dataset) if collate in (None, default_collate) else None
        self.rows = len(dataset) if hasattr(dataset, "__len__") else None

    @property
    def by_name(self) -> bool:
        """Whether workers make it themselves."""
        return isinstance(self.dataset, str)

    def sent_dataset(self, keys: Collection[Hashable]) -> Pickled | Mapping[Hashable, Pickled] | str:
        """What a worker is sent if it needs these columns."""
        if self.by_name:
            return str(self.dataset)
        if self.columns is None or not keys <= self.columns.keys():  # type: ignore[operator]
            return self._pickled(None, self.dataset)
        return {key: self._pickled(("column", key), self.columns[key]) for key in keys}

    def sent_collate(self) -> Pickled | None:
        """The function that a worker is sent to put rows together."""
        return None if self.collate in (None, default_collate) else self._pickled("collate", self.collate)

    def _pickled(self, key: Any, value: Any) -> Pickled:
        if key not in self._sent:
            try:
                self._sent[key] = pickle_by_value(value)
            except PackingError as error:
                what = "the collate function" if key == "collate" else "the dataset"
                raise PackingError(
                    f"{what}, {describe(value)}, cannot be sent to the workers: {error.__cause__ or error}; give "
                    "the name of a function that makes the dataset, which each worker that needs it calls: "
                    "IndexLoader('package.module:function', columns=...)"
                ) from error
        return self._sent[key]

    def check_indices(self, indices: Sequence[Any]) -> None:
        """Raise if one of them is out of range."""
        if not len(indices):
            raise DriverError("the mini-batch has no indices; give one or more")
        if self.rows is None or not all(type(each) is int for each in indices):
            return
        least, most = min(indices), max(indices)
        if least < -self.rows or most >= self.rows:
            raise DriverError(
                f"index {most if most >= self.rows else least} is out of range: the dataset has {self.rows} rows, 0 to "
                f"{self.rows - 1}"
            )
