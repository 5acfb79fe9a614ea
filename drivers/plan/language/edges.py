"""The passes of stages, the edges between them, and what a program says of its micro-batches.

An edge is a value that one pass makes and others need. The micro-batches of a mini-batch are shared among replicas: to each a
run of them, as many as to the others or one more.

    9 micro-batches, 2 replicas     0 1 2 3 4 | 5 6 7 8

`Checkpoints` are the forwards that keep their inputs only. What their backwards need is computed again, by the instruction R.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from pippy.drivers.plan.language.errors import ArgumentError, beginning
from pippy.drivers.plan.language.instructions import Compute, Phase
from pippy.drivers.plan.language.placement import require_count
from pippy.drivers.plan.language.scanner import NAME, QUALIFIED_NAME, Scanner

PHASE = re.compile("[FBC]")


class Pass(NamedTuple):
    """The forward ("F") or backward ("B") pass of a stage, of any micro-batch, or the choice of tokens ("C") behind it. A half
    backward counts as "B".

    >>> str(Pass("F", 2))
    'F2'
    """

    phase: Phase
    stage: int

    def __str__(self) -> str:
        return f"{self.phase}{self.stage}"


@dataclass(frozen=True, slots=True)
class Edge:
    """A value, the pass that makes it, and the passes that need it.

    >>> str(Edge("skip", Pass("F", 0), (Pass("F", 1), Pass("F", 3))))
    'skip F0 -> F1 F3'
    """

    value: str
    source: Pass
    targets: tuple[Pass, ...]

    @property
    def ends(self) -> tuple[Pass, ...]:
        return (self.source, *self.targets)

    @property
    def goes_on(self) -> bool:
        """Whether the value is for the next run. Only tokens are, which are chosen from what a run gives."""
        return self.source.phase == "C"

    def __str__(self) -> str:
        return f"{self.value} {self.source} -> {' '.join(map(str, self.targets))}"


@dataclass(frozen=True, slots=True)
class Replicated:
    """A parameter of which each of these stages has a copy. The gradients of the copies are added up once per step.

    >>> str(Replicated("emb.weight", (0, 3)))
    'emb.weight 0 3'
    """

    parameter: str
    stages: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.parameter} {' '.join(map(str, self.stages))}"


@dataclass(frozen=True, slots=True)
class GradientSum:
    """Gradients that are added up over the copies of their parameters, on the worker ``owner``; these stages have the copies.

    >>> str(GradientSum("emb.weight", 0, (0, 3)))
    'emb.weight on worker 0'
    """

    name: str
    owner: int
    stages: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} on worker {self.owner}"


def chain(stages: int, backward: Collection[int]) -> tuple[Edge, ...]:
    """The edges of stages in a row: activations go up, and gradients go down between stages that have a backward.

    >>> [str(edge) for edge in chain(2, {0, 1})]
    ['activation_0 F0 -> F1', 'gradient_0 B1 -> B0']
    """
    up = [Edge(f"activation_{stage}", Pass("F", stage), (Pass("F", stage + 1),)) for stage in range(stages - 1)]
    down = [
        Edge(f"gradient_{stage}", Pass("B", stage + 1), (Pass("B", stage),))
        for stage in range(stages - 1)
        if stage in backward and stage + 1 in backward
    ]
    return (*up, *down)


def produced_by(compute: Compute) -> Pass | None:
    """The pass whose values exist once ``compute`` is done. The weight half of a backward makes none, nor does a recompute."""
    phase = compute.kind.phase
    return None if phase is None else Pass(phase, compute.stage)


def by_end(ends: Iterable[tuple[Pass, Edge]]) -> dict[Pass, list[Edge]]:
    """The edges of each pass."""
    found: dict[Pass, list[Edge]] = {}
    for end, edge in ends:
        found.setdefault(end, []).append(edge)
    return found


def scan_pass(scanner: Scanner) -> Pass:
    phase: Any = scanner.take(PHASE, "a pass, F or B and a stage number")
    return Pass(phase, scanner.number("a stage number"))


def scan_edge(scanner: Scanner) -> Edge:
    value = scanner.take(NAME, "the name of a value")
    scanner.literal(" ")
    source = scan_pass(scanner)
    scanner.literal(" -> ")
    return Edge(value, source, scanner.several(lambda: scan_pass(scanner)))


def scan_replicated(scanner: Scanner) -> Replicated:
    parameter = scanner.take(QUALIFIED_NAME, "the qualified name of a parameter")
    scanner.literal(" ")
    return Replicated(parameter, scanner.numbers("a stage number"))


def shares(chunks: int, replicas: int, slices: int = 1) -> tuple[range, ...]:
    """The micro-batches of each replica. The ``slices`` of a row stay together.

    >>> shares(chunks=5, replicas=2)
    (range(0, 3), range(3, 5))
    >>> shares(chunks=6, replicas=2, slices=2)
    (range(0, 4), range(4, 6))
    >>> shares(chunks=1, replicas=2)
    Traceback (most recent call last):
    pippy.drivers.plan.language.errors.ArgumentError: chunks=1 for 2 replicas of the pipeline: each needs a micro-batch; ...
    """
    require_count("replicas", replicas)
    if chunks % slices:
        raise ArgumentError(
            f"chunks={beginning(chunks)} for {beginning(slices)} slices of each sequence: a row of micro-batches has as many "
            f"as there are slices; give a multiple of {beginning(slices)}"
        )
    rows = chunks // slices
    if rows < replicas:
        raise ArgumentError(
            f"chunks={beginning(rows)} for {beginning(replicas)} replicas of the pipeline: each needs a "
            f"micro-batch; give {beginning(replicas)} or more"
        )
    sizes = [slices * (rows // replicas + (replica < rows % replicas)) for replica in range(replicas)]
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0)))


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
