"""How long a step would take if only its computations took time: a simulation with the measured medians of each stage.

The costs are medians, so one computation that lost its core for some milliseconds does not change them.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, median

from pippy.drivers.plan.cost.costs import Costs
from pippy.drivers.plan.cost.simulate import Simulation, simulate_with
from pippy.drivers.plan.language.instructions import Op
from pippy.drivers.plan.language.program import Program

Medians = dict[Op, list[float]]  # of each kind of pass, the seconds of each stage


def median_seconds(program: Program, durations: Mapping[str, Sequence[float]]) -> Medians:
    """The median duration of each pass of each stage, and 0 where a stage has no such pass.

    >>> from pippy.drivers.plan import make_schedule
    >>> median_seconds(make_schedule("forward_only", workers=2, chunks=2), {"F0": [2.0, 9.0, 1.0], "F1": [1.0]})[Op.FORWARD]
    [2.0, 1.0]
    """
    return {op: [median(durations.get(f"{op}{stage}", [0.0])) for stage in range(program.stages)] for op in Op}


def predicted(program: Program, medians: Medians) -> Simulation:
    """Simulate a program whose passes take these times."""
    forward, again, whole, inputs, weights, _ = (medians[op] for op in Op)
    return simulate_with(program, Costs(forward, inputs, weights, whole, recompute=again))


def evened(medians: Medians) -> Medians:
    """The medians if all stages took the same time, and their sum stayed as it is.

    >>> evened({Op.FORWARD: [1.0, 3.0]})
    {<Op.FORWARD: 'F'>: [2.0, 2.0]}
    """
    return {op: [fmean(seconds)] * len(seconds) for op, seconds in medians.items()}
