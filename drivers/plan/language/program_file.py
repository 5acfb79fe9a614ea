"""Reads a program from its text. An error names the line and column of what cannot be read."""

from collections.abc import Container, Iterable
from pathlib import Path

from pippy.drivers.plan.language.edges import Checkpoints, Edge, scan_checkpoints, scan_edge, scan_replicated
from pippy.drivers.plan.language.errors import ParseError, require
from pippy.drivers.plan.language.instructions import Instruction, scan_instruction
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.language.program import CONTINUES, INDENT, TITLE, Program
from pippy.drivers.plan.language.scanner import NAME, SCHEDULE, Scanner


def load_program(path: str | Path) -> Program:
    """Read a program's file, as ``save`` writes it.

    >>> from pippy.drivers.plan import make_schedule
    >>> from tempfile import TemporaryDirectory
    >>> program = make_schedule("1f1b", workers=2, chunks=2)
    >>> with TemporaryDirectory() as folder:
    ...     program.save(f"{folder}/mine.pippy")
    ...     load_program(f"{folder}/mine.pippy") == program
    True
    """
    return parse_program(Path(path).read_text(encoding="utf-8"))


def parse_program(text: str) -> Program:
    """Read the text of a program's file, exactly as ``str(program)`` writes it; anything else is a ParseError.

    >>> parse_program("pippy program 1\\nschedule mine\\nworkers two\\n")
    Traceback (most recent call last):
    pippy.drivers.plan.language.errors.ParseError: line 3, column 9: expected how many workers, found 'two'
    """
    require("text", text, str, "give the text of a program's file")
    program = ProgramParser(text).program()
    require_canonical(text, program)
    return program


