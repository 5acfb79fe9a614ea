"""The exact text of a kind of instruction, written once: it prints an instruction, and it reads one."""

import re
from operator import attrgetter
from string import Formatter

from pippy.drivers.plan.language.scanner import NAME, NUMBER, SUM, Scanner

# What the fields of instructions look like, and what an error calls them.
FIELDS = {
    "stage": (NUMBER, "a stage number"),
    "microbatch": (NUMBER, "a micro-batch number"),
    "to": (NUMBER, "a worker number"),
    "of": (NUMBER, "a worker number"),
    "source": (NUMBER, "a worker number"),
    "value": (NAME, "the name of a value"),
    "into": (NAME, "the name of a value"),
    "sum": (SUM, "the name of a sum: of a parameter, or stage 2 part 0"),
}


class Form:
    """A text with the names of an instruction's fields in braces, in their order, after a word of its own.

    >>> form = Form("free {value}.{microbatch}")
    >>> form.beginning
    'free '
    >>> form.scan(Scanner("x.0"))  # what follows the beginning
    ['x', 0]
    """

    def __init__(self, text: str) -> None:
        parts = [(literal, field) for literal, field, _, _ in Formatter().parse(text) if field is not None]
        self.beginning = parts[0][0]
        self._parts = [(literal, *FIELDS[field]) for literal, field in [("", parts[0][1]), *parts[1:]]]
        self._numbers = [pattern is NUMBER for _, pattern, _ in self._parts]
        self._rest = re.compile("".join(f"{re.escape(each)}({pattern.pattern})" for each, pattern, _ in self._parts))
        self._template = "".join(f"{literal}%s" for literal, _ in parts)
        self._fields = attrgetter(*(field for _, field in parts))

    def text(self, instruction: object) -> str:
        """The text of an instruction."""
        return self._template % self._fields(instruction)

    def scan(self, scanner: Scanner) -> list[str | int]:
        """The fields of an instruction, from what follows its beginning to the end of the line."""
        found = scanner.rest(self._rest) or self._scan_parts(scanner)
        return [int(text) if number else text for number, text in zip(self._numbers, found)]

    def _scan_parts(self, scanner: Scanner) -> list[str]:
        """The same part by part: the error says which part is wrong."""
        texts = []
        for literal, pattern, what in self._parts:
            scanner.literal(literal)
            texts.append(scanner.take(pattern, what))
        scanner.end()
        return texts
