"""Loads the inputs of a step that the controller knows the indices of, on the worker that uses them."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from operator import attrgetter
from typing import Any

from torch import nn

from pippy.drivers.base.errors import DriverError, MicrobatchError
from pippy.drivers.batch.columns import (
    DivisionOfColumns,
    IndexBatch,
    LoadedColumn,
    LoadingRules,
    check_dataset,
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
from pippy.drivers.worker.data.opened_dataset import LoadingBeside, OpenedDataset
from pippy.ir.base.errors import InputError
from pippy.ir.base.names import LOSS
from pippy.ir.call.guards import differs


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
            found = self._own(division, leaves, trains)
            if found is not None:
                return found, True
        divider, rows, found = (
            Divider(division.chunks, division.mask),
            dict[Any, dict[Hashable, Any]](),
            dict[int, Any](),
        )
        for leaf in leaves:
            values = []
            for batch in leaf.batches:
                key = batch.dataset, batch.draws
                if key not in rows:
                    loaded = self._rows(batch)
                    assert loaded is not None
                    rows[key] = loaded
                values.append(rows[key][leaf.key])
            found[id(leaf)] = _divided(divider, leaf, values, trains)
        for path, sizes in divider.given_sizes:
            if sizes != division.sizes:
                raise MicrobatchError(
                    f"{path} was loaded in micro-batches of {sizes} rows, but the micro-batches of the step have "
                    f"{division.sizes}"
                )
        return found, False

    def _are_by_rows(self, leaves: Sequence[LoadedColumn]) -> bool:
        """Whether the rows of a share can be loaded without the others."""
        return all(
            leaf.spec is None and not leaf.counts and batch.dataset not in self.whole
            for leaf in leaves
            for batch in leaf.batches
        )

    def _own(self, division: DivisionOfColumns, leaves: Sequence[LoadedColumn], trains: bool) -> dict[int, Any] | None:
        """As `_loaded`, of the rows of this worker's share alone; None if that cannot be."""
        divider, rows, found = Divider(division.chunks), dict[Any, dict[Hashable, Any]](), dict[int, Any]()
        for leaf in leaves:
            (batch,) = leaf.batches
            key, share = (batch.dataset, batch.draws), _share_of(batch, division)
            if key not in rows:
                loaded = self._rows(batch, division)
                if loaded is None:
                    self.whole.add(batch.dataset)
                    return None
                rows[key] = loaded
            found[id(leaf)] = _divided(divider, leaf, [rows[key][leaf.key]], trains, len(share))
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


def _divided(
    divider: Divider, leaf: LoadedColumn, values: Sequence[Any], trains: bool, asked: int | None = None
) -> Any:
    refuse_inputs(values, trains)
    value = joined_items(values, leaf.counts, leaf.path) if leaf.counts else values[0]
    before, asked = len(divider.rows), sum(map(len, leaf.batches)) if asked is None else asked
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