def require_canonical(text: str, program: Program) -> None:
    """Refuse what is clear but not written the one way, such as stages out of order or a missing last newline."""
    lines = text.split("\n")
    canonical = [*program.lines(), ""]
    for number, (line, wanted) in enumerate(zip(lines, canonical), start=1):
        if line != wanted:
            column = next(
                (i for i, pair in enumerate(zip(line, wanted)) if pair[0] != pair[1]), min(len(line), len(wanted))
            )
            raise ParseError(f"write this line as {wanted!r}, found {line!r}", number, column + 1)
    if len(lines) < len(canonical):
        raise ParseError("the last line must end with a newline", len(lines), len(lines[-1]) + 1)


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
        replicas = self.size("replicas") if self.upcoming("replicas ") else 1
        stages = self.size("stages")
        chunks = self.size("chunks")
        slices = self.slices(chunks)
        placement = self.placement(workers, replicas, stages)
        hosts = self.by_worker("hosts", workers, "the host of a worker") if self.upcoming("hosts ") else None
        backward = self.backward(stages)
        memory = self.memory(workers)
        checkpoints = self.checkpoints(stages, chunks, backward)
        edges = self.edges(stages)
        added = self.added()
        replicated = []
        while self.upcoming("replicated "):
            scanner = self.field("replicated ")
            replicated.append(scan_replicated(scanner))
            self.finish(scanner, stages, replicated[-1].stages)
        notes = self.notes(stages, replicas)
        continues = self.upcoming(CONTINUES)
        if continues:
            self.field(CONTINUES).end()
        lowered = self.lowered()
        orders = tuple(self.order(worker) for worker in range(workers))
        if len(self.rest) > 1:
            raise self.rest[-1].error("expected the end of the program")
        return Program(
            schedule,
            placement,
            chunks,
            orders,
            backward,
            memory,
            edges,
            tuple(replicated),
            lowered,
            checkpoints,
            replicas,
            notes,
            continues,
            added,
            hosts,
            slices,
        )

    def upcoming(self, word: str) -> bool:
        return self.rest[-1].text.startswith(word)

    def field(self, word: str) -> Scanner:
        self.rest[-1].literal(word)
        return self.rest.pop() if len(self.rest) > 1 else self.rest[-1]

    def schedule(self) -> str:
        scanner = self.field("schedule ")
        name = scanner.take(SCHEDULE, "the name of a schedule")
        scanner.end()
        return name

    def size(self, name: str) -> int:
        scanner = self.field(f"{name} ")
        count = scanner.number(f"how many {name}")
        scanner.end()
        if count < 1:
            raise ParseError(f"{name} must be at least 1, found {count}", scanner.line, len(name) + 2)
        return count

    def slices(self, chunks: int) -> int:
        if not self.upcoming("slices "):
            return 1
        line = self.rest[-1].line
        slices = self.size("slices")
        if chunks % slices:
            raise ParseError(f"{chunks} chunks are no rows of {slices} slices", line, len("slices ") + 1)
        return slices

    def placement(self, workers: int, replicas: int, stages: int) -> Placement:
        """The placement of the first replica."""
        scanner = self.field("placement ")
        if workers % replicas:
            raise ParseError(f"{workers} workers are no {replicas} replicas of a pipeline", scanner.line, 1)
        workers //= replicas
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
            numbers = tuple(range(stages))
        elif scanner.accept("none"):
            numbers = ()
        else:
            numbers = scanner.numbers("a stage number, all or none")
        self.finish(scanner, stages, numbers)
        return tuple(sorted(set(numbers)))

    def memory(self, workers: int) -> tuple[int, ...] | None:
        if not self.upcoming("memory unlimited"):
            return self.by_worker("memory", workers, "a number of stage-micro-batches, or unlimited", "limits")
        self.field("memory unlimited").end()
        return None

    def by_worker(self, name: str, workers: int, what: str, plural: str = "") -> tuple[int, ...]:
        """A line with a number for each worker."""
        scanner = self.field(f"{name} ")
        numbers = scanner.numbers(what)
        scanner.end()
        if len(numbers) != workers:
            raise ParseError(f"expected {workers} {plural or name}, found {len(numbers)}", scanner.line, len(name) + 2)
        return numbers

    def checkpoints(self, stages: int, chunks: int, backward: Container[int]) -> tuple[Checkpoints, ...]:
        checkpoints: list[Checkpoints] = []
        while self.upcoming("checkpoint "):
            scanner = self.field("checkpoint ")
            each = scan_checkpoints(scanner, chunks)
            self.finish(scanner, stages, [each.stage])
            if each.stage not in backward:
                raise ParseError(f"stage {each.stage} has no backward", scanner.line, len("checkpoint ") + 1)
            if checkpoints and each.stage <= checkpoints[-1].stage:
                raise ParseError("name each stage once, in order", scanner.line, len("checkpoint ") + 1)
            if list(each.microbatches) != sorted(set(each.microbatches)):
                raise ParseError("name each micro-batch once, in order", scanner.line, len("checkpoint ") + 1)
            checkpoints.append(each)
        return tuple(checkpoints)

    def edges(self, stages: int) -> tuple[Edge, ...] | None:
        if self.upcoming("edge "):
            edges = []
            while self.upcoming("edge "):
                scanner = self.field("edge ")
                edges.append(scan_edge(scanner))
                self.finish(scanner, stages, [end.stage for end in edges[-1].ends])
            return tuple(edges)
        scanner = self.field("edges ")
        linear = scanner.accept("chain")
        if not linear:
            scanner.literal("none")
        scanner.end()
        return None if linear else ()

    def added(self) -> tuple[tuple[str, ...], ...]:
        added = []
        while self.upcoming("added "):
            scanner = self.field("added ")
            values = [scanner.take(NAME, "the name of a value")]
            while scanner.accept(" "):
                values.append(scanner.take(NAME, "the name of a value"))
            scanner.end()
            added.append(tuple(values))
        return tuple(added)

    def notes(self, stages: int, replicas: int) -> tuple[int, ...]:
        if not self.upcoming("notes "):
            return ()
        scanner = self.field("notes ")
        numbers = scanner.numbers("a stage number")
        self.finish(scanner, stages, numbers)
        if replicas == 1:
            raise ParseError("the program has one replica; leave this line out", scanner.line, 1)
        return tuple(sorted(set(numbers)))

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
