"""Data that is loaded where it is used: the loader of indices, and which workers have which datasets.

The loader gives mini-batches as indices: the workers load the rows, each those columns that it uses. A dataset goes to workers
by value, or by the name of a function that makes it.

first step with a dataset    AddDataset ──▶ the workers that use its columns ──DatasetSeen──▶ compared: is it the same?
each step                    the indices go with the step, without another message
"""

import itertools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, default_collate

from pippy.drivers.base.errors import DriverError, PackingError
from pippy.drivers.batch.columns import (
    Column,
    IndexBatch,
    LoadingRules,
    check_dataset,
    columns_of,
    loaded_columns,
)
from pippy.drivers.batch.divide_call import guarded_inputs
from pippy.drivers.batch.division import Division
from pippy.drivers.batch.loss_weights import weighing_inputs
from pippy.drivers.lowering.lower import Lowered
from pippy.drivers.protocol.programs import AddDataset, DatasetSeen
from pippy.drivers.session.driver_commands import DriverCommands
from pippy.drivers.wire.pickling import Pickled, pickle_by_value
from pippy.drivers.worker.data import DatasetReader
from pippy.ir.base.public_calls import check_count, is_whole, placing_words
from pippy.ir.base.trees import describe, leaves
from pippy.ir.record.compiled import Compiled
from pippy.ir.run.random_state import untouched_random_state

_numbers = itertools.count()

Columns = tuple[Column, ...] | dict[str, Column]


