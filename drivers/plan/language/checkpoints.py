"""Which forwards keep their inputs only. What their backwards need is computed again, by the instruction R."""

from dataclasses import dataclass

from pippy.drivers.plan.language.scanner import Scanner


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The micro-batches for which the forward of a stage keeps its inputs only.

    >>> str(Checkpoints(2, (0, 1, 2, 3, 6)))
    '2 0-3 6'
    """

    stage: int
    microbatches: tuple[int, ...]

    def __str__(self) -> str:
        return " ".join([str(self.stage), *ranges(self.microbatches)])


def ranges(numbers: tuple[int, ...]) -> list[str]:
    """Numbers as text: those that follow one another as a range.

    >>> ranges((0, 1, 3))
    ['0-1', '3']
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


def scan_checkpoints(scanner: Scanner, chunks: int) -> Checkpoints:
    """Read a stage and its micro-batches, of which there are ``chunks``."""
    stage = scanner.number("a stage number")
    microbatches: list[int] = []
    while scanner.accept(" "):
        first = last = scanner.number("a micro-batch number")
        if scanner.accept("-"):
            last = scanner.number("a micro-batch number")
        if last >= chunks:
            raise scanner.error(f"there is no micro-batch {last} of {chunks}")
        microbatches += range(first, last + 1)
    if not microbatches:
        raise scanner.error("expected a micro-batch number")
    return Checkpoints(stage, tuple(microbatches))
