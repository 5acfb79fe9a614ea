"""Reads a program from its text. An error names the line and column of what cannot be read."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pippy.drivers.plan.language.edges import scan_checkpoints, scan_edge, scan_replicated
from pippy.drivers.plan.language.errors import ArgumentError, ParseError, require
from pippy.drivers.plan.language.instructions import Instruction, scan_instruction
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.language.program import CONTINUES, INDENT, TITLE, Program
from pippy.drivers.plan.language.scanner import NAME, SCHEDULE, Scanned, Scanner


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
    """The lines of a program's file and how many of them have been read.

    What a line must look like is known here. What a program must be, `Program` knows, and which line an error of it is about.
    """

    def __init__(self, text: str) -> None:
        self.lines = [Scanner(line, number) for number, line in enumerate(text.split("\n"), start=1)]
        if len(self.lines) > 1 and not self.lines[-1].text:
            self.lines.pop()  # what follows the last newline is no line
        self.rest = [*self.lines, Scanner("", len(self.lines) + 1)]
        self.rest.reverse()

    def program(self) -> Program:
        self.line(TITLE, lambda _: None)
        schedule = self.line("schedule ", lambda scanner: scanner.take(SCHEDULE, "the name of a schedule"))
        workers = self.size("workers")
        replicas = self.size("replicas", if_missing=1)
        stages, chunks = self.size("stages"), self.size("chunks")
        slices = self.size("slices", if_missing=1)
        placement = self.line("placement ", lambda scanner: self.placement(scanner, workers, replicas, stages))
        given: dict[str, Any] = {"hosts": next(iter(self.all("hosts ", numbers("the host of a worker"))), None)}
        given["backward"] = self.line(
            "backward ", one_of({"all": range(stages), "none": ()}, "a stage number, all or none")
        )
        given["memory"] = self.line(
            "memory ", one_of({"unlimited": None}, "a number of stage-micro-batches, or unlimited")
        )
        given["checkpoints"] = self.all("checkpoint ", lambda scanner: scan_checkpoints(scanner, chunks))
        edges = self.all("edge ", scan_edge)
        given["edges"] = edges or self.line("edges ", one_of({"chain": None, "none": ()}))
        given["added"] = self.all("added ", lambda each: each.several(lambda: each.take(NAME, "the name of a value")))
        given["replicated"] = self.all("replicated ", scan_replicated)
        given["notes"] = next(iter(self.all("notes ", numbers("a stage number"))), ())
        given["continues"] = bool(self.all(CONTINUES, lambda _: True))
        given["lowered"] = self.line("communication ", one_of({"explicit": True, "implied": False}))
        orders = tuple(self.order(worker) for worker in range(workers))
        if len(self.rest) > 1:
            raise self.rest[-1].error("expected the end of the program")
        given |= {"backward": tuple(given["backward"]), "replicas": replicas, "slices": slices}
        try:
            return Program(schedule, placement, chunks, orders, **given)
        except ArgumentError as error:
            raise self.located(error) from error

    def line(self, beginning: str, scan: Callable[[Scanner], Scanned]) -> Scanned:
        """Read the next line, which has this beginning."""
        scanner = self.rest[-1]
        scanner.literal(beginning)
        if len(self.rest) > 1:
            self.rest.pop()
        found = scan(scanner)
        scanner.end()
        return found

    def all(self, beginning: str, scan: Callable[[Scanner], Scanned]) -> tuple[Scanned, ...]:
        """Read all next lines that have this beginning."""
        found = []
        while self.rest[-1].text.startswith(beginning):
            found.append(self.line(beginning, scan))
        return tuple(found)

    def size(self, name: str, if_missing: int | None = None) -> int:
        if if_missing is not None and not self.rest[-1].text.startswith(f"{name} "):
            return if_missing
        line = self.rest[-1].line
        count = self.line(f"{name} ", lambda scanner: scanner.number(f"how many {name}"))
        if count < 1:
            raise ParseError(f"{name} must be at least 1, found {count}", line, len(name) + 2)
        return count

    def placement(self, scanner: Scanner, workers: int, replicas: int, stages: int) -> Placement:
        """The placement of the first replica."""
        start = scanner.position + 1
        worker_of = scanner.numbers("the worker of a stage")
        if (len(worker_of), (max(worker_of) + 1) * replicas) != (stages, workers):
            each = f" in {replicas} replicas" * (replicas > 1)
            raise ParseError(
                f"expected {stages} stages on {workers} workers{each}, found {scanner.text!r}", scanner.line, start
            )
        try:
            return Placement(worker_of)
        except ArgumentError as error:
            raise ParseError(str(error), scanner.line, start) from error

    def order(self, worker: int) -> tuple[Instruction, ...]:
        self.line(f"worker {worker}", lambda _: None)
        return self.all(INDENT, scan_instruction)

    def located(self, error: ArgumentError) -> ParseError:
        """What is wrong with the program, at the line that it begins with, or has the first word of."""
        said = str(error)
        whole, word = said.partition(": ")[0], re.split(r"\W", said, maxsplit=1)[0]
        known = [each.line for each in self.lines if each.text == whole]
        known += [each.line for each in self.lines if each.text.split(" ")[0] == word]
        return ParseError(said, next(iter(known), 1), len(word) + 2)


def numbers(what: str) -> Callable[[Scanner], tuple[int, ...]]:
    """Reads numbers."""
    return lambda scanner: scanner.numbers(what)


def one_of(words: Mapping[str, Any], what: str = "") -> Callable[[Scanner], Any]:
    """Reads one of these words, which stands for a value; or numbers, if it is said ``what`` is expected."""

    def scan(scanner: Scanner) -> Any:
        for word, value in words.items():
            if scanner.accept(word):
                return value
        if not what:
            raise scanner.error(f"expected {' or '.join(map(repr, words))}")
        return scanner.numbers(what)

    return scan
