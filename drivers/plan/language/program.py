"""A program: the instructions of all workers, and the text in which it is written."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain as chain_of
from pathlib import Path
from typing import Any, ClassVar

from pippy.drivers.plan.language.edges import Checkpoints, Edge, GradientSum, Pass, Replicated, by_end, chain, shares
from pippy.drivers.plan.language.errors import ArgumentError, beginning, require
from pippy.drivers.plan.language.instructions import Compute, Instruction, Op
from pippy.drivers.plan.language.placement import Placement, is_count, require_count
from pippy.drivers.plan.language.scanner import NAME, QUALIFIED_NAME, SCHEDULE


class Drawn:
    """A class whose objects a notebook shows as pictures. Without a picture it shows the ``repr``.

    >>> from pippy.drivers.plan import make_schedule
    >>> make_schedule("1f1b", workers=2, chunks=2)._repr_html_()[:4]
    '<svg'
    """

    picture: ClassVar[Callable[[Any], str | None]]

    def _repr_html_(self) -> str | None:
        return Drawn.picture(self)


TITLE = "pippy program 1"
INDENT = "  "
CONTINUES = "continues"


@dataclass(frozen=True)
class Program(Drawn):
    """What each worker does, in order, and what has to be known to check it.

    ``backward`` lists the stages that have a backward pass: none in a program for inference. ``memory`` is the limit of live
    stage-micro-batches on each worker, if there is one. ``checkpoints`` are the forwards that keep their inputs only, and are
    computed again before their backwards. ``edges`` are the values that pass between stages; None means that the
    stages form a chain. ``added`` has the gradients of each value that has several, in the order in which they are added: those
    that are made on one worker are added there, so that one leaves it. A ``lowered`` program says what is sent, received,
    added, freed and reduced. Any other program only orders
    computations, and the edges imply the rest. ``str(program)`` is the text of its file, and ``parse_program`` reads it.

    With ``replicas``, ``placement`` is that of the first, and those of the others follow it, each on as many workers. Each
    replica computes its share of the micro-batches. ``notes`` lists the stages with batch norms that count the micro-batches
    of all replicas: the replicas tell one another what these have noted.

    ``hosts`` has the number of each worker's host; None means that all are on one. A value then goes once to each host that
    needs it, and is handed on there.

    With ``slices``, a micro-batch is one slice of the sequences of a row of micro-batches, which has so many: micro-batch 5 of
    a program with 4 slices is slice 1 of row 1. A slice reads the keys and values that a stage has made of the slices before
    it, and those get gradients from it: so a stage goes forward slice by slice, and backward from the last to the first.

    A program that makes tokens chooses them (C) for the next run: an edge from a C goes there. With ``continues``, it takes
    what the run before has chosen; without, it is the first run.

    >>> from pippy.drivers.plan import make_schedule
    >>> program = make_schedule("1f1b", workers=2, chunks=2)
    >>> [str(instruction) for instruction in program.orders[0]]
    ['F0.0', 'F0.1', 'B0.0', 'B0.1']
    >>> from pippy.drivers.plan import parse_program
    >>> parse_program(str(program)) == program
    True
    """

    schedule: str
    placement: Placement
    chunks: int
    orders: tuple[tuple[Instruction, ...], ...]
    backward: tuple[int, ...]
    memory: tuple[int, ...] | None = None
    edges: tuple[Edge, ...] | None = None
    replicated: tuple[Replicated, ...] = ()
    lowered: bool = False
    checkpoints: tuple[Checkpoints, ...] = ()
    replicas: int = 1
    notes: tuple[int, ...] = ()
    continues: bool = False
    added: tuple[tuple[str, ...], ...] = ()
    hosts: tuple[int, ...] | None = None
    slices: int = 1

    def __post_init__(self) -> None:
        require("placement", self.placement, Placement, "give a Placement, as make_placement makes it")
        require("orders", self.orders, tuple, "give one tuple of instructions for each worker")
        require_count("chunks", self.chunks)
        require_count("slices", self.slices)
        shares(self.chunks, self.replicas, self.slices)  # raises if a replica would have none
        for why in chain_of(
            self._unclear_sizes(),
            self._unclear_stages(),
            self._unclear_checkpoints(),
            self._unclear_names(),
            self._unclear_edges(),
            self._unclear_sums(),
        ):
            raise ArgumentError(why)

    def _unclear_sizes(self) -> Iterator[str]:
        if not SCHEDULE.fullmatch(self.schedule):
            yield f"schedule={beginning(self.schedule)} must be one line of ASCII text, without spaces at its ends"
        replicas = f" and {self.replicas} replicas" * (self.replicas > 1)
        for what, by_worker in (("orders", self.orders), ("memory", self.memory), ("hosts", self.hosts)):
            if by_worker is not None and len(by_worker) != self.workers:
                yield f"{what} of {len(by_worker)} workers for placement {self.placement}{replicas}; give one per worker"
        for what, numbers in (("memory", self.memory), ("hosts", self.hosts)):
            for number in numbers or ():
                if not is_count(number, least=0):
                    yield f"{what}={beginning(numbers)}: {beginning(number)} must be a whole number of at least 0"

    def _unclear_stages(self) -> Iterator[str]:
        named = [(name, stage) for name in ("backward", "notes") for stage in getattr(self, name)]
        named += [(f"edge {edge}", end.stage) for edge in self.edges or () for end in edge.ends]
        named += [(f"checkpoint {checkpoint}", checkpoint.stage) for checkpoint in self.checkpoints]
        named += [(f"replicated {copies}", stage) for copies in self.replicated for stage in copies.stages]
        for where, stage in named:
            if not 0 <= stage < self.stages:
                yield f"{where}: there is no stage {stage}; the placement has stages 0 to {self.stages - 1}"
        for name, stages in (("backward", self.backward), ("notes", self.notes)):
            if list(stages) != sorted(set(stages)):
                yield f"{name}={stages} must name each stage once, in order"
        if self.notes and self.replicas == 1:
            yield f"notes={self.notes}: there are no other replicas to tell; leave notes out"

    def _unclear_checkpoints(self) -> Iterator[str]:
        for each in self.checkpoints:
            if each.stage not in self.backward:
                yield f"checkpoint {each}: stage {each.stage} has no backward; leave the line out"
            if not all(0 <= microbatch < self.chunks for microbatch in each.microbatches):
                yield f"checkpoint {each}: the program has micro-batches 0 to {self.chunks - 1}"
            if not each.microbatches or list(each.microbatches) != sorted(set(each.microbatches)):
                yield f"checkpoint {each} must name at least one micro-batch, each once, in order"
        stages = [each.stage for each in self.checkpoints]
        if stages != sorted(set(stages)):
            yield f"checkpoint: {stages} must name each stage once, in order"

    def _unclear_names(self) -> Iterator[str]:
        values = [(f"edge {edge}", edge.value, NAME) for edge in self.edges or ()]
        parameters = [(f"replicated {copies}", copies.parameter, QUALIFIED_NAME) for copies in self.replicated]
        for named in (values, parameters):
            counts = Counter(name for _, name, _ in named)
            for where, name, pattern in named:
                if not pattern.fullmatch(name):
                    yield f"{where}: {beginning(name)} must be a name of letters, digits and underscores"
                if counts[name] > 1:
                    yield f"{where}: {name} is there twice; give each name one line"

    def _unclear_edges(self) -> Iterator[str]:
        for copies in self.replicated:
            if not copies.stages:
                yield f"replicated {copies.parameter}: no stage has a copy; leave the line out"
        for edge in self.edges or ():
            if not edge.targets:
                yield f"edge {edge}: no pass needs it; leave the edge out"
            for end in edge.ends:
                if end.phase == "B" and end.stage not in self.backward:
                    yield f"edge {edge}: stage {end.stage} has no backward; leave the edge out"

    def _unclear_sums(self) -> Iterator[str]:
        edges = {edge.value: edge for edge in self.flow}
        counts = Counter(value for values in self.added for value in values)
        for values in self.added:
            line = f"added {' '.join(values)}"
            if len(values) < 2:
                yield f"{line}: one value is no sum; leave the line out"
            for value in values:
                if value not in edges:
                    yield f"{line}: no edge of the program is called {value}"
                if counts[value] > 1:
                    yield f"{line}: {value} is there twice; add each value once"
                one, other = edges[value], edges[values[0]]
                if one.source.phase != "B" or one.targets != other.targets:
                    yield f"{line}: {one} and {other} are not gradients of one value, which one pass takes; add up only such"

    def __repr__(self) -> str:
        count, workers = sum(map(len, self.orders)), "1 worker" if self.workers == 1 else f"{self.workers} workers"
        return (
            f"<Program {self.schedule}: {self.stages} stages on {workers}, chunks={self.chunks}, {count} instructions>"
        )

    def __str__(self) -> str:
        return "".join(f"{line}\n" for line in self.lines())

    def lines(self) -> Iterator[str]:
        """The lines of the program's file."""
        yield from self.header()
        for worker, order in enumerate(self.orders):
            yield f"worker {worker}"
            yield from (f"{INDENT}{instruction}" for instruction in order)

    def header(self) -> Iterator[str]:
        """The lines of the program's file before the first worker's."""
        yield TITLE
        yield f"schedule {self.schedule}"
        yield f"workers {self.workers}"
        if self.replicas > 1:
            yield f"replicas {self.replicas}"
        yield f"stages {self.stages}"
        yield f"chunks {self.chunks}"
        if self.slices > 1:
            yield f"slices {self.slices}"
        yield f"placement {self.placement}"
        if self.hosts is not None:
            yield f"hosts {' '.join(map(str, self.hosts))}"
        yield f"backward {stage_set_text(self.backward, self.stages)}"
        yield f"memory {'unlimited' if self.memory is None else ' '.join(map(str, self.memory))}"
        yield from (f"checkpoint {each}" for each in self.checkpoints)
        if not self.edges:
            yield f"edges {'chain' if self.edges is None else 'none'}"
        yield from (f"edge {edge}" for edge in self.edges or ())
        yield from (f"added {' '.join(values)}" for values in self.added)
        yield from (f"replicated {copies}" for copies in self.replicated)
        if self.notes:
            yield f"notes {' '.join(map(str, self.notes))}"
        if self.continues:
            yield CONTINUES
        yield f"communication {'explicit' if self.lowered else 'implied'}"

    @property
    def workers(self) -> int:
        return self.placement.workers * self.replicas

    @property
    def stages(self) -> int:
        return self.placement.stages

    @cached_property
    def shares(self) -> tuple[range, ...]:
        """The micro-batches of each replica."""
        return shares(self.chunks, self.replicas, self.slices)

    @property
    def rows(self) -> int:
        """How many rows of micro-batches there are: without slices, each micro-batch is one."""
        return self.chunks // self.slices

    def slice_of(self, microbatch: int) -> int:
        """Which slice of its row a micro-batch is."""
        return microbatch % self.slices

    def slice_before(self, compute: Compute) -> Compute | None:
        """The same computation of the slice whose keys and values it reads, or gives gradients of; None if there is none."""
        turn = compute.kind.turn
        other = self.slice_of(compute.microbatch) - turn
        if not turn or not 0 <= other < self.slices:
            return None
        return replace(compute, microbatch=compute.microbatch - turn)

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """The stages that a worker holds."""
        return self.placement.stages_of(worker % self.placement.workers)

    def workers_of(self, stage: int) -> tuple[int, ...]:
        """The workers that hold a stage: one of each replica."""
        first = self.placement.worker_of[stage]
        return tuple(first + replica * self.placement.workers for replica in range(self.replicas))

    def beside(self, worker: int, stage: int) -> int:
        """The worker that holds a stage in the replica of ``worker``."""
        return worker - worker % self.placement.workers + self.placement.worker_of[stage]

    def are_apart(self, one: int, other: int) -> bool:
        """Whether two workers are on different hosts."""
        return self.hosts is not None and self.hosts[one] != self.hosts[other]

    def home(self, stage: int, microbatch: int) -> int:
        """The worker that computes a stage on a micro-batch."""
        replica = next(replica for replica, share in enumerate(self.shares) if microbatch in share)
        return self.workers_of(stage)[replica]

    @cached_property
    def flow(self) -> tuple[Edge, ...]:
        """The edges between the stages, those of a chain included."""
        return chain(self.stages, set(self.backward)) if self.edges is None else self.edges

    @cached_property
    def gives(self) -> dict[Pass, list[Edge]]:
        """The edges from each pass that makes a value."""
        return by_end((edge.source, edge) for edge in self.flow)

    @cached_property
    def takes(self) -> dict[Pass, list[Edge]]:
        """The edges to each pass that needs a value."""
        return by_end((target, edge) for edge in self.flow for target in edge.targets)

    @cached_property
    def going_on(self) -> frozenset[str]:
        """The values that are for the next run."""
        return frozenset(edge.value for edge in self.flow if edge.goes_on)

    @cached_property
    def summands(self) -> dict[str, tuple[str, ...]]:
        """The gradients that are added on the worker that makes them, in order, by the name of the sum, which is the first."""
        worker_of = {edge.value: self.placement.worker_of[edge.source.stage] for edge in self.flow}
        found: dict[str, tuple[str, ...]] = {}
        for values in self.added:
            for worker in dict.fromkeys(worker_of[value] for value in values):
                own = tuple(value for value in values if worker_of[value] == worker)
                found.update({own[0]: own} if len(own) > 1 else {})
        return found

    @cached_property
    def sum_of(self) -> dict[str, str]:
        """The sum that each gradient is added to, but for the first of each sum. Only sums travel."""
        return {value: first for first, values in self.summands.items() for value in values[1:]}

    @cached_property
    def sums(self) -> tuple[GradientSum, ...]:
        """The sums of gradients: of each replicated parameter, where its first copy is; and in replicas, for each worker with a
        stage, a part of the gradients of that stage."""
        copied = [
            GradientSum(each.parameter, self.placement.worker_of[each.stages[0]], each.stages)
            for each in self.replicated
        ]
        parts = [
            GradientSum(f"stage {stage} part {part}", owner, (stage,))
            for stage in self.backward
            for part, owner in enumerate(self.workers_of(stage))
            if self.replicas > 1
        ]
        return tuple(each for each in (*copied, *parts) if not set(self.backward).isdisjoint(each.stages))

    def holders(self, each: GradientSum) -> list[int]:
        """The workers that have copies of the parameters of a sum, in the order in which these are added up."""
        by_replica = zip(*(self.workers_of(stage) for stage in each.stages))
        return list(dict.fromkeys(worker for workers in by_replica for worker in workers))

    def twins(self, worker: int) -> list[int]:
        """The workers with the same stages in the other replicas."""
        local = worker % self.placement.workers
        return [each for each in range(local, self.workers, self.placement.workers) if each != worker]

    def noting(self, worker: int) -> set[int]:
        """The stages of a worker with batch norms that count the micro-batches of all replicas."""
        return set(self.notes).intersection(self.stages_of(worker))

    @cached_property
    def computations(self) -> tuple[tuple[Compute, ...], ...]:
        """The computations of every worker, in order."""
        return tuple(tuple(computations_of(order)) for order in self.orders)

    @cached_property
    def checkpointed(self) -> frozenset[tuple[int, int]]:
        """The stages and micro-batches whose forwards keep their inputs only."""
        return frozenset((each.stage, microbatch) for each in self.checkpoints for microbatch in each.microbatches)

    @cached_property
    def peak_live(self) -> tuple[int, ...]:
        """The most stage-micro-batches that each worker holds at a time: from forward to the end of the backward.

        One that is computed again is held from then on. Before that, its inputs are held, and these do not count.
        """
        return tuple(peak_live(order, frozenset(self.backward)) for order in self.computations)

    def for_graph(
        self,
        edges: Iterable[Edge],
        backward: Iterable[int] | None = None,
        replicated: Iterable[Replicated] = (),
        notes: Iterable[int] = (),
        added: Iterable[tuple[str, ...]] = (),
    ) -> "Program":
        """The same schedule for stages that do not form a chain. Backwards are left out for stages that have none.

        >>> from pippy.drivers.plan import make_schedule
        >>> program = make_schedule("1f1b", workers=2, chunks=1).for_graph(edges=[], backward=[1])
        >>> [[str(compute) for compute in order] for order in program.orders]
        [['F0.0'], ['F1.0', 'B1.0']]
        """
        with_backward = set(self.backward if backward is None else backward)
        orders = tuple(
            tuple(compute for compute in order if compute.op == Op.FORWARD or compute.stage in with_backward)
            for order in self.computations
        )
        return replace(
            self,
            orders=orders,
            backward=tuple(sorted(with_backward)),
            edges=tuple(edges),
            replicated=tuple(replicated),
            notes=tuple(notes),
            added=tuple(added),
            lowered=False,
            checkpoints=tuple(each for each in self.checkpoints if each.stage in with_backward),
        )

    def with_orders(self, orders: Iterable[Iterable[Instruction]]) -> "Program":
        """The same program with other instructions."""
        return replace(self, orders=tuple(map(tuple, orders)))

    def save(self, path: str | Path) -> None:
        """Write the program's file; ``load_program`` reads it."""
        Path(path).write_text(str(self), encoding="utf-8")


