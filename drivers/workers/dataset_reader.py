"""Loads the inputs of a step that the controller knows the indices of, on the worker that uses them."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from pippy.drivers.batches.columns import DivisionOfColumns, IndexBatch, LoadedColumn, LoadingRules, loaded_columns
from pippy.drivers.batches.dataset_items import check_dataset, column_of, columns_of, load_rows
from pippy.drivers.batches.divide import Divider
from pippy.drivers.batches.division import DividedValue, Division, map_divided
from pippy.drivers.batches.items import joined_items
from pippy.drivers.batches.loss_weights import loss_weights
from pippy.drivers.batches.refused_inputs import refuse_inputs
from pippy.drivers.control.messages import AddDataset, DatasetSeen
from pippy.drivers.errors import DriverError, MicrobatchError
from pippy.drivers.transport.pickling import unpickle
from pippy.drivers.transport.received_values import Interrupted
from pippy.ir.errors import InputError
from pippy.ir.guards import differs
from pippy.ir.names import LOSS
from pippy.ir.run.random_state import seed_all, untouched_random_state
from pippy.ir.trees import describe, leaves

Draws = tuple[int, ...]


@dataclass(frozen=True)
class OpenedDataset:
    """A dataset on a worker: of all columns, or one for each of those that it needs."""

    whole: Any
    columns: Mapping[Hashable, Any] | None
    collate: Callable[[Any], Any] | None
    keys: tuple[Hashable, ...]

    @classmethod
    def of(cls, body: AddDataset, dataset: Any) -> "OpenedDataset":
        """The dataset that a message is about, or a dict of those of its columns."""
        collate = None if body.collate is None else unpickle(body.collate)
        columns = dataset if isinstance(body.dataset, Mapping) else columns_of(dataset) if collate is None else None
        if columns is not None and all(key in columns for key in body.keys):
            return cls(None, {key: columns[key] for key in body.keys}, collate, body.keys)
        return cls(dataset, None, collate, body.keys)

    def load(self, indices: Sequence[Any], draws: Draws, goes_on: Callable[[], None]) -> dict[Hashable, Any]:
        """The columns that are needed, of the rows with these indices.

        Random numbers are keyed by ``draws``, so that all workers that load these rows draw the same, and those of the stages
        are as if nothing had been drawn.
        """
        with untouched_random_state(), torch.autocast("cpu", enabled=False):
            if self.columns is not None:
                return {key: self._load(each, indices, (*draws, key), goes_on) for key, each in self.columns.items()}
            rows = self._load(self.whole, indices, draws, goes_on)
        return {key: column_of(rows, key, len(self.keys) == 1) for key in self.keys}

    def _load(self, dataset: Any, indices: Sequence[Any], draws: tuple[Any, ...], goes_on: Callable[[], None]) -> Any:
        seed_all(int.from_bytes(blake2b(repr(draws).encode(), digest_size=7).digest(), "little"))
        return load_rows(dataset, indices, self.collate, goes_on)


class DatasetReader:
    """The datasets of one driver on one worker. ``loading`` while it loads."""

    def __init__(self, modules: Mapping[str, nn.Module], given_up: Callable[[], bool]) -> None:
        self.modules, self.given_up = modules, given_up
        self.datasets: dict[int, OpenedDataset] = {}
        self.rules: LoadingRules | None = None
        self.loading = False

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
        self.datasets[body.number] = opened = OpenedDataset.of(body, dataset)
        return _seen(dataset, opened.collate, body.sample) if isinstance(given, str) else DatasetSeen()

    def load(self, division: DivisionOfColumns, trains: bool) -> tuple[Division, Division]:
        """The mini-batch with what is loaded in its place, divided as if it had been given: this worker's share, and all of it.

        Of what was given, both have the share.
        """
        self.loading = True
        try:
            loaded = self._loaded(division, trains)
        finally:
            self.loading = False

        def whole(leaf: DividedValue) -> Any:
            return loaded.get(id(leaf), leaf)

        def share(leaf: DividedValue) -> Any:
            return map_divided(lambda each: each.part(division), whole(leaf)) if id(leaf) in loaded else leaf

        plain = division.plain()
        held = replace(plain, arguments={name: map_divided(share, each) for name, each in division.arguments.items()})
        self._check(division, held)
        arguments = {name: map_divided(whole, each) for name, each in division.arguments.items()}
        return held, replace(plain, arguments=arguments, share=None)

    def _loaded(self, division: DivisionOfColumns, trains: bool) -> dict[int, Any]:
        """What is loaded for each column, by its id, and divided."""
        divider, rows, found = (
            Divider(division.chunks, division.mask),
            dict[Any, dict[Hashable, Any]](),
            dict[int, Any](),
        )
        for leaf in (leaf for value in division.arguments.values() for leaf in loaded_columns(value)):
            values = []
            for batch in leaf.batches:
                key = batch.dataset, batch.draws
                if key not in rows:
                    rows[key] = self._rows(batch)
                values.append(rows[key][leaf.key])
            found[id(leaf)] = _divided(divider, leaf, values, trains)
        for path, sizes in divider.given_sizes:
            if sizes != division.sizes:
                raise MicrobatchError(
                    f"{path} was loaded in micro-batches of {sizes} rows, and the step has {division.sizes}"
                )
        return found

    def weights(self, division: Division) -> tuple[float, ...]:
        """The weights of the losses, by what was loaded."""
        assert self.rules is not None
        return loss_weights(self.modules.get(LOSS), division, self.rules.target, self.rules.loss_reduction)

    def _rows(self, batch: IndexBatch) -> dict[Hashable, Any]:
        return self.datasets[batch.dataset].load(batch.indices, batch.draws, self._goes_on)

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


def _divided(divider: Divider, leaf: LoadedColumn, values: Sequence[Any], trains: bool) -> Any:
    refuse_inputs(values, trains)
    value = joined_items(values, leaf.counts, leaf.path) if leaf.counts else values[0]
    before, asked = len(divider.rows), sum(map(len, leaf.batches))
    found = divider.divide(value, leaf.spec, leaf.path, leaf.outer)
    for path, what, rows in divider.rows[before:]:
        if rows != asked:
            raise MicrobatchError(
                f"{path}: {asked} indices gave {rows} rows, {what}; have the dataset give one row for each index, or "
                "give what is no part of the batch a Replicate(), and what has its rows elsewhere a TensorChunkSpec(dim)"
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


def _seen(dataset: Any, collate: Callable[[Any], Any] | None, sample: Sequence[Any]) -> DatasetSeen:
    """What the controller compares of a dataset that each worker makes."""
    whole = OpenedDataset(dataset, None, collate, (None,))
    rows = len(dataset) if hasattr(dataset, "__len__") else None
    return DatasetSeen(type(dataset).__qualname__, rows, _digest(whole.load(sample, (), lambda: None)[None]))


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
