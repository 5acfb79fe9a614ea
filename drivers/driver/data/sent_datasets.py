"""Which workers have which datasets, and what each worker loads in a step.

first step with a dataset    AddDataset ──▶ the workers that use its columns ──DatasetSeen──▶ compared: is it the same?
each step                    the indices go with the step, without another message
"""

import weakref
from collections.abc import Callable, Collection, Container, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pippy.drivers.base.errors import DriverError
from pippy.drivers.batch.columns import Column, DivisionOfColumns, LoadingRules, loaded_columns
from pippy.drivers.batch.divide_call import guarded_inputs
from pippy.drivers.batch.division import Division
from pippy.drivers.batch.loss_weights import weighing_inputs
from pippy.drivers.driver.data.index_loader import DatasetSource
from pippy.drivers.lowering.lower import Lowered
from pippy.drivers.protocol.programs import AddDataset, DatasetSeen
from pippy.drivers.session.driver_commands import DriverCommands
from pippy.drivers.wire.pickling import pickle_by_value
from pippy.drivers.worker.data.dataset_reader import DatasetReader
from pippy.ir.base.trees import leaves
from pippy.ir.record.compiled import Compiled


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
        self.told: set[int] = set()  # the workers that have the rules
        self.gone: list[int] = []  # datasets that nobody has any more

    def weigh_by(self, loss_reduction: Callable[..., Any] | str) -> None:
        """From now on, workers that load targets weigh losses by this function, which is sent with their datasets."""
        self.loss_reduction = loss_reduction
        self.forget(self.told)

    def forget(self, ranks: Collection[int]) -> None:
        """Note that these workers have lost their datasets."""
        for key in [key for key in self.sent if key[1] in ranks]:
            del self.sent[key]
        self.told.difference_update(ranks)

    def divisions(
        self, division: Division, lowered: Lowered, ranks: Sequence[int], weigher: int | None
    ) -> dict[int, Division]:
        """Each worker's part of a mini-batch, by its rank.

        If a worker computes the weights of the losses, ``weigher`` is its place in the pipeline. If the Pipe was traced for
        values that workers load, one of these workers checks them.
        """
        program, workers = lowered.program, lowered.program.placement.workers
        shares = [division] if program.replicas == 1 else [division.part(share) for share in program.shares]
        checked, checker = self._checked(division, lowered.inputs)
        weighed = weighing_inputs(division, self.compiled.target_name, self.loss_reduction)
        self._check_weighed(division, weighed, weigher, program.replicas)
        by_rank = {}
        for at, rank in enumerate(ranks):
            replica, worker = divmod(at, workers)
            names = [name for name, takers in lowered.inputs.items() if worker in takers]
            names += [*(checked if worker == checker else []), *(weighed if worker == weigher else [])]
            part = shares[replica].only(list(dict.fromkeys(names)))
            if isinstance(part, DivisionOfColumns):
                loads = any(loaded_columns(value) for value in part.arguments.values())
                part = (
                    replace(part, checks_guards=worker == checker, weighs=worker == weigher) if loads else part.plain()
                )
            by_rank[rank] = part
        return by_rank

    def _checked(self, division: Division, inputs: Mapping[str, Container[int]]) -> tuple[list[str], int | None]:
        """The inputs whose values the Pipe was traced for, and the worker that checks them, as it loads some of them."""
        guarded = [name for name in guarded_inputs(self.compiled, division) if name in inputs]
        loaded = [name for name in guarded if loaded_columns(division.arguments[name])]
        return guarded, min(inputs[loaded[0]]) if loaded else None  # type: ignore[call-overload]

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
                sample = next(tuple(each.batch.indices[:1]) for each in columns if each.dataset is source)
                self._send(source, new, sample)

    @property
    def _rules(self) -> LoadingRules:
        return LoadingRules(self.compiled.guards, self.compiled.target_name, self.loss_reduction)

    def loaded_here(self, division: Division, columns: Sequence[Column], trains: bool) -> Division:
        """A mini-batch with all its values in this process, also those that the workers load."""
        if not isinstance(division, DivisionOfColumns):
            return division
        reader = DatasetReader({}, lambda: False, shares_process=True)
        reader.rules = self._rules
        for source in {column.dataset.number: column.dataset for column in columns}.values():
            keys = _keys(division, source.number)
            sample = next(tuple(each.batch.indices[:1]) for each in columns if each.dataset is source)
            message = source.sent_dataset(keys), source.sent_collate(), tuple(keys), sample
            reader.add(AddDataset(source.number, *message))
        return reader.load(division, trains)[1]

    def _send(self, source: DatasetSource, wanted: Mapping[int, frozenset[Hashable]], sample: tuple[Any, ...]) -> None:
        gone = tuple(self.gone)
        rules = pickle_by_value(self._rules)
        bodies = {
            rank: AddDataset(
                source.number,
                source.sent_dataset(keys),
                source.sent_collate(),
                tuple(keys),
                sample,
                None if rank in self.told else rules,
                gone,
                source.prefetch > 0,
            )
            for rank, keys in wanted.items()
        }
        seen = self.commands.call(bodies)
        self._compare(source, seen)
        if not any(number == source.number for number, _ in self.sent):
            weakref.finalize(source, _forget, self.sent, self.gone, source.number).atexit = False
        self.told |= bodies.keys()
        self.sent.update({(source.number, rank): keys for rank, keys in wanted.items()})

    def _compare(self, source: DatasetSource, seen: Mapping[int, DatasetSeen]) -> None:
        """Raise if the workers have made different datasets."""
        (first, one), *others = seen.items()
        for rank, other in others:
            if other == one:
                continue
            what = "the row that was compared is not the same"
            if one.rows != other.rows:
                what = f"it has {one.rows} rows on the one and {other.rows} on the other"
            elif one.kind != other.kind:
                what = f"it is a {one.kind} on the one and a {other.kind} on the other"
            raise DriverError(
                f"the dataset {source.dataset!r} is not the same on worker {first} ({self.workers[first]}) and "
                f"worker {rank} ({self.workers[rank]}): {what}, so inputs and targets would not belong together; "
                "its function must make the same dataset on every worker (sort lists of files, and seed random "
                "numbers)"
            )
        if source.rows is None:
            source.rows = one.rows


def _forget(sent: dict[tuple[int, int], Any], gone: list[int], number: int) -> None:
    for key in [key for key in sent if key[0] == number]:
        del sent[key]
    gone.append(number)


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