def computations_of(order: Iterable[Instruction]) -> list[Compute]:
    """The computations among these instructions.

    >>> from pippy.drivers.plan.language.instructions import parse_instruction
    >>> [str(each) for each in computations_of(map(parse_instruction, ["F0.0", "send x.0 to 1", "B0.0"]))]
    ['F0.0', 'B0.0']
    """
    return [each for each in order if isinstance(each, Compute)]


def computes_until(order: Sequence[Instruction]) -> int:
    """The place of the last computation, -1 if there is none."""
    return max((at for at, each in enumerate(order) if isinstance(each, Compute)), default=-1)


def peak_live(order: Sequence[Compute], backward: frozenset[int]) -> int:
    """The most stage-micro-batches held at a time, while a forward runs also its own."""
    live = peak = 0
    for compute, change in zip(order, live_changes(order, backward)):
        if compute.kind.live > 0:
            peak = max(peak, live + 1)
        live += change
    return peak


def live_changes(order: Sequence[Compute], backward: frozenset[int]) -> Iterator[int]:
    """By how many more or fewer stage-micro-batches are held after each computation.

    A forward begins one, or the recompute if there is one. A backward or its weight half ends it.

    >>> from pippy.drivers.plan.language.instructions import parse_instruction
    >>> order = [parse_instruction(text) for text in ("F0.0", "F0.1", "R0.0", "B0.0", "I0.1", "W0.1")]
    >>> list(live_changes(order, frozenset([0])))
    [0, 1, 1, -1, 0, -1]
    """
    again = {(compute.stage, compute.microbatch) for compute in order if compute.op == Op.RECOMPUTE}
    for compute in order:
        if compute.op == Op.FORWARD:
            yield int(compute.stage in backward and (compute.stage, compute.microbatch) not in again)
        else:
            yield compute.kind.live


def stage_set_text(stages: Sequence[int], total: int) -> str:
    if len(stages) == total:
        return "all"
    return " ".join(map(str, stages)) or "none"
