"""The passes of stages, and the edges between them: the values that one pass makes and others need."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from pippy.drivers.plan.language.instructions import Compute, Phase
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


def scan_pass(scanner: Scanner) -> Pass:
    phase: Any = scanner.take(PHASE, "a pass, F or B and a stage number")
    return Pass(phase, scanner.number("a stage number"))


def scan_edge(scanner: Scanner) -> Edge:
    value = scanner.take(NAME, "the name of a value")
    scanner.literal(" ")
    source = scan_pass(scanner)
    scanner.literal(" -> ")
    targets = [scan_pass(scanner)]
    while scanner.accept(" "):
        targets.append(scan_pass(scanner))
    return Edge(value, source, tuple(targets))


def scan_replicated(scanner: Scanner) -> Replicated:
    parameter = scanner.take(QUALIFIED_NAME, "the qualified name of a parameter")
    scanner.literal(" ")
    return Replicated(parameter, scanner.numbers("a stage number"))
