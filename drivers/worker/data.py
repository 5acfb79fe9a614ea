"""Rows that a worker loads itself.

A dataset on a worker loads rows on the worker's own thread, or on another beside the steps. The reader loads the inputs of a
step whose indices the controller knows, on the worker that uses them.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from pippy.drivers.base.beside import beside
from pippy.drivers.base.errors import DriverError, MicrobatchError
from pippy.drivers.batch.columns import (
    DivisionOfColumns,
    IndexBatch,
    LoadedColumn,
    LoadingRules,
    check_dataset,
    column_of,
    columns_of,
    load_rows,
    loaded_columns,
)
from pippy.drivers.batch.divide import Divider
from pippy.drivers.batch.division import DividedValue, Division, map_divided
from pippy.drivers.batch.items import joined_items
from pippy.drivers.batch.loss_weights import loss_weights
from pippy.drivers.batch.refusals import refuse_inputs
from pippy.drivers.protocol.programs import AddDataset, DatasetSeen
from pippy.drivers.wire.pickling import unpickle
from pippy.drivers.wire.received_values import Interrupted
from pippy.ir.base.errors import InputError
from pippy.ir.base.names import LOSS
from pippy.ir.base.operations import draws
from pippy.ir.base.trees import describe, leaves
from pippy.ir.base.without_dynamo import DispatchMode
from pippy.ir.call.guards import differs
from pippy.ir.run.may_draw import Draws
from pippy.ir.run.random_state import RandomState, seed_all, untouched_random_state


class SharedGenerators:
    """The generators of a process that is a script's, with workers in it: when none of these draws, they are the script's.

    >>> shared = SharedGenerators()
    >>> one = torch.get_rng_state()
    >>> with shared.borrowed([], Draws.TORCHS):
    ...     _ = torch.rand(2)
    >>> torch.equal(torch.get_rng_state(), one)
    True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: dict[Draws, RandomState] = {}

    @contextmanager
    def borrowed(self, gpus: Sequence[torch.device], draws: Draws) -> Iterator[None]:
        """Inside, the generators may be seeded. The last one to leave gives them the state that the first one found."""
        with self._lock:
            self._users += 1
            if not self._before or (draws is Draws.PYTHONS_TOO and draws not in self._before):
                self._before[draws] = RandomState.current(gpus, only_torch=draws is not Draws.PYTHONS_TOO)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    for state in reversed(self._before.values()):  # that of torch is right in the first one
                        state.restore()
                    self._before.clear()


shared_generators = SharedGenerators()


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
        self.indices, self._ended = indices, False
        self._rows = beside(partial(dataset.load_beside, indices, self._goes_on), "pippy data")

    def _goes_on(self) -> None:
        if self._ended:
            raise Interrupted

    def end(self) -> None:
        """Nobody needs them any more."""
        self._ended = True

    def result(self, goes_on: Callable[[], None]) -> dict[Hashable, Any]:
        """The rows, when they are there. ``goes_on`` is called from time to time, and may raise."""
        while not wait([self._rows], timeout=0.05).done:
            goes_on()
        return self._rows.result()


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


