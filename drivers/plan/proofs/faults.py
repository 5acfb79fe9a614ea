"""Collects what is wrong with a program, and shows it in the program's text."""

from collections import defaultdict
from dataclasses import dataclass, field

from pippy.drivers.plan.language.errors import ProgramError
from pippy.drivers.plan.language.exchanges import ExchangeProgram
from pippy.drivers.plan.language.program import Program

MARK = "    <-- "
CONTEXT = 2  # lines shown around a fault
WHOLE = 200  # programs of up to this many lines are shown whole


@dataclass
class Faults:
    """The faults of a program: at an instruction, at the end of a worker's list, or in the program as a whole.

    >>> from pippy.drivers.plan import make_schedule
    >>> faults = Faults(make_schedule("fill_drain", workers=1, chunks=1))
    >>> faults.at(0, 1, "too late")
    >>> faults.found
    ['worker 0, B0.0: too late']
    """

    program: Program | ExchangeProgram
    found: list[str] = field(default_factory=list)
    marks: dict[tuple[int, int], list[str]] = field(default_factory=lambda: defaultdict(list))

    def at(self, worker: int, index: int, message: str) -> None:
        order = self.program.orders[worker]
        where = str(order[index]) if index < len(order) else "at the end"
        self.found.append(f"worker {worker}, {where}: {message}")
        self.mark(worker, index, message)

    def at_end(self, worker: int, message: str) -> None:
        self.at(worker, len(self.program.orders[worker]), message)

    def mark(self, worker: int, index: int, message: str) -> None:
        """Show a message at an instruction. It does not count as a fault."""
        self.marks[worker, index].append(message)

    def overall(self, message: str) -> None:
        self.found.append(message)

    def raise_if_any(self) -> None:
        """Raise one error with all faults, and the program with the faults marked."""
        if not self.found:
            return
        count = f"{len(self.found)} fault{'s' if len(self.found) > 1 else ''}"
        listed = "\n".join(f"- {fault}" for fault in self.found)
        raise ProgramError(
            f"program {self.program.schedule} cannot run: {count}\n{listed}\n\n{self.marked_program()}",
            tuple(self.found),
        )

    def marked_program(self) -> str:
        lines = list(self.program.header())
        shown = set(range(len(lines)))
        for worker, order in enumerate(self.program.orders):
            shown.add(len(lines))
            lines.append(f"worker {worker}")
            for index in range(len(order) + 1):
                marks = self.marks.get((worker, index))
                if marks:
                    shown.update(range(len(lines) - CONTEXT, len(lines) + CONTEXT + 1))
                if marks or index < len(order):
                    text = str(order[index]) if index < len(order) else "(end)"
                    lines.append(f"  {text}{MARK + '; '.join(marks) if marks else ''}")
        return "\n".join(lines if len(lines) <= WHOLE else abridged(lines, shown))


def abridged(lines: list[str], shown: set[int]) -> list[str]:
    parts: list[str] = []
    for number, line in enumerate(lines):
        if number in shown:
            parts.append(line)
        elif number - 1 in shown:
            parts.append("  ...")
    return parts
