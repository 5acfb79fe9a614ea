"""What the stages of given cuts hold at their peaks, by the count that drivers take: they run on fake tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from pippy.drivers.base.errors import DriverError
from pippy.drivers.batch.divide_call import divide_call
from pippy.drivers.count.pipe_bytes import count_pipe
from pippy.drivers.lowering.lower import lower
from pippy.drivers.plan import make_schedule
from pippy.drivers.plan.cost.held_bytes import PipeBytes, peak_bytes
from pippy.drivers.plan.language.program import Program
from pippy.ir.compiler import compile_traced
from pippy.ir.cut.cuts import mark, marks
from pippy.ir.cut.params import MultiUseParamSpec
from pippy.ir.loss.returned_loss import LossSpec
from pippy.ir.pipe import Pipe, compiled_of
from pippy.ir.record.traced import Traced


@dataclass
class CountedStages:
    """Counts the stages of a traced graph without marks, for one micro-batch of these arguments.

    ``uncounted`` is the reason, once the model could not be run with fake tensors.
    """

    traced: Traced
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    loss_fn: Callable[..., Any] | None = None
    loss_spec: LossSpec = None
    spec: MultiUseParamSpec = None
    in_flight: int | None = None
    uncounted: str = ""

    def peaks(self, before: Sequence[fx.Node]) -> tuple[int, ...] | None:
        """The most that each stage holds beside parameters, gradients and optimizer, when it is cut before these operations.

        None where that is not known: without a loss, and where fake tensors cannot run the model.
        """
        pipe = self._pipe(before)
        compiled = compiled_of(pipe)
        if self.uncounted or compiled.loss is None or not torch.is_grad_enabled():
            return None
        device = next((each.device for each in self.traced.model.parameters()), torch.device("cpu"))
        try:
            sizes = count_pipe(pipe, divide_call(compiled, 1, self.args, self.kwargs), device, halves=False)
        except DriverError as error:
            self.uncounted = str(error.__cause__).partition("\n")[0]
            return None
        return peak_bytes(lower(pipe, self._program(compiled.num_stages)).program, _of_micro_batches(sizes))

    def _pipe(self, before: Sequence[fx.Node]) -> Pipe:
        balanced = self.traced.balanced
        mark(self.traced, before)
        try:
            return Pipe(self.traced, compile_traced(self.traced, self.spec, self.loss_fn, self.loss_spec))
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
