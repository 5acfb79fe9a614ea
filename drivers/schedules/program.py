"""The instructions of all workers, and the one file format that holds them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pippy.drivers.schedules.errors import ArgumentError, ParseError
from pippy.drivers.schedules.graph import Edge, Replicated, chain, scan_edge, scan_replicated
from pippy.drivers.schedules.instructions import Compute, Instruction, Op, scan_instruction
from pippy.drivers.schedules.placement import Placement, require_count
from pippy.drivers.schedules.scanner import Scanner

TITLE = "pippy program 1"
INDENT = "  "


@dataclass(frozen=True)
class Program:
    """What every worker does, in order, and what has to be known to check it.

    ``backward`` are the stages that have a backward pass: none in a program for inference. ``memory`` is the stated limit of
    live stage-micro-batches per worker, if there is one. ``edges`` is what the stages hand to one another; None means that
    they form a chain. A ``lowered`` program says what is sent, received, freed and reduced; any other only orders computations,
    and the edges imply the rest. ``str(program)`` is the text of its file, and ``parse_program`` the way back.

    >>> from pippy.drivers.schedules import make_schedule
    >>> program = make_schedule("1f1b", workers=2, chunks=2)
    >>> [str(instruction) for instruction in program.orders[0]]
    ['F0.0', 'F0.1', 'B0.0', 'B0.1']
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

    def __post_init__(self) -> None:
        require_count("chunks", self.chunks)
        for what, given in (("orders", self.orders), ("memory", self.memory)):
            if given is not None and len(given) != self.workers:
                raise ArgumentError(
                    f"{what} of {len(given)} workers for placement {self.placement}; give one per worker"
                )
        self._refuse_unknown_stages()
        self._refuse_unclear_edges()

    def _refuse_unknown_stages(self) -> None:
        named = [("backward", stage) for stage in self.backward]
        named += [(f"edge {edge}", end.stage) for edge in self.edges or () for end in edge.ends]
        named += [(f"replicated {copies}", stage) for copies in self.replicated for stage in copies.stages]
        for where, stage in named:
            if not 0 <= stage < self.stages:
                raise ArgumentError(
                    f"{where}: there is no stage {stage}; the placement has stages 0 to {self.stages - 1}"
                )

    def _refuse_unclear_edges(self) -> None:
        values = Counter(edge.value for edge in self.edges or ())
        for edge in self.edges or ():
            if values[edge.value] > 1:
                raise ArgumentError(f"edge {edge}: another edge is called {edge.value}; give each value one edge")
            for end in edge.ends:
                if end.phase == "B" and end.stage not in self.backward:
                    raise ArgumentError(f"edge {edge}: stage {end.stage} has no backward; leave the edge out")

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
        yield f"stages {self.stages}"
        yield f"chunks {self.chunks}"
        yield f"placement {self.placement}"
        yield f"backward {stage_set_text(self.backward, self.stages)}"
        yield f"memory {'unlimited' if self.memory is None else ' '.join(map(str, self.memory))}"
        if not self.edges:
            yield f"edges {'chain' if self.edges is None else 'none'}"
        yield from (f"edge {edge}" for edge in self.edges or ())
        yield from (f"replicated {copies}" for copies in self.replicated)
        yield f"communication {'explicit' if self.lowered else 'implied'}"

    @property
    def workers(self) -> int:
        return self.placement.workers

    @property
    def stages(self) -> int:
        return self.placement.stages

    @cached_property
    def flow(self) -> tuple[Edge, ...]:
        """The edges between the stages, those of a chain included."""
        return chain(self.stages, set(self.backward)) if self.edges is None else self.edges

    @cached_property
    def computations(self) -> tuple[tuple[Compute, ...], ...]:
        """The computations of every worker, in order."""
        return tuple(
            tuple(instruction for instruction in order if isinstance(instruction, Compute)) for order in self.orders
        )

    @cached_property
    def peak_live(self) -> tuple[int, ...]:
        """The most stage-micro-batches that each worker holds at a time: from forward to the end of the backward."""
        return tuple(peak_live(order, frozenset(self.backward)) for order in self.computations)

    def for_graph(
        self, edges: Iterable[Edge], backward: Iterable[int] | None = None, replicated: Iterable[Replicated] = ()
    ) -> "Program":
        """The same schedule for stages that are no chain: backwards of stages that have none are left out.

        >>> from pippy.drivers.schedules import make_schedule
        >>> program = make_schedule("1f1b", workers=2, chunks=1).for_graph(edges=[], backward=[1])
        >>> [[str(compute) for compute in order] for order in program.orders]
        [['F0.0'], ['F1.0', 'B1.0']]
        """
        kept = set(self.backward if backward is None else backward)
        orders = tuple(
            tuple(compute for compute in order if compute.op == Op.FORWARD or compute.stage in kept)
            for order in self.computations
        )
        return replace(
            self,
            orders=orders,
            backward=tuple(sorted(kept)),
            edges=tuple(edges),
            replicated=tuple(replicated),
            lowered=False,
        )

    def with_orders(self, orders: Iterable[Iterable[Instruction]]) -> "Program":
        """The same program with other instructions."""
        return replace(self, orders=tuple(map(tuple, orders)))

    def save(self, path: str | Path) -> None:
        """Write the program's file."""
        Path(path).write_text(str(self), encoding="utf-8")


