"""How long computations and transfers take, in any unit of time.

A single number is the cost for one *device*: what a worker spends on one micro-batch, all its stages together, if the
model is spread evenly. A stage then costs ``number * workers / stages``: with v stages on each worker, 1/v of the
number. So schedules with different numbers of stages a worker compare fairly: they run the same model. A sequence or
a dict gives each *stage's* own cost instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isfinite
from numbers import Real

from pippy.drivers.plan.language.errors import ArgumentError, beginning
from pippy.drivers.plan.language.instructions import KINDS, Compute, InstructionKey
from pippy.drivers.plan.language.program import Program

Number = float | Fraction
PerStage = Number | Sequence[Number] | Mapping[int, Number]
PerEdge = Number | Mapping[str, Number]


@dataclass(frozen=True)
class Costs:
    """The costs of passes, and of moving a value between workers: ``size / bandwidth`` in a channel, then ``latency``.

    A channel moves one value at a time. In a program on several hosts, these are the costs between two of them: a host
    sends one value at a time to others, and takes one at a time; within a host, a value takes no time.

    ``backward`` is the cost of a whole backward; left out, it is that of its two halves. ``recompute`` is that of a forward
    which is computed again; left out, it is that of the forward.

    >>> from pippy.drivers.plan import make_schedule
    >>> program = make_schedule("interleaved_1f1b", workers=2, chunks=2, stages_per_worker=2)
    >>> from pippy.drivers.plan.language.instructions import Op
    >>> Costs(forward=1.0).resolve(program).compute(Compute(Op.FORWARD, 3, 0))
    0.5
    >>> Costs(forward=[1.0, 2.0, 3.0, 4.0]).resolve(program).compute(Compute(Op.FORWARD, 3, 0))
    4.0
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    backward: PerStage | None = None
    latency: PerEdge = 0
    size: PerEdge = 0
    bandwidth: Number = 1
    recompute: PerStage | None = None

    def resolve(self, program: Program) -> "ResolvedCosts":
        """The costs of every stage and edge of a program; one that is missing or negative is refused."""
        require_cost("bandwidth", self.bandwidth)
        if self.bandwidth == 0:
            raise ArgumentError(f"bandwidth={beginning(self.bandwidth)} must be above zero")
        costs = {
            name: per_stage(name, cost, program)
            for name in ("backward_input", "backward_weight", "backward", "forward", "recompute")
            if (cost := getattr(self, name)) is not None
        }
        sizes = per_edge("size", self.size, program)
        return ResolvedCosts(
            {key: kind.cost(costs.get) for key, kind in KINDS.items() if kind.cost},
            per_edge("latency", self.latency, program),
            {value: size / self.bandwidth if size else 0 for value, size in sizes.items()},
        )


@dataclass(frozen=True)
class ResolvedCosts:
    """A number for each pass of each stage and each edge: ``occupied`` is how long a value keeps its channel busy."""

    stages: dict[InstructionKey, Sequence[Number]]
    latency: dict[str, Number]
    occupied: dict[str, Number]

    def compute(self, compute: Compute) -> Number:
        return self.stages[compute.op][compute.stage]


def per_stage(name: str, given: PerStage, program: Program) -> list[Number]:
    if isinstance(given, Mapping):
        missing = [stage for stage in range(program.stages) if stage not in given]
        if missing:
            raise ArgumentError(
                f"{name}={beginning(given)} has no cost for stage {missing[0]}; give one for each stage"
            )
        costs = [given[stage] for stage in range(program.stages)]
    elif isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) != program.stages:
            raise ArgumentError(
                f"{name}={beginning(given)} has {len(given)} costs for {program.stages} stages; give one for each"
            )
        costs = list(given)
    else:
        require_cost(name, given)
        costs = [given * program.placement.workers / program.stages] * program.stages
    for cost in costs:
        require_cost(name, cost)
    return costs


def per_edge(name: str, given: PerEdge, program: Program) -> dict[str, Number]:
    values = [edge.value for edge in program.flow]
    if not isinstance(given, Mapping):
        require_cost(name, given)
        return dict.fromkeys(values, given)
    for value in values:
        if value not in given:
            raise ArgumentError(f"{name}={beginning(given)} has no entry for edge {value}; give one for each edge")
        require_cost(name, given[value])
    return {value: given[value] for value in values}


def require_cost(name: str, cost: object) -> None:
    if isinstance(cost, bool) or not isinstance(cost, Real) or not isfinite(cost) or cost < 0:
        raise ArgumentError(f"{name}={beginning(cost)} must be a number of at least 0")
