"""Reads one line of text part by part, and says at which column it stops making sense.

The exact text of a kind of instruction is written once, as a `Form`: it prints an instruction, and it reads one.
"""

import re
from collections.abc import Callable
from operator import attrgetter
from string import Formatter
from typing import TypeVar

from pippy.drivers.plan.language.errors import ParseError

Scanned = TypeVar("Scanned")
NUMBER = re.compile("0|[1-9][0-9]{0,8}")  # nothing here is counted in billions
NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
SCHEDULE = re.compile(r"[!-~]+( [!-~]+)*")
QUALIFIED_NAME = re.compile(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*")
SUM = re.compile(rf"stage (?:{NUMBER.pattern}) part (?:{NUMBER.pattern})|{QUALIFIED_NAME.pattern}")


class Scanner:
    """A line of text and how far it has been read.

    >>> scanner = Scanner("stages 4")
    >>> scanner.literal("stages ")
    >>> scanner.number("how many stages")
    4
    >>> scanner.end()
    """

    def __init__(self, text: str, line: int = 1) -> None:
        self.text = text
        self.line = line
        self.position = 0

    def error(self, message: str) -> ParseError:
        rest = self.text[self.position :]
        found = repr(rest) if rest else "the end of the line"
        return ParseError(f"{message}, found {found}", self.line, self.position + 1)

    def take(self, pattern: re.Pattern[str], what: str) -> str:
        found = pattern.match(self.text, self.position)
        if found is None:
            raise self.error(f"expected {what}")
        self.position = found.end()
        return found.group()

    def number(self, what: str) -> int:
        return int(self.take(NUMBER, what))

    def several(self, scan: Callable[[], Scanned]) -> tuple[Scanned, ...]:
        """One thing or more, with a space between two."""
        found = [scan()]
        while self.accept(" "):
            found.append(scan())
        return tuple(found)

    def numbers(self, what: str) -> tuple[int, ...]:
        return self.several(lambda: self.number(what))

    def accept(self, text: str) -> bool:
        if not self.text.startswith(text, self.position):
            return False
        self.position += len(text)
        return True

    def rest(self, pattern: re.Pattern[str]) -> tuple[str, ...]:
        """The groups of what is left of the line, if the pattern fits all of it; else nothing is read."""
        found = pattern.fullmatch(self.text, self.position)
        if found is None:
            return ()
        self.position = found.end()
        return found.groups()

    def literal(self, text: str) -> None:
        if not self.accept(text):
            raise self.error(f"expected {text!r}")

    def end(self) -> None:
        if self.position != len(self.text):
            raise self.error("expected the end of the line")


# What the fields of instructions look like, and what an error calls them.
FIELDS = {
    "stage": (NUMBER, "a stage number"),
    "microbatch": (NUMBER, "a micro-batch number"),
    "to": (NUMBER, "a worker number"),
    "worker": (NUMBER, "a worker number"),
    "source": (NUMBER, "a worker number"),
    "value": (NAME, "the name of a value"),
    "into": (NAME, "the name of a value"),
    "sum": (SUM, "the name of a sum: of a parameter, or stage 2 part 0"),
}


class Form:
    """A text with the names of an instruction's fields in braces, after a word of its own. What a field looks like says its
    name, or the word behind that.

    >>> form = Form("reduce {of:sum}")
    >>> form.beginning
    'reduce '
    >>> form.scan(Scanner("emb.weight"))  # what follows the beginning
    {'of': 'emb.weight'}
    """

    def __init__(self, text: str) -> None:
        parts = [(literal, field, looks) for literal, field, looks, _ in Formatter().parse(text) if field is not None]
        self.beginning = parts[0][0]
        self._names = [field for _, field, _ in parts]
        literals = ["", *(literal for literal, _, _ in parts[1:])]
        self._parts = [(each, *FIELDS[looks or field]) for each, (_, field, looks) in zip(literals, parts)]
        self._numbers = [pattern is NUMBER for _, pattern, _ in self._parts]
        self._rest = re.compile("".join(f"{re.escape(each)}({pattern.pattern})" for each, pattern, _ in self._parts))
        self._template = "".join(f"{literal}%s" for literal, _, _ in parts)
        self._fields = attrgetter(*self._names)

    def text(self, instruction: object) -> str:
        """The text of an instruction."""
        return self._template % self._fields(instruction)

    def scan(self, scanner: Scanner) -> dict[str, str | int]:
        """The fields of an instruction, from what follows its beginning to the end of the line."""
        found = scanner.rest(self._rest) or self._scan_parts(scanner)
        fields = zip(self._names, self._numbers, found)
        return {name: int(text) if number else text for name, number, text in fields}

    def _scan_parts(self, scanner: Scanner) -> list[str]:
        """The same part by part: the error says which part is wrong."""
        texts = []
        for literal, pattern, what in self._parts:
            scanner.literal(literal)
            texts.append(scanner.take(pattern, what))
        scanner.end()
        return texts
