"""Reads one line of text part by part, and says at which column it stops making sense."""

import re

from pippy.drivers.plan.language.errors import ParseError

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

    def numbers(self, what: str) -> tuple[int, ...]:
        found = [self.number(what)]
        while self.accept(" "):
            found.append(self.number(what))
        return tuple(found)

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
