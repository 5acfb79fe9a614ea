"""The measured steps of `schedule="auto"` whose programs all fit into `memory=`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pippy.drivers.choice.measurements import CHOSEN, Measurements, StepPurpose
from pippy.drivers.choice.memory_fit import CallShapes, DividedCall, MemoryFit, measured_micro_batch
from pippy.drivers.plan.choice.fitted import Fitted
from pippy.drivers.plan.choice.search import Problem
from pippy.drivers.plan.cost.costs import Costs
from pippy.drivers.plan.language.program import Program


@dataclass(kw_only=True)
class WithinMemory(Measurements):
    """Measures an order that fits; then searches all that fits, with the measured costs."""

    memory: MemoryFit
    problem: Problem  # what has to fit
    rows: int | None
    shapes: CallShapes  # the largest for which it was counted
    version: int = 0  # how often it had to be counted again for larger shapes

    @classmethod
    def of(
        cls, memory: MemoryFit, plain: Program, problem: Problem, call: DividedCall, before: "WithinMemory | None"
    ) -> "WithinMemory":
        """The measurements for a call. If smaller shapes were measured ``before``, their costs are used instead."""
        version = 0 if before is None else before.version + 1
        costs = None if before is None else before.costs
        if before is not None and costs is not None:
            problem = _with_costs(problem, costs)
        made = cls({}, costs=costs, memory=memory, problem=problem, rows=call.rows, shapes=call.shapes, version=version)
        if costs is not None:
            made.choice = memory.best(problem, call.rows, measured=True)
        else:
            whole, halves = memory.to_measure(problem, call.rows)
            made.programs = {"plain": plain, "whole": whole, "halves": halves}
        return made

    def next_step(self) -> tuple[StepPurpose, Program]:
        if self.choice is not None:
            return self._of_version(CHOSEN), self.choice.program
        purpose = replace(self.purpose, weigh=False)
        purpose = replace(purpose, program="whole") if purpose.program == "first" else purpose
        return self._of_version(purpose), self.programs[purpose.program]

    def choose(self, costs: Costs) -> Fitted:
        return self.memory.best(_with_costs(self.problem, costs), self.rows, measured=True)

    def weighed(self, kept: Mapping[int, tuple[int, int]]) -> None:
        """Nothing is weighed: the bytes were counted."""

    def _of_version(self, purpose: StepPurpose) -> StepPurpose:
        """The same purpose, with another name for its program, whose bytes were counted again for larger shapes."""
        return replace(purpose, program=f"{purpose.program} {self.version}") if self.version else purpose


def _with_costs(problem: Problem, costs: Costs) -> Problem:
    return replace(problem, micro_batch=measured_micro_batch(problem.micro_batch, lambda _: costs))
