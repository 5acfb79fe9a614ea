"""Finds cuts by the memory of their stages, counted on fake tensors as drivers count.

What the operations of a stage keep is measured one by one, so their sum is about what the stage holds. What it holds is counted
for one set of cuts at a time. So these steps are repeated until the stages are within the limit:

    1 search the best cuts whose stages are within it, with as many bytes besides as each stage was counted to hold more
    2 count the peaks of their stages

Each time a stage is seen to take more than before. If no cuts are left, the lightest cuts are searched in the same way. They do
not depend on the limit. So if their peak breaks it, the error can name that peak as a limit under which there are cuts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx

from pippy.balance.weighing import Weighing
from pippy.drivers.base.errors import DriverError
from pippy.drivers.batch.divide_call import divide_call
from pippy.drivers.count.pipe_bytes import count_pipe
from pippy.drivers.lowering.lower import lower
from pippy.drivers.plan import make_schedule
from pippy.drivers.plan.cost.held_bytes import PipeBytes, peak_bytes
from pippy.drivers.plan.language.program import Program
from pippy.ir.compile import compile_traced
from pippy.ir.cut.cuts import mark, marks
from pippy.ir.pipe import Pipe, compiled_of
from pippy.ir.request import Request

HeldBy = Callable[[Sequence[int]], Sequence[int]]  # what the stages of cuts hold


def cuts_within(weighing: Weighing, limit: int, held: HeldBy) -> list[int]:
    """The best cuts under a limit. Raises BalanceError if there are none."""
    besides = [0] * weighing.stages
    while (cuts := weighing.search(limit, besides)) is not None:
        if max(held(cuts)) <= limit:
            return cuts
        besides = _seen(weighing, cuts, held, besides)
    lightest = lightest_counted(weighing, held)
    if lightest is None:
        raise weighing.refusal(limit)
    least = max(held(lightest))
    if least > limit:
        raise weighing.refusal(limit, least)
    return lightest


def lightest_counted(weighing: Weighing, held: HeldBy, slack: float = 0.0) -> list[int] | None:
    """The lightest cuts that are found, whatever the limit; None if there are no cuts."""
    tried: list[list[int]] = []
    besides = [0] * weighing.stages
    while (cuts := weighing.lightest(besides, slack)) is not None and cuts not in tried:
        tried.append(cuts)
        besides = _seen(weighing, cuts, held, besides)
    return min(tried, key=lambda each: max(held(each)), default=None)


def _seen(weighing: Weighing, cuts: Sequence[int], held: HeldBy, before: Sequence[int]) -> list[int]:
    return [max(most, peak - kept) for most, peak, kept in zip(before, held(cuts), weighing.searched(cuts))]


class CountedCuts:
    """Counts the stages of a traced graph without marks, for one micro-batch: the example of the request.

    ``uncounted`` is the reason if the model could not run on fake tensors.
    """

    def __init__(self, weighing: Weighing, request: Request, in_flight: int | None) -> None:
        self.weighing, self.traced, self.request, self.in_flight = weighing, weighing.traced, request, in_flight
        self.uncounted = ""
        self._peaks: dict[tuple[int, ...], list[int] | None] = {}

    def held(self, cuts: Sequence[int]) -> list[int]:
        """What each stage of these cuts holds: its peak, or if that is not known, nearly what it keeps."""
        return self.peaks(cuts) or self.weighing.memories(cuts)

    def peaks(self, cuts: Sequence[int]) -> list[int] | None:
        """The most bytes that each stage holds. None if it is not known: without arguments or a loss, and if the model cannot
        run on fake tensors."""
        if (key := tuple(cuts)) not in self._peaks:
            counted = None if self.weighing.profile is None or self.uncounted else self._counted(cuts)
            parameters = self.weighing.parameter_bytes(cuts)
            self._peaks[key] = counted and [most + own for most, own in zip(counted, parameters)]
        return self._peaks[key]

    def _counted(self, cuts: Sequence[int]) -> list[int] | None:
        """The peaks beside parameters, gradients and the state of an optimizer."""
        pipe = self._pipe([self.weighing.figures.nodes[cut] for cut in cuts])
        compiled = compiled_of(pipe)
        if compiled.loss is None or not torch.is_grad_enabled():
            return None
        devices = [each.device for each in self.traced.model.parameters() if not each.is_meta]
        try:
            division = divide_call(compiled, 1, *self.request.arguments)
            sizes = count_pipe(pipe, division, devices[0] if devices else torch.device("cpu"), halves=False)
        except DriverError as error:
            self.uncounted = str(error.__cause__).partition("\n")[0]
            return None
        return [*peak_bytes(lower(pipe, self._program(compiled.num_stages)).program, _of_micro_batches(sizes))]

    def _pipe(self, before: Sequence[fx.Node]) -> Pipe:
        balanced = self.traced.balanced
        mark(self.traced, before)
        try:
            return Pipe(self.traced, compile_traced(self.traced, self.request))
        finally:
            self.traced.balanced = balanced
            for node in marks(self.traced):
                self.traced.graph.erase_node(node)

    def _program(self, stages: int) -> Program:
        if self.in_flight is not None:
            return make_schedule("fill_drain", workers=stages, chunks=self.in_flight)
        return make_schedule("1f1b", workers=stages, chunks=stages + 1)


def _of_micro_batches(sizes: PipeBytes) -> PipeBytes:
    """What is held for micro-batches: parameters, their gradients, which are there from the first step on, and the state of an
    optimizer are left out. So are the inputs of micro-batches whose turn has not come.
    """
    stages = (
        replace(each, parameters=0, gradients=0, early_gradients=0, first_backward=each.backward)
        for each in sizes.stages
    )
    return replace(sizes, stages=tuple(stages), inputs_stay=False)