def load_program(path: str | Path) -> Program:
    """Read a program's file, as ``save`` writes it.

    >>> from pippy.drivers.schedules import make_schedule
    >>> from tempfile import TemporaryDirectory
    >>> program = make_schedule("1f1b", workers=2, chunks=2)
    >>> with TemporaryDirectory() as folder:
    ...     program.save(f"{folder}/mine.pippy")
    ...     load_program(f"{folder}/mine.pippy") == program
    True
    """
    return parse_program(Path(path).read_text(encoding="utf-8"))


def peak_live(order: Iterable[Compute], backward: frozenset[int]) -> int:
    """The most stage-micro-batches held at a time: a forward begins one, and the (weight half of the) backward ends it."""
    live = peak = 0
    for compute in order:
        if compute.op == Op.FORWARD:
            peak = max(peak, live + 1)
            live += compute.stage in backward
        elif compute.op != Op.BACKWARD_INPUT:
            live -= 1
    return peak


def stage_set_text(stages: Sequence[int], total: int) -> str:
    if len(stages) == total:
        return "all"
    return " ".join(map(str, stages)) or "none"


def parse_program(text: str) -> Program:
    """Read the text of a program's file, exactly as ``str(program)`` writes it; anything else is a ParseError.

    >>> parse_program("pippy program 1\\nschedule mine\\nworkers two\\n")
    Traceback (most recent call last):
    pippy.drivers.schedules.errors.ParseError: line 3, column 9: expected how many workers, found 'two'
    """
    program = ProgramParser(text).program()
    require_canonical(text, program)
    return program


def require_canonical(text: str, program: Program) -> None:
    """Refuse what means something but is not written the one way, such as stages out of order or a missing last newline."""
    given = text.split("\n")
    canonical = [*program.lines(), ""]
    for number, (line, wanted) in enumerate(zip(given, canonical), start=1):
        if line != wanted:
            column = next(
                (i for i, pair in enumerate(zip(line, wanted)) if pair[0] != pair[1]), min(len(line), len(wanted))
            )
            raise ParseError(f"write this line as {wanted!r}, found {line!r}", number, column + 1)
    if len(given) < len(canonical):
        raise ParseError("the last line must end with a newline", len(given), len(given[-1]) + 1)


