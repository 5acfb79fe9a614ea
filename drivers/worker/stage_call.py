"""One call of a stage on a worker: it runs the module, and holds it to what must not change."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from pippy.drivers.protocol.programs import InputIndex
from pippy.drivers.worker.gradients.step_buffers import StepBuffers
from pippy.drivers.worker.halves.split_backward import WeightDeferral
from pippy.drivers.worker.repeated_forward import RepeatedForward
from pippy.ir.base.trees import map_instances
from pippy.ir.run.changing_tensors import apart_from, memory_of_layers
from pippy.ir.run.given_inputs import NamedInputs, check_inputs, check_unchanged, snapshot_of_inputs
from pippy.ir.run.may_draw import Draws
from pippy.ir.run.stage_draws import drawn_as_whole, seed_whole
from pippy.ir.run.stage_run import run_stage


@dataclass(frozen=True)
class StageCall:
    """A stage that can be run: its module, how the graph calls it, and which of its tensors and inputs must not change.

    A program may have its ``backward``, and that in ``halves``. ``own`` are the values that nothing else takes, and whose
    memory nothing else has. With ``repeated``, its forward may be run again for the backward; ``outside`` says which of its
    inputs are made by other computations.
    """

    name: str
    module: nn.Module
    template: Any
    constant: Sequence[str]
    seen: NamedInputs = ()
    buffers: StepBuffers | None = None
    own: frozenset[str] = frozenset()
    backward: bool = False
    halves: bool = False
    repeated: RepeatedForward | None = None
    outside: Sequence[bool] = ()

    @cached_property
    def deferral(self) -> WeightDeferral:
        """Puts off the computation of its weights' gradients."""
        return WeightDeferral(self.module)

    @cached_property
    def memory(self) -> frozenset[int]:
        """The memory that its layers may change while others still need what they have handed out."""
        return memory_of_layers(self.module)

    @cached_property
    def drawn_as_whole(self) -> Draws:
        """What it draws from that is seeded once for all of a call."""
        return drawn_as_whole(self.module)

    def run(self, inputs: Sequence[Any]) -> Any:
        if self.buffers is not None and self.buffers.active:
            with self.buffers.of(self.name):
                return self._run(inputs)
        return self._run(inputs)

    def _run(self, inputs: Sequence[Any]) -> Any:
        seed_whole(self.name, self.drawn_as_whole)
        args = inputs if self.template is None else filled(self.template, inputs)
        before = snapshot_of_inputs(inputs, self.seen) if self.seen else None
        if self.constant:
            with check_unchanged(self.name, self.module, self.constant):
                outputs = run_stage(self.name, self.module, args)
        else:
            outputs = run_stage(self.name, self.module, args)
        if before is not None:
            check_inputs(before, self.name, self.module)
        return apart_from(self.memory, outputs) if self.memory else outputs


def filled(template: Any, inputs: Sequence[Any]) -> Any:
    """A template with the inputs in their places.

    >>> filled((InputIndex(1), [InputIndex(0), "x"]), inputs=["a", "b"])
    ('b', ['a', 'x'])
    """
    return map_instances(InputIndex, lambda each: inputs[each.index], template)
