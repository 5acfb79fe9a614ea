"""Runs a worker's part of a program, one step at a time: it goes through what bind.py has made of the instructions."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any, Protocol

import torch

from pippy.drivers.plan.language.instructions import Instruction
from pippy.drivers.protocol.steps import StepResult
from pippy.drivers.wire.gpu.copies import DeviceCopies
from pippy.drivers.wire.transport import Transport
from pippy.drivers.worker.bind import BoundProgram
from pippy.drivers.worker.gradients.single_loss import SingleLoss
from pippy.drivers.worker.measure.calls import BoundCall
from pippy.drivers.worker.measure.profiler import is_profiled, naming
from pippy.drivers.worker.measure.recorder import Recorder
from pippy.drivers.worker.slices import SliceCaches
from pippy.drivers.worker.step_context import StepContext, is_number
from pippy.ir.base.names import LOSS
from pippy.ir.base.trees import map_tensors
from pippy.ir.run.may_draw import Draws
from pippy.ir.run.random_state import DrawKey, RandomStep, set_draw_key


class Watcher(Protocol):
    """What sees the instructions of a step run."""

    def watching(self, code: Sequence[BoundCall]) -> Sequence[BoundCall]:
        """The instructions, changed so that this sees them."""


class Executor:
    """One program on one worker. ``at`` is the number of the instruction that runs now, and ``run_of`` names the run. The step
    has had so many ``earlier`` micro-batches, of other programs."""

    def __init__(
        self, bound: BoundProgram, transport: Transport, device: torch.device, copies: DeviceCopies | None = None
    ) -> None:
        self.bound, self.program, self.code, self.draws = bound, bound.program, bound.code, bound.draws
        self.order = bound.program.order
        self.transport, self.device, self.copies = transport, device, copies
        self.at, self.run_of, self.earlier = 0, "", 0

    def run(self, step: StepContext, watchers: Iterable[Watcher] = ()) -> StepResult:
        """Run all instructions once, or until the step is given up. Each of the ``watchers`` sees them."""
        program, self.earlier = self.program, step.earlier
        step.casts = torch._C._is_any_autocast_enabled()
        step.draw_keys = self._draw_keys(step.random, step.earlier, len(step.weights))
        step.single = SingleLoss(self.bound.calls[LOSS]) if self.bound.gathers else None
        step.slices = SliceCaches(program.slices) if program.slices else None
        step.returns = dict.fromkeys(program.returns) if step.returns is None else step.returns
        step.returned = {name: dict.fromkeys(program.share) for name in step.returns}
        for name, microbatches in step.inputs.items():
            for microbatch, value in zip(program.share, microbatches, strict=True):
                step.values[name, microbatch] = value
        code = self._code()
        for each in watchers:
            code = each.watching(code)
        try:
            with torch.set_grad_enabled(step.trains):
                self._go_through(code, step)
            if step.single is not None:
                set_draw_key(step.draw_keys.get(None))
                step.returned[LOSS] = {0: step.single.loss()}
            returned = {name: _packed(list(values.values())) for name, values in step.returned.items()}
            return StepResult(returned, step.peak_live)
        finally:
            set_draw_key(None)
            step.drop()

    def add_up(self, step: StepContext) -> None:
        """Run the instructions that add up gradients, and no others."""
        sums, code = self.bound.sums, self._code()
        for self.at in sums:
            handle, operands = code[self.at]
            handle(step, *operands)

    def _code(self) -> Sequence[BoundCall]:
        """The program's instructions; inside of their names, if they are profiled."""
        return naming(self.order, self.code) if is_profiled() else self.code

    def _draw_keys(self, random: RandomStep | None, earlier: int, chunks: int) -> Mapping[int | None, DrawKey]:
        """What the random numbers of each micro-batch are drawn with, and those of the mini-batch; none if nothing draws."""
        if random is None or self.draws is Draws.NOTHING:
            return {}
        keys = random.keys(earlier + chunks, self.device)
        return {None: keys[None], **{at: keys[earlier + at] for at in range(chunks)}} if earlier else keys

    def _go_through(self, code: Sequence[BoundCall], step: StepContext) -> None:
        for self.at, (handle, operands) in enumerate(code):
            handle(step, *operands)

    @cached_property
    def recorder(self) -> Recorder:
        """Notes the times of instructions, in the steps that are recorded."""
        return Recorder(self.program.order, self.program.ranks, self.transport, self.device, self.copies)

    def current(self) -> Instruction:
        """The instruction that runs now."""
        return self.order[self.at]

    def source(self) -> int | None:
        """The worker of the cluster that the instruction takes a value from."""
        source = self.current().kind.receives_from
        return None if source is None else self.program.ranks[source(self.current())]


def _packed(values: list[Any]) -> Any:
    """Numbers as one tensor. A message with one tensor for each of many micro-batches would be slow."""
    if all(map(is_number, values)):
        return torch.stack(values).cpu()
    return [value.result() if isinstance(value, Future) else map_tensors(torch.Tensor.cpu, value) for value in values]