class ProgramParser:
    """The lines of a program's file and how many of them have been read."""

    def __init__(self, text: str) -> None:
        self.rest = [Scanner(line, number) for number, line in enumerate(text.split("\n"), start=1)]
        if len(self.rest) > 1 and not self.rest[-1].text:
            self.rest.pop()  # what follows the last newline is no line
        self.rest.append(Scanner("", len(self.rest) + 1))
        self.rest.reverse()

    def program(self) -> Program:
        self.field(TITLE).end()
        schedule = self.schedule()
        workers = self.size("workers")
        stages = self.size("stages")
        chunks = self.size("chunks")
        placement = self.placement(workers, stages)
        backward = self.backward(stages)
        memory = self.memory(workers)
        edges = self.edges(stages)
        replicated = []
        while self.upcoming("replicated "):
            scanner = self.field("replicated ")
            replicated.append(scan_replicated(scanner))
            self.finish(scanner, stages, replicated[-1].stages)
        lowered = self.lowered()
        orders = tuple(self.order(worker) for worker in range(workers))
        if len(self.rest) > 1:
            raise self.rest[-1].error("expected the end of the program")
        return Program(schedule, placement, chunks, orders, backward, memory, edges, tuple(replicated), lowered)

    def upcoming(self, word: str) -> bool:
        return self.rest[-1].text.startswith(word)

    def field(self, word: str) -> Scanner:
        self.rest[-1].literal(word)
        return self.rest.pop() if len(self.rest) > 1 else self.rest[-1]

    def schedule(self) -> str:
        scanner = self.field("schedule ")
        name = scanner.text[scanner.position :]
        if not name or name != name.strip() or not name.isprintable():
            raise scanner.error("expected the name of a schedule")
        return name

    def size(self, name: str) -> int:
        scanner = self.field(f"{name} ")
        found = scanner.number(f"how many {name}")
        scanner.end()
        if found < 1:
            raise ParseError(f"{name} must be at least 1, found {found}", scanner.line, len(name) + 2)
        return found

    def placement(self, workers: int, stages: int) -> Placement:
        scanner = self.field("placement ")
        worker_of = scanner.numbers("the worker of a stage")
        scanner.end()
        if len(worker_of) != stages or max(worker_of) >= workers:
            raise ParseError(
                f"expected {stages} stages on {workers} workers, found {scanner.text!r}",
                scanner.line,
                len("placement ") + 1,
            )
        placement = Placement(worker_of)
        if placement.workers != workers:
            raise ParseError(f"worker {workers - 1} holds no stage", scanner.line, len("placement ") + 1)
        return placement

    def backward(self, stages: int) -> tuple[int, ...]:
        scanner = self.field("backward ")
        if scanner.accept("all"):
            found = tuple(range(stages))
        elif scanner.accept("none"):
            found = ()
        else:
            found = scanner.numbers("a stage number, all or none")
        self.finish(scanner, stages, found)
        return tuple(sorted(set(found)))

    def memory(self, workers: int) -> tuple[int, ...] | None:
        scanner = self.field("memory ")
        found = (
            None if scanner.accept("unlimited") else scanner.numbers("a number of stage-micro-batches, or unlimited")
        )
        scanner.end()
        if found is not None and len(found) != workers:
            raise ParseError(f"expected {workers} limits, found {len(found)}", scanner.line, len("memory ") + 1)
        return found

    def edges(self, stages: int) -> tuple[Edge, ...] | None:
        if self.upcoming("edge "):
            found = []
            while self.upcoming("edge "):
                scanner = self.field("edge ")
                found.append(scan_edge(scanner))
                self.finish(scanner, stages, [end.stage for end in found[-1].ends])
            return tuple(found)
        scanner = self.field("edges ")
        linear = scanner.accept("chain")
        if not linear:
            scanner.literal("none")
        scanner.end()
        return None if linear else ()

    def lowered(self) -> bool:
        scanner = self.field("communication ")
        explicit = scanner.accept("explicit")
        if not explicit:
            scanner.literal("implied")
        scanner.end()
        return explicit

    def finish(self, scanner: Scanner, stages: int, named: Iterable[int]) -> None:
        scanner.end()
        for stage in named:
            if stage >= stages:
                raise ParseError(
                    f"there is no stage {stage} of {stages}", scanner.line, scanner.text.rfind(str(stage)) + 1
                )

    def order(self, worker: int) -> tuple[Instruction, ...]:
        self.field(f"worker {worker}").end()
        order: list[Instruction] = []
        while self.upcoming(INDENT):
            order.append(scan_instruction(self.field(INDENT)))
        return tuple(order)
