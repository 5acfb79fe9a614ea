"""The peaks of the stages of given cuts, in bytes. They are counted on fake tensors, as drivers count."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

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
from pippy.ir.record.traced import Traced
from pippy.ir.request import Request


@dataclass
class CountedStages:
    """Counts the stages of a traced graph without marks, for one micro-batch: the example of the request.

    ``uncounted`` is the reason if the model could not run on fake tensors.
    """

    traced: Traced
    request: Request
    in_flight: int | None = None
    uncounted: str = ""

    def peaks(self, before: Sequence[fx.Node]) -> tuple[int, ...] | None:
        """The most bytes that each stage holds beside parameters, gradients and optimizer, if cuts are before these operations.

        None if it is not known: without a loss, and if the model cannot run on fake tensors.
        """
        pipe = self._pipe(before)
        compiled = compiled_of(pipe)
        if self.uncounted or compiled.loss is None or not torch.is_grad_enabled():
            return None
        device = next((each.device for each in self.traced.model.parameters()), torch.device("cpu"))
        try:
            division = divide_call(compiled, 1, *self.request.arguments)
            sizes = count_pipe(pipe, division, device, halves=False)
        except DriverError as error:
            self.uncounted = str(error.__cause__).partition("\n")[0]
            return None
        return peak_bytes(lower(pipe, self._program(compiled.num_stages)).program, _of_micro_batches(sizes))

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
