"""The programs of the steps that `schedule="auto"` measures: both keep the limits."""

from dataclasses import dataclass

from pippy.drivers.plan import make_schedule
from pippy.drivers.plan.choice.candidate import Candidate
from pippy.drivers.plan.choice.choice import Choice
from pippy.drivers.plan.choice.limits import live_counts
from pippy.drivers.plan.choice.problem import Problem
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.passes.halves import has_halves, in_halves


@dataclass(frozen=True)
class MeasuredPrograms:
    """A program with whole backwards, and one with halves."""

    whole: Program
    halves: Program


def programs_that_fit(choice: Choice) -> MeasuredPrograms:
    """The fastest of the candidates with whole backwards whose order with halves keeps the limits, too."""
    without_halves = [each for each in choice.candidates if not has_halves(each.program)]
    for each in without_halves:
        halves = in_halves(each.program)
        if not choice.problem.refusal(Candidate(halves, each.micro_batch)):
            return MeasuredPrograms(each.program, halves)
    program = (without_halves or choice.candidates)[0].program
    return MeasuredPrograms(program, program)


def programs_within(problem: Problem) -> MeasuredPrograms:
    """The program of the problem, or if it holds too many micro-batches, an order of as many as there is room for."""
    program, placement = problem.program, problem.program.placement
    if problem.refusal(Candidate(program, problem.micro_batch(program.chunks))):
        program = make_schedule(
            "list",
            workers=program.workers,
            chunks=program.chunks,
            placement=placement,
            checkpoint=problem.checkpoint or "never",
            memory=live_counts(problem.limits, placement, program.chunks),
            halves=False,
        )
    return MeasuredPrograms(program, in_halves(program))