class DatasetSource:
    """A dataset, its number, and the forms in which it is sent. ``rows`` is its number of rows, if that is known.

    >>> DatasetSource("package.module:function", None).rows
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any] | None, prefetch: int = 0) -> None:
        self.number, self.dataset, self.prefetch = next(_numbers), dataset, prefetch
        self.collate = None if collate is default_collate else collate
        self.columns: dict[Hashable, Any] | None = None
        self.rows: int | None = None
        self._sent: dict[Any, Pickled] = {}
        what = "how many mini-batches a worker loads ahead of its steps"
        check_count("prefetch", prefetch, what, DriverError, least=0)
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
        self.columns = columns_of(dataset) if self.collate is None else None
        self.rows = len(dataset) if hasattr(dataset, "__len__") else None

    @property
    def by_name(self) -> bool:
        """Whether workers make it themselves."""
        return isinstance(self.dataset, str)

    def message(self, keys: Collection[Hashable], sample: tuple[Any, ...], rules: LoadingRules) -> AddDataset:
        """The message to a worker that needs these columns."""
        collate = None if self.collate is None else self._pickled("collate", self.collate)
        dataset, sent_rules = self._sent_dataset(keys), pickle_by_value(rules)
        return AddDataset(self.number, dataset, collate, tuple(keys), sample, sent_rules, beside=self.prefetch > 0)

    def _sent_dataset(self, keys: Collection[Hashable]) -> Pickled | Mapping[Hashable, Pickled] | str:
        if self.by_name:
            return str(self.dataset)
        if self.columns is None or not keys <= self.columns.keys():  # type: ignore[operator]
            return self._pickled(None, self.dataset)
        return {key: self._pickled(("column", key), self.columns[key]) for key in keys}

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


@placing_words("IndexLoader(dataset)")
class IndexLoader:
    """A loader whose mini-batches are indices. The workers that use an argument load its rows; the controller loads none.

    ``dataset`` has ``__getitem__`` or ``__getitems__``, and is sent to the workers once; or it is the name of a function that
    makes it there, "package.module:function". The rest is as in `torch.utils.data.DataLoader`. A mini-batch is a tuple or a
    dict of columns: ``driver.run(chunks, *batch)`` or ``**batch``. ``columns`` says how many there are, or their names; it is
    needed for a dataset by name, and else found out from one row. With ``prefetch=2``, workers load the next two mini-batches
    while they compute. See docs/loop.md.

    >>> from torch.utils.data import TensorDataset
    >>> from pippy import Pipe, PipelineDriver1F1B, local_cluster
    >>> torch.manual_seed(0)
    <torch._C.Generator object at ...>
    >>> x, target = torch.randn(8, 4), torch.randn(8, 1)
    >>> loader = IndexLoader(TensorDataset(x, target), batch_size=4)
    >>> pipe = Pipe.from_sequential(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)), torch.nn.MSELoss())
    >>> with local_cluster(2, threads=1) as cluster:
    ...     driver = PipelineDriver1F1B(pipe, cluster)
    ...     losses = [driver.run(2, *batch) for batch in loader]
    ...     print(losses == [driver.run(2, x[at : at + 4], target[at : at + 4]) for at in (0, 4)])
    True
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Sequence[Any]] | None = None,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        columns: int | Sequence[str] | None = None,
        seed: int | None = None,
        prefetch: int = 0,
    ) -> None:
        self.source = DatasetSource(dataset, collate_fn, prefetch)
        self.keys = _keys_of(columns, self.source)
        self.seed = torch.initial_seed() if seed is None else seed
        self.epoch = self.given = 0
        self._loaded = False  # whether a state was loaded, and nothing was given since
        self._single = 0  # mini-batches that `batch` made
        self._shuffles = shuffle
        if batch_sampler is not None:
            if (batch_size, shuffle, drop_last, sampler) != (1, False, False, None):
                raise DriverError(
                    "batch_sampler= cannot be combined with batch_size, shuffle, sampler and drop_last, because it "
                    "decides all of these; leave them out"
                )
            self.batch_sampler: Iterable[Sequence[Any]] = batch_sampler
            self.sampler: Any = None
            return
        check_count("batch_size", batch_size, "how many rows a mini-batch has", DriverError)
        if sampler is not None and shuffle:
            raise DriverError("sampler= and shuffle=True both decide the order; leave one of them out")
        self.sampler = self._own_sampler() if sampler is None else sampler
        self.batch_sampler = BatchSampler(self.sampler, batch_size, drop_last)

    def _own_sampler(self) -> Any:
        rows = self.source.rows
        if rows is None:
            raise DriverError(
                "the number of rows of the dataset is not known in this process: the workers make the dataset, or "
                "it has no __len__; give its indices in order with sampler=range(1000), or a sampler of "
                "torch.utils.data"
            )
        if not self._shuffles:
            return SequentialSampler(range(rows))
        return RandomSampler(range(rows), generator=torch.Generator())

    def __len__(self) -> int:
        """How many mini-batches an epoch has."""
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"IndexLoader({describe(self.source.dataset)}, columns={list(self.keys)})"

    def batch(self, indices: Iterable[Any]) -> Columns:
        """The mini-batch of the rows with these indices.

        >>> loader = IndexLoader([(1.0, 2.0), (3.0, 4.0)])
        >>> loader.batch([1, 0, 1])
        (Column(0, 3 rows), Column(1, 3 rows))
        """
        self._single += 1
        return self._columns(IndexBatch(self.source.number, self._listed(indices), (self.seed, self._single)))

    def __iter__(self) -> Iterator[Columns]:
        """The mini-batches of the next epoch. After `load_state_dict`, those of the same epoch that were not given yet."""
        epoch, skip, self._loaded = self.epoch, self.given, False
        self._begin_epoch(epoch)
        batches = (
            IndexBatch(self.source.number, self._listed(indices), (self.seed, epoch, position))
            for position, indices in enumerate(self.batch_sampler)
            if position >= skip
        )
        for position, batch in enumerate(_with_those_ahead(batches, self.source.prefetch), skip):
            self.epoch, self.given = epoch, position + 1
            yield self._columns(batch)
        self.epoch, self.given = epoch + 1, 0

    def _begin_epoch(self, epoch: int) -> None:
        for sampler in (self.sampler, self.batch_sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        if self._shuffles:
            self.sampler.generator.manual_seed(hash((self.seed, epoch)))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. The order and the random numbers of the dataset depend on it.

        If a state was loaded that is from the end of this epoch, no mini-batch of it is left, and the iteration is empty.
        """
        if epoch != self.epoch:
            ended = self._loaded and (epoch + 1, 0) == (self.epoch, self.given)
            self.epoch, self.given = epoch, sys.maxsize if ended else 0

    def state_dict(self) -> dict[str, int]:
        """The position: the epoch, the number of its mini-batches that were given, and the seed."""
        return {"seed": self.seed, "epoch": self.epoch, "given": self.given, "single": self._single}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from the position of another loader of the same dataset."""
        self._loaded = True
        self.seed, self.epoch, self.given, self._single = (state[key] for key in ("seed", "epoch", "given", "single"))

    def _listed(self, indices: Iterable[Any]) -> Sequence[Any]:
        found = indices.tolist() if hasattr(indices, "tolist") else list(indices)
        found = [each.item() if hasattr(each, "item") else each for each in found]
        self.source.check_indices(found)
        return found

    def _columns(self, batch: IndexBatch) -> Columns:
        columns = {key: Column(self.source, key, [batch]) for key in self.keys}
        return columns if any(isinstance(key, str) for key in self.keys) else tuple(columns.values())  # type: ignore[return-value]


def _with_those_ahead(batches: Iterable[IndexBatch], count: int) -> Iterator[IndexBatch]:
    """Each mini-batch, with the ``count`` mini-batches that come next."""
    waiting = deque[IndexBatch]()
    for batch in batches:
        waiting.append(batch)
        if len(waiting) > count:
            yield replace(waiting.popleft(), ahead=tuple(waiting))
    while waiting:
        yield replace(waiting.popleft(), ahead=tuple(waiting))


def _keys_of(columns: int | Sequence[str] | None, source: DatasetSource) -> tuple[Hashable, ...]:
    """The keys of the columns, from what was given, or from one row."""
    if columns is None:
        return _found_keys(source)
    if is_whole(columns):
        return tuple(range(columns))
    if isinstance(columns, (tuple, list)) and columns and all(isinstance(each, str) for each in columns):
        return tuple(columns)
    raise DriverError(f"columns={describe(columns)}: give how many columns the dataset has, or their names")


def _found_keys(source: DatasetSource) -> tuple[Hashable, ...]:
    if source.columns is not None:
        return tuple(source.columns)
    if source.by_name:
        raise DriverError(
            f"columns= is missing: the dataset {source.dataset!r} is given by name, so only the workers make it, "
            "and its columns are not known in this process; give the number of columns, or their names"
        )
    try:
        with untouched_random_state():
            row = source.dataset[0] if hasattr(source.dataset, "__getitem__") else source.dataset.__getitems__([0])[0]
            rows = (source.collate or default_collate)([row])
    except Exception as error:
        raise DriverError(
            f"loading one row, to see its columns, raised {type(error).__name__}: {error}; give the number of "
            "columns, as in columns=2, or their names"
        ) from error
    if isinstance(rows, Mapping):
        return tuple(rows)
    return tuple(range(len(rows))) if isinstance(rows, (tuple, list)) else (None,)


class SentDatasets:
    """Sends datasets to the workers of one driver."""

    def __init__(
        self,
        compiled: Compiled,
        commands: DriverCommands,
        workers: Sequence[str],
        loss_reduction: Callable[..., Any] | str | None,
    ) -> None:
        self.compiled, self.commands, self.workers, self.loss_reduction = compiled, commands, workers, loss_reduction
        self.sent: dict[tuple[int, int], frozenset[Hashable]] = {}  # by dataset and worker: the columns
        self.gone: list[int] = []  # datasets that nobody has any more

    def weigh_by(self, loss_reduction: Callable[..., Any] | str) -> None:
        """From now on, workers that load targets weigh losses by this function, which is sent with their datasets."""
        self.loss_reduction = loss_reduction
        self.sent.clear()

    def forget(self, ranks: Collection[int]) -> None:
        """Note that these workers have lost their datasets."""
        for key in [key for key in self.sent if key[1] in ranks]:
            del self.sent[key]

    def divisions(
        self, division: Division, lowered: Lowered, ranks: Sequence[int], weigher: int | None
    ) -> dict[int, Division]:
        """Each worker's part of a mini-batch, by its rank.

        If a worker computes the weights of the losses, ``weigher`` is its place in the pipeline. If the Pipe was traced for
        values that workers load, one of these workers has all of them, and checks them.
        """
        program, workers = lowered.program, lowered.program.placement.workers
        shares = [division] if program.replicas == 1 else [division.part(share) for share in program.shares]
        guarded = guarded_inputs(self.compiled, division)
        checker = next(
            (min(lowered.inputs[name]) for name in guarded if loaded_columns(division.arguments[name])), None
        )
        weighed = weighing_inputs(division, self.compiled.target_name, self.loss_reduction)
        self._check_weighed(division, weighed, weigher, program.replicas)
        by_rank = {}
        for at, rank in enumerate(ranks):
            replica, worker = divmod(at, workers)
            names = [name for name, takers in lowered.inputs.items() if worker in takers]
            names += [*(guarded if worker == checker else []), *(weighed if worker == weigher else [])]
            by_rank[rank] = shares[replica].only(list(dict.fromkeys(names)))
        return by_rank

    def _check_weighed(self, division: Division, weighed: Sequence[str], weigher: int | None, replicas: int) -> None:
        """Raise if a replica would weigh the losses of all replicas by its own part of the rows."""
        as_tensors = [name for name in weighed if not loaded_columns(division.arguments[name])]
        if weigher is not None and replicas > 1 and as_tensors:
            users = {name: user for user, name in division.names.items()}
            raise DriverError(
                f"replicas={replicas}: the losses are weighted by {users.get(as_tensors[0], as_tensors[0])!r}, which is given "
                f"as a tensor, and by others, which are given by index; give all of "
                f"{', '.join(users.get(name, name) for name in weighed)} by index, or all as tensors"
            )

    def send(self, columns: Sequence[Column], divisions: Mapping[int, Division]) -> None:
        """Send the workers the datasets that they load from and do not have."""
        sources: dict[int, DatasetSource] = {column.dataset.number: column.dataset for column in columns}
        for number, source in sources.items():
            wanted = {rank: _keys(division, number) for rank, division in divisions.items()}
            wanted = {rank: keys for rank, keys in wanted.items() if keys}
            new = {rank: keys | self.sent.get((number, rank), frozenset()) for rank, keys in wanted.items()}
            if any(self.sent.get((number, rank)) != keys for rank, keys in new.items()):
                self._send(source, new, _sample(columns, source))

    @property
    def _rules(self) -> LoadingRules:
        return LoadingRules(self.compiled.guards, self.compiled.target_name, self.loss_reduction)

    def loaded_here(self, division: Division, columns: Sequence[Column], trains: bool) -> Division:
        """A mini-batch with all its values in this process, also those that the workers load."""
        if not division.loads:
            return division
        reader = DatasetReader({}, lambda: False, shares_process=True)
        for source in {column.dataset.number: column.dataset for column in columns}.values():
            message = source.message(_keys(division, source.number), _sample(columns, source), self._rules)
            reader.add(replace(message, beside=False))
        return reader.load(division, trains)[0]

    def _send(self, source: DatasetSource, wanted: Mapping[int, frozenset[Hashable]], sample: tuple[Any, ...]) -> None:
        gone = tuple(self.gone)
        messages = {rank: source.message(keys, sample, self._rules) for rank, keys in wanted.items()}
        seen = self.commands.call({rank: replace(each, gone=gone) for rank, each in messages.items()})
        self._compare(source, seen)
        if not any(number == source.number for number, _ in self.sent):
            weakref.finalize(source, _forget, self.sent, self.gone, source.number).atexit = False
        self.sent.update({(source.number, rank): keys for rank, keys in wanted.items()})

    def _compare(self, source: DatasetSource, seen: Mapping[int, DatasetSeen]) -> None:
        """Raise if the workers have made different datasets."""
        (first, one), *others = seen.items()
        for rank, other in others:
            if other != one:
                raise DriverError(
                    f"the dataset {source.dataset!r} is not the same on all workers, so inputs and targets would not belong "
                    f"together: on worker {first} ({self.workers[first]}) {one.words}, and on worker {rank} "
                    f"({self.workers[rank]}) {other.words}; its function must make the same dataset on every worker (sort "
                    "lists of files, and seed random numbers)"
                )
        if source.rows is None:
            source.rows = one.rows


def _forget(sent: dict[tuple[int, int], Any], gone: list[int], number: int) -> None:
    for key in [key for key in sent if key[0] == number]:
        del sent[key]
    gone.append(number)


def _sample(columns: Sequence[Column], source: DatasetSource) -> tuple[Any, ...]:
    """The row by which workers compare a dataset that they make."""
    return next(tuple(each.batches[0].indices[:1]) for each in columns if each.dataset is source)


def _keys(division: Division, number: int) -> frozenset[Hashable]:
    """The columns of a dataset that are loaded for a part of a mini-batch."""
    loaded = [leaf for value in division.arguments.values() for leaf in loaded_columns(value)]
    return frozenset(leaf.key for leaf in loaded if leaf.batches[0].dataset == number)


def check_no_columns(values: Any, what: str) -> None:
    """Raise if workers load some of the values, as ``what`` needs the sizes of all."""
    for column in columns_in(values):
        raise DriverError(
            f"{what} needs sizes, but the sizes of {column!r} are not known in this process, because workers load "
            "it; give a tensor of the same shape (for memory(), a tensor on the meta device is enough)"
        )


def columns_in(*values: Any) -> list[Column]:
    """The columns among some values."""
    return [leaf for leaf in leaves(values) if isinstance(leaf, Column)]
