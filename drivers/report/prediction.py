"""What a schedule would take if nothing cost time but the computations: simulated with the measured means of each stage."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from pippy.drivers.schedules.costs import Costs
from pippy.drivers.schedules.instructions import Op
from pippy.drivers.schedules.program import Program
from pippy.drivers.schedules.simulate import Simulation, simulate_with

Means = dict[Op, list[float]]  # of each kind of pass, the seconds of each stage


def mean_seconds(program: Program, durations: Mapping[str, Sequence[float]]) -> Means:
    """How long each pass of each stage takes on average; none where a stage has no such pass.

    >>> from pippy.drivers.schedules import make_schedule
    >>> mean_seconds(make_schedule("forward_only", workers=2, chunks=2), {"F0": [1.0, 3.0], "F1": [1.0, 1.0]})[Op.FORWARD]
    [2.0, 1.0]
    """
    return {op: [fmean(durations.get(f"{op}{stage}", [0.0])) for stage in range(program.stages)] for op in Op}


def predicted(program: Program, means: Means) -> Simulation:
    """The simulation of a program whose passes take so long."""
    return simulate_with(
        program, Costs(means[Op.FORWARD], means[Op.BACKWARD_INPUT], means[Op.BACKWARD_WEIGHT], means[Op.BACKWARD])
    )


def evened(means: Means) -> Means:
    """The means if every stage took the same, all together as long as before.

    >>> evened({Op.FORWARD: [1.0, 3.0]})
    {<Op.FORWARD: 'F'>: [2.0, 2.0]}
    """
    return {op: [fmean(seconds)] * len(seconds) for op, seconds in means.items()}
