"""A dataset on a worker: it loads rows on the worker's own thread, or on another beside the steps."""

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch

from pippy.drivers.base.errors import DriverError
from pippy.drivers.batch.columns import column_of, columns_of, load_rows
from pippy.drivers.protocol.programs import AddDataset, DatasetSeen
from pippy.drivers.wire.pickling import unpickle
from pippy.drivers.wire.received_values import Interrupted
from pippy.drivers.worker.data.shared_generators import shared_generators
from pippy.ir.base.operations import draws
from pippy.ir.base.trees import describe, leaves
from pippy.ir.base.without_dynamo import DispatchMode
from pippy.ir.run.may_draw import Draws
from pippy.ir.run.random_state import RandomState, seed_all, untouched_random_state

Keys = tuple[Any, ...]
_turn = threading.Lock()  # of workers that are threads of one process, and have one set of generators
_DRAWS_BESIDE = (
    "this dataset draws from a random generator of the process{}, which prefetch= does not allow: it loads rows on "
    "threads beside the stages, which use these generators. Leave prefetch= out, or draw from a generator of the "
    "dataset's own, seeded by the index"
)


@dataclass(frozen=True)
class OpenedDataset:
    """A dataset on a worker: of all columns, or one for each of those that it needs.

    ``beside``: it also loads on threads. ``shares_process``: the random generators of the process are a script's, too.
    """

    whole: Any
    columns: Mapping[Hashable, Any] | None
    collate: Callable[[Any], Any] | None
    keys: tuple[Hashable, ...]
    beside: bool = False
    shares_process: bool = False

    @classmethod
    def of(cls, body: AddDataset, dataset: Any, shares_process: bool) -> "OpenedDataset":
        """The dataset of a message: the dataset itself, or a dict of the columns that the message names."""
        collate = None if body.collate is None else unpickle(body.collate)
        columns = dataset if isinstance(body.dataset, Mapping) else columns_of(dataset) if collate is None else None
        if columns is None or not all(key in columns for key in body.keys):
            return cls(dataset, None, collate, body.keys, body.beside, shares_process)
        own = {key: columns[key] for key in body.keys}
        return cls(None, own, collate, body.keys, body.beside, shares_process)

    def load(self, indices: Sequence[Any], draws: Keys, goes_on: Callable[[], None]) -> dict[Hashable, Any]:
        """The columns that are needed, of the rows with these indices.

        Random numbers are keyed by ``draws``, so that all workers that load these rows draw the same, and those of the stages
        are as if nothing had been drawn.
        """
        if self.beside:
            before = RandomState.current()
            rows = self.load_beside(indices, goes_on)
            if not self.shares_process and not before.is_current():
                before.restore()
                raise DriverError(_DRAWS_BESIDE.format(""))
            return rows
        with self._random_numbers_apart():
            return self._loaded(indices, goes_on, lambda key: seed_all(_seed((*draws, *key))))

    def load_own(self, indices: Sequence[Any], draws: Keys, goes_on: Callable[[], None]) -> dict[Hashable, Any] | None:
        """As `load`, for some rows of a mini-batch. None if these rows alone might be others than they are among all of them.

        That is so with a collate function, which may look at all rows, and if random numbers are drawn, of which those of a row
        depend on the rows before it.
        """
        if self.collate is not None:
            return None
        if self.beside:
            found = self.load(indices, draws, goes_on)
        else:
            with self._random_numbers_apart():
                seed_all(_seed(draws))
                before = RandomState.current()
                found = self._loaded(indices, goes_on, lambda key: None)
                if not before.is_current():
                    return None
        return found if all(_has_rows(leaf, len(indices)) for leaf in leaves(list(found.values()))) else None

    @contextmanager
    def _random_numbers_apart(self) -> Iterator[None]:
        """A context in which rows may draw and seed, and after which the stages draw as if it had not been."""
        if not self.shares_process:
            with untouched_random_state():
                yield
            return
        with _turn, shared_generators.borrowed([], Draws.PYTHONS_TOO):
            yield

    def load_beside(self, indices: Sequence[Any], goes_on: Callable[[], None]) -> dict[Hashable, Any]:
        """The same without random numbers, on any thread."""
        with _RefusesDraws():
            return self._loaded(indices, goes_on, lambda key: None)

    def _loaded(
        self, indices: Sequence[Any], goes_on: Callable[[], None], seed: Callable[[Keys], None]
    ) -> dict[Hashable, Any]:
        found: dict[Hashable, Any] = {}
        with torch.autocast("cpu", enabled=False):
            if self.columns is None:
                seed(())
                rows = load_rows(self.whole, indices, self.collate, goes_on)
                return {key: column_of(rows, key, len(self.keys) == 1) for key in self.keys}
            for key, column in self.columns.items():
                seed((key,))
                found[key] = load_rows(column, indices, None, goes_on)
        return found

    def seen(self, dataset: Any, sample: Sequence[Any]) -> DatasetSeen:
        """What the controller compares of a dataset that each worker makes."""
        whole = OpenedDataset(dataset, None, self.collate, (None,))
        rows = len(dataset) if hasattr(dataset, "__len__") else None
        return DatasetSeen(type(dataset).__qualname__, rows, _digest(whole.load(sample, (), lambda: None)[None]))


class LoadingBeside:
    """Rows that are loaded on a thread of their own."""

    def __init__(self, dataset: OpenedDataset, indices: Sequence[Any]) -> None:
        self.dataset, self.indices = dataset, indices
        self._done, self._ended = threading.Event(), False
        self._rows: dict[Hashable, Any] = {}
        self._error: BaseException | None = None
        threading.Thread(target=self._load, name="pippy data", daemon=True).start()

    def _load(self) -> None:
        try:
            self._rows = self.dataset.load_beside(self.indices, self._goes_on)
        except BaseException as error:  # it is raised where the rows are needed
            self._error = error
        self._done.set()

    def _goes_on(self) -> None:
        if self._ended:
            raise Interrupted

    def end(self) -> None:
        """Nobody needs them any more."""
        self._ended = True

    def result(self, goes_on: Callable[[], None]) -> dict[Hashable, Any]:
        """The rows, when they are there. ``goes_on`` is called from time to time, and may raise."""
        while not self._done.wait(0.05):
            goes_on()
        if self._error is not None:
            raise self._error
        return self._rows


class _RefusesDraws(DispatchMode):
    """Raises at a random operation of torch that has no generator of its own."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if draws(operation):
            given = [*args, *(kwargs or {}).values()]
            if not any(isinstance(each, torch.Generator) for each in given):
                raise DriverError(_DRAWS_BESIDE.format(f", by {operation}"))
        return operation(*args, **(kwargs or {}))


def _has_rows(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows


def _seed(draws: Keys) -> int:
    return int.from_bytes(blake2b(repr(draws).encode(), digest_size=7).digest(), "little")


def _digest(value: Any) -> str:
    """A short text that differs for other numbers; objects count by their classes."""
    found = blake2b(digest_size=16)
    for leaf in leaves(value):
        if isinstance(leaf, torch.Tensor):
            strided = leaf.detach().cpu() if leaf.layout is torch.strided and not leaf.is_meta else None
            found.update(describe(leaf).encode())
            if strided is not None and not strided.is_quantized:
                found.update(strided.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            plain = isinstance(leaf, (int, float, complex, str, bytes, type(None)))
            found.update(repr(leaf if plain else type(leaf)).encode())
    return found.hexdigest()
