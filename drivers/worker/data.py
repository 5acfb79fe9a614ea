"""Rows that a worker loads itself.

A dataset on a worker loads rows on the worker's own thread, or on another beside the steps. The reader loads the inputs of a
step whose indices the controller knows, on the worker that uses them.
"""

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
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
from pippy.drivers.batch.division import DividedValue, Division, even_sizes, map_divided
from pippy.drivers.batch.items import joined_items
from pippy.drivers.batch.loss_weights import loss_weights
from pippy.drivers.batch.refusals import refuse_inputs
from pippy.drivers.batch.specs import can_have_rows
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
    """A dataset on a worker: ``parts`` is a dataset for each of the columns that it needs, or one under None for all columns.

    ``beside``: it also loads on threads. ``shares_process``: the random generators of the process are a script's, too.
    ``goes_on`` is called between rows, and may raise.
    """

    parts: Mapping[Hashable, Any]
    collate: Callable[[Any], Any] | None
    keys: tuple[Hashable, ...]
    beside: bool
    shares_process: bool
    goes_on: Callable[[], None]

    @classmethod
    def of(cls, body: AddDataset, dataset: Any, shares_process: bool, goes_on: Callable[[], None]) -> "OpenedDataset":
        """The dataset of a message: the dataset itself, or a dict of the columns that the message names."""
        collate = None if body.collate is None else unpickle(body.collate)
        columns = dataset if isinstance(body.dataset, Mapping) else columns_of(dataset) if collate is None else None
        if columns is not None and all(key in columns for key in body.keys):
            parts = {key: columns[key] for key in body.keys}
        else:
            parts = {None: dataset}
        return cls(parts, collate, body.keys, body.beside, shares_process, goes_on)

    def load(self, indices: Sequence[Any], draws: Keys, alone: bool = False) -> dict[Hashable, Any] | None:
        """The columns that are needed, of the rows with these indices.

        Random numbers are keyed by ``draws``, so that all workers that load these rows draw the same, and those of the stages
        are as if nothing had been drawn. ``alone``: they are some rows of a mini-batch. Then it gives None if they might be
        others than among all rows: with a collate function, which may look at all of them, and if random numbers are drawn, of
        which those of a row depend on the rows before it.
        """
        if alone and self.collate is not None:
            return None
        if not self.beside:
            with self._random_numbers_apart():
                found, drew = self._loaded(indices, draws)
        else:
            before = RandomState.current()
            found, drew = self.load_beside(indices), False
            if not self.shares_process and not before.is_current():
                before.restore()
                raise DriverError(_DRAWS_BESIDE.format(""))
        by_rows = not drew and all(_has_rows(leaf, len(indices)) for leaf in leaves(list(found.values())))
        return found if by_rows or not alone else None

    @contextmanager
    def _random_numbers_apart(self) -> Iterator[None]:
        """A context in which rows may draw and seed, and after which the stages draw as if it had not been."""
        if not self.shares_process:
            with untouched_random_state():
                yield
            return
        with _turn, shared_generators.borrowed([], Draws.PYTHONS_TOO):
            yield

    def load_beside(self, indices: Sequence[Any]) -> dict[Hashable, Any]:
        """The same without random numbers, on any thread."""
        with _RefusesDraws():
            return self._loaded(indices, None)[0]

    def _loaded(self, indices: Sequence[Any], draws: Keys | None) -> tuple[dict[Hashable, Any], bool]:
        """The columns, and whether random numbers were drawn. They are seeded, if they are keyed by something."""
        found, drew = dict[Hashable, Any](), False
        with torch.autocast("cpu", enabled=False):
            for part, dataset in self.parts.items():
                if draws is not None:
                    seed_all(_seed(draws if part is None else (*draws, part)))
                    seeded = RandomState.current()
                rows = load_rows(dataset, indices, self.collate, self.goes_on)
                drew = drew or (draws is not None and not seeded.is_current())
                wanted = self.keys if part is None else ()
                found |= {key: column_of(rows, key, len(wanted) == 1) for key in wanted} if wanted else {part: rows}
        return found, drew


