"""Which stages compute forwards again so that a program fits: as few as possible, found for each worker alone.

What a worker holds depends on its own order and on its own stages. So each worker tries the modes of its stages by itself, and
one walk over the program counts one try of every worker. A mode that computes more again than another one that fits is left
out: it takes at least as long.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from math import prod

from pippy.drivers.plan.cost.costs import Costs
from pippy.drivers.plan.cost.held_bytes import PipeBytes, peak_bytes
from pippy.drivers.plan.language.instructions import Op
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.passes.recompute import Checkpoint, add_recompute, modes_of

ORDER = ("never", "except_last", "always")  # what is computed again, from least to most
FEW_STAGES = 3  # a worker with more stages than this tries no longer all modes of them
FEW_PROGRAMS = 16  # up to so many programs are simulated; of more, the workers' cheapest modes are taken

Modes = dict[int, str]  # by stage
Tries = list[tuple[Modes, int]]  # the modes of one worker's stages that were tried, and what it holds with each


def tried_modes(
    program: Program, sizes: PipeBytes, checkpoint: Checkpoint | None, limits: Sequence[int] | None = None
) -> list[Tries]:
    """What each worker holds with the modes that ``checkpoint`` gives its stages, or without it, with each that may be chosen.

    A worker that keeps its limit when it computes nothing again, which is tried first, tries nothing else.

    >>> from pippy.drivers.plan import make_schedule
    >>> from pippy.drivers.plan.cost.held_bytes import StageBytes
    >>> sizes = PipeBytes((StageBytes(kept=10), StageBytes(kept=9)))
    >>> for modes, peak in tried_modes(make_schedule("1f1b", workers=2, chunks=4), sizes, None)[0]:
    ...     print(modes, peak)
    {0: 'never'} 20
    {0: 'except_last'} 20
    {0: 'always'} 10
    """
    stages_of = [program.placement.stages_of(worker) for worker in range(program.workers)]
    if checkpoint is None:
        options = [[dict(zip(stages, modes)) for modes in _options(len(stages))] for stages in stages_of]
    else:
        given = modes_of(checkpoint, program.stages)
        options = [[{stage: given[stage] for stage in stages}] for stages in stages_of]
    tried: list[Tries] = [[] for _ in options]
    for number in range(max(map(len, options))):
        chosen = [each[min(number, len(each) - 1)] for each in options]
        held = peak_bytes(add_recompute(program, _together(chosen)), sizes)
        for worker, (modes, peak) in enumerate(zip(chosen, held)):
            if number < len(options[worker]):
                tried[worker].append((modes, peak))
        if number == 0 and limits is not None:
            options = [each[:1] if peak <= limit else each for each, peak, limit in zip(options, held, limits)]
        if number + 1 >= max(map(len, options)):
            break
    return tried


def fitting_modes(program: Program, tried: Sequence[Tries], limits: Sequence[int], costs: Costs) -> Iterator[Modes]:
    """The modes of all stages with which each worker keeps its limit, and computes no more again than it must."""
    needed = [least_modes([modes for modes, peak in tries if peak <= limit]) for tries, limit in zip(tried, limits)]
    if prod(map(len, needed)) > FEW_PROGRAMS:
        again = costs.resolve(program).stages[Op.RECOMPUTE]

        def added(modes: Modes) -> float:
            return sum(float(again[stage]) * ORDER.index(mode) for stage, mode in modes.items())

        needed = [[min(modes, key=added)] if modes else [] for modes in needed]
    yield from map(_together, product(*needed))


def least_modes(fitting: Sequence[Modes]) -> list[Modes]:
    """Those that do not compute more again than another one.

    >>> least_modes([{0: "always", 1: "never"}, {0: "never", 1: "always"}, {0: "always", 1: "always"}])
    [{0: 'always', 1: 'never'}, {0: 'never', 1: 'always'}]
    """

    def needless(modes: Modes, than: Modes) -> bool:
        return modes != than and all(ORDER.index(than[stage]) <= ORDER.index(modes[stage]) for stage in modes)

    return [modes for modes in fitting if not any(needless(modes, other) for other in fitting)]


def _options(stages: int) -> Iterator[tuple[str, ...]]:
    if stages <= FEW_STAGES:
        yield from product(ORDER, repeat=stages)
        return
    for less, more in pairwise(ORDER):
        yield from ((more,) * count + (less,) * (stages - count) for count in range(stages))
    yield (ORDER[-1],) * stages


def _together(chosen: Sequence[Mapping[int, str]]) -> Modes:
    return {stage: mode for modes in chosen for stage, mode in sorted(modes.items())}