class DatasetReader:
    """The datasets of one driver on one worker. ``loading`` while it loads."""

    def __init__(self, modules: Mapping[str, nn.Module], given_up: Callable[[], bool], shares_process: bool) -> None:
        self.modules, self.given_up, self.shares_process = modules, given_up, shares_process
        self.datasets: dict[int, OpenedDataset] = {}
        self.rules: LoadingRules | None = None
        self.ahead: dict[tuple[int, tuple[int, ...]], LoadingBeside] = {}
        self.loading = False
        self.whole: set[int] = set()  # datasets of which a replica needs all rows of a mini-batch to know its own

    def add(self, body: AddDataset) -> DatasetSeen:
        """Take a dataset, and say what it is like."""
        for number in body.gone:
            self.datasets.pop(number, None)
        if body.rules is not None:
            self.rules = unpickle(body.rules)
        given = body.dataset
        if isinstance(given, str):
            dataset = _made(given)
        elif isinstance(given, Mapping):
            dataset = {key: unpickle(each) for key, each in given.items()}
        else:
            dataset = unpickle(given)
        self.datasets[body.number] = opened = OpenedDataset.of(body, dataset, self.shares_process)
        return opened.seen(dataset, body.sample) if isinstance(given, str) else DatasetSeen()

    def load(self, division: DivisionOfColumns, trains: bool, needs_all: bool = True) -> tuple[Division, Division]:
        """The mini-batch with what is loaded in its place, divided as if it had been given: this worker's share, and all of it.

        Of what was given, both have the share; without ``needs_all``, of what was loaded, too, if that can be.
        """
        self.loading = True
        try:
            loaded, own = self._loaded(division, trains, needs_all)
        finally:
            self.loading = False

        def whole(leaf: DividedValue) -> Any:
            return loaded.get(id(leaf), leaf)

        def share(leaf: DividedValue) -> Any:
            cut = id(leaf) in loaded and not own
            return map_divided(lambda each: each.part(division), whole(leaf)) if cut else whole(leaf)

        plain = division.plain()
        held = replace(plain, arguments={name: map_divided(share, each) for name, each in division.arguments.items()})
        self._check(division, held)
        arguments = {name: map_divided(whole, each) for name, each in division.arguments.items()}
        return held, replace(plain, arguments=arguments, share=None)

    def _loaded(self, division: DivisionOfColumns, trains: bool, needs_all: bool) -> tuple[dict[int, Any], bool]:
        """What is loaded for each column, by its id, and divided; and whether that is the share of this worker only."""
        leaves = [leaf for value in division.arguments.values() for leaf in loaded_columns(value)]
        if not needs_all and division.share is not None and self._are_by_rows(leaves):
            found = self._divided(division, leaves, trains, division)
            if found is not None:
                return found, True
        found = self._divided(division, leaves, trains, None)
        assert found is not None
        return found, False

    def _are_by_rows(self, leaves: Sequence[LoadedColumn]) -> bool:
        """Whether the rows of a share can be loaded without the others."""
        return all(
            leaf.spec is None and not leaf.counts and batch.dataset not in self.whole
            for leaf in leaves
            for batch in leaf.batches
        )

    def _divided(
        self,
        division: DivisionOfColumns,
        leaves: Sequence[LoadedColumn],
        trains: bool,
        share: DivisionOfColumns | None,
    ) -> dict[int, Any] | None:
        """What is loaded for each column, by its id, of the rows of this ``share`` alone; None if that cannot be."""
        divider = Divider(division.chunks, division.mask)
        rows, found = dict[Any, dict[Hashable, Any]](), dict[int, Any]()
        for leaf in leaves:
            for batch in leaf.batches:
                if (batch.dataset, batch.draws) not in rows:
                    loaded = self._rows(batch, share)
                    if loaded is None:
                        self.whole.add(batch.dataset)
                        return None
                    rows[batch.dataset, batch.draws] = loaded
            values = [rows[batch.dataset, batch.draws][leaf.key] for batch in leaf.batches]
            asked = sum(len(_share_of(batch, share)) for batch in leaf.batches)
            found[id(leaf)] = _divided(divider, leaf, values, trains, asked)
        for path, sizes in divider.given_sizes:
            if sizes != division.sizes:
                raise MicrobatchError(
                    f"{path} was loaded in micro-batches of {sizes} rows, but the micro-batches of the step have "
                    f"{division.sizes}"
                )
        return found

    def weights(self, division: Division) -> tuple[float, ...]:
        """The weights of the losses, by what was loaded."""
        assert self.rules is not None
        return loss_weights(self.modules.get(LOSS), division, self.rules.target, self.rules.loss_reduction)

    def _rows(self, batch: IndexBatch, division: DivisionOfColumns | None = None) -> dict[Hashable, Any] | None:
        """The rows of a mini-batch, or of the share of a ``division``. Those that come next begin to be loaded."""
        dataset, indices = self.datasets[batch.dataset], _share_of(batch, division)
        begun = self.ahead.pop((batch.dataset, batch.draws), None)
        rows: dict[Hashable, Any] | None
        if begun is not None and begun.indices == indices:
            rows = begun.result(self._goes_on)
        elif division is None:
            rows = dataset.load(indices, batch.draws, self._goes_on)
        else:
            rows = dataset.load_own(indices, batch.draws, self._goes_on)
        if rows is None:
            return None
        wanted = {(each.dataset, each.draws): each for each in batch.ahead}
        for key in [key for key in self.ahead if key[0] == batch.dataset and key not in wanted]:
            self.ahead.pop(key).end()
        for key, each in wanted.items():
            if key not in self.ahead:
                self.ahead[key] = LoadingBeside(dataset, _share_of(each, division))
        return rows

    def _goes_on(self) -> None:
        if self.given_up():
            raise Interrupted

    def _check(self, division: DivisionOfColumns, loaded: Division) -> None:
        """Raise if what was loaded is not as the Pipe needs it."""
        assert self.rules is not None
        guards = self.rules.guards
        users = {user: name for user, name in loaded.names.items() if name in loaded.arguments}
        faults = [
            differs(each.path, each.found, each.fixed)
            for user, name in users.items()
            if user in guards.kinds
            for each in guards.kinds[user].differences(loaded.take(name, loaded.held.start), user)
        ]
        if faults:
            raise InputError("\n".join(faults))
        if division.checks_guards:
            for chunk in _one_of_each_size(loaded):
                guards.check(
                    {user: loaded.take(name, chunk) for user, name in users.items() if name != self.rules.target}
                )


def _one_of_each_size(division: Division) -> Iterable[int]:
    """Micro-batches that are held."""
    return {division.sizes and division.rows_of(each): each for each in division.held}.values()


def _share_of(batch: IndexBatch, division: DivisionOfColumns | None) -> Sequence[Any]:
    """The indices of the micro-batches that are held, of a mini-batch that is divided as this one; without one, all."""
    if division is None:
        return batch.indices
    size, larger = divmod(len(batch), division.chunks)
    start, stop = (each * size + min(each, larger) for each in (division.held.start, division.held.stop))
    return batch.indices[start:stop]


def _divided(divider: Divider, leaf: LoadedColumn, values: Sequence[Any], trains: bool, asked: int) -> Any:
    refuse_inputs(values, trains)
    value = joined_items(values, leaf.counts, leaf.path) if leaf.counts else values[0]
    before = len(divider.rows)
    found = divider.divide(value, leaf.spec, leaf.path, leaf.outer)
    for path, what, rows in divider.rows[before:]:
        if rows != asked:
            raise MicrobatchError(
                f"{path}: {asked} indices gave {rows} rows, {what}. The dataset must return one row for each index. "
                "If the value is not part of the batch, give it a Replicate(). If its rows are in another "
                "dimension, give it a TensorChunkSpec(dim)"
            )
    return found


def _made(name: str) -> Any:
    """The dataset that the function with this name makes."""
    module, _, function = name.partition(":")
    try:
        make = attrgetter(function)(import_module(module))
    except (ImportError, AttributeError) as error:
        raise DriverError(
            f"dataset={name!r} cannot be imported: {type(error).__name__}: {error}; the module must be one that a worker can "
            "import (the script itself is not), and have this function"
        ) from error
    dataset = make()
    check_dataset(dataset, f"what {name} gave")
    return dataset