class LoadingBeside:
    """Rows that are loaded on a thread of their own, until they are there or nobody needs them any more."""

    def __init__(self, dataset: OpenedDataset, indices: Sequence[Any]) -> None:
        self.indices, self.ended = indices, False
        self.rows = beside(partial(replace(dataset, goes_on=self._goes_on).load_beside, indices), "pippy data")

    def _goes_on(self) -> None:
        if self.ended:
            raise Interrupted


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
    return can_have_rows(leaf) and leaf.shape[0] == rows


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
        self.rules: LoadingRules
        self.ahead: dict[tuple[int, tuple[int, ...]], LoadingBeside] = {}
        self.loading = False
        self.whole: set[int] = set()  # datasets of which a replica needs all rows of a mini-batch to know its own

    def add(self, body: AddDataset) -> DatasetSeen:
        """Take a dataset, and say what it is like, if it is made here."""
        for number in body.gone:
            self.datasets.pop(number, None)
        self.rules, given = unpickle(body.rules), body.dataset
        if isinstance(given, str):
            dataset = _made(given)
        else:
            dataset = {k: unpickle(v) for k, v in given.items()} if isinstance(given, Mapping) else unpickle(given)
        self.datasets[body.number] = opened = OpenedDataset.of(body, dataset, self.shares_process, self._goes_on)
        if not isinstance(given, str):
            return DatasetSeen()
        rows = len(dataset) if hasattr(dataset, "__len__") else None
        sample = replace(opened, parts={None: dataset}, keys=(None,)).load(body.sample, ())
        row = f"whose row {body.sample[0]!r} has the digest {_digest(sample)}"
        return DatasetSeen(rows, f"it is a {type(dataset).__qualname__} of {rows} rows, {row}")

    def load(self, division: Division, trains: bool, weighs: bool = False) -> tuple[Division, tuple[float, ...] | None]:
        """The mini-batch with what is loaded in its place, divided as if it had been given: this worker's share.

        If the worker ``weighs`` the losses, also their weights, by all rows. A replica that does not weigh them loads the rows
        of its share alone, if these can be known without the others.
        """
        columns = [leaf for value in division.arguments.values() for leaf in loaded_columns(value)]
        self.loading, loaded = True, None
        try:
            own = not weighs and division.share is not None and self._are_by_rows(columns)
            loaded = self._divided(division, columns, trains, division) if own else None
            own = loaded is not None
            loaded = loaded or self._divided(division, columns, trains, None)
        finally:
            self.loading = False
        found: Mapping[int, Any] = loaded or {}

        def whole(leaf: DividedValue) -> Any:
            return found.get(id(leaf), leaf)

        def share(leaf: DividedValue) -> Any:
            cut = leaf.loaded and not own
            return map_divided(lambda each: each.part(division), whole(leaf)) if cut else whole(leaf)

        held = _with_arguments(division, share)
        self._check(held)
        if not weighs:
            return held, None
        rules, of_all = self.rules, replace(_with_arguments(division, whole), share=None)
        return held, loss_weights(self.modules.get(LOSS), of_all, rules.target, rules.loss_reduction)

    def _are_by_rows(self, columns: Sequence[LoadedColumn]) -> bool:
        """Whether the rows of a share can be loaded without the others, as far as it is known."""
        return all(
            leaf.spec is None and not leaf.counts and batch.dataset not in self.whole
            for leaf in columns
            for batch in leaf.batches
        )

    def _divided(
        self, division: Division, columns: Sequence[LoadedColumn], trains: bool, share: Division | None
    ) -> dict[int, Any] | None:
        """What is loaded for each column, by its id, of the rows of this ``share`` alone; None if that cannot be."""
        divider = Divider(division.chunks, division.mask)
        rows, found = dict[Any, dict[Hashable, Any]](), dict[int, Any]()
        for leaf in columns:
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

    def _rows(self, batch: IndexBatch, share: Division | None) -> dict[Hashable, Any] | None:
        """The rows of a mini-batch, or of a share of it. Those that come next begin to be loaded."""
        dataset, indices = self.datasets[batch.dataset], _share_of(batch, share)
        begun = self.ahead.pop((batch.dataset, batch.draws), None)
        if begun is not None and begun.indices == indices:
            while not wait([begun.rows], timeout=0.05).done:
                self._goes_on()
            rows: dict[Hashable, Any] | None = begun.rows.result()
        else:
            rows = dataset.load(indices, batch.draws, alone=share is not None)
        if rows is None:
            return None
        wanted = {(each.dataset, each.draws): each for each in batch.ahead}
        for key in [key for key in self.ahead if key[0] == batch.dataset and key not in wanted]:
            self.ahead.pop(key).ended = True
        for key, each in wanted.items():
            if key not in self.ahead:
                self.ahead[key] = LoadingBeside(dataset, _share_of(each, share))
        return rows

    def _goes_on(self) -> None:
        if self.given_up():
            raise Interrupted

    def _check(self, loaded: Division) -> None:
        """Raise if what was loaded is not as the Pipe needs it. What the Pipe was traced for is checked where all of it is."""
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
        if guards.are_of_rows and all(name in users for name in guards.checked_names if name in loaded.names):
            of_each_size = {loaded.sizes and loaded.rows_of(chunk): chunk for chunk in loaded.held}
            for chunk in of_each_size.values():
                guards.check(
                    {user: loaded.take(name, chunk) for user, name in users.items() if name != self.rules.target}
                )


def _with_arguments(division: Division, function: Callable[[DividedValue], Any]) -> Division:
    return replace(division, arguments={name: map_divided(function, each) for name, each in division.arguments.items()})


def _share_of(batch: IndexBatch, share: Division | None) -> Sequence[Any]:
    """The indices of the micro-batches that a share holds, of a mini-batch that is divided as this one; without one, all."""
    if share is None:
        return batch.indices
    sizes, held = even_sizes(len(batch), share.chunks), share.held
    return batch.indices[sum(sizes[: held.start]) : sum(sizes[: held.stop])]


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
