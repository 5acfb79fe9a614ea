"""One call of a stage on a worker: it runs the module, and holds it to what must not change."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from pippy.drivers.protocol.programs import filled
from pippy.drivers.worker.gradients.step_buffers import StepBuffers
from pippy.drivers.worker.halves.split_backward import WeightDeferral
from pippy.drivers.worker.repeated_forward import RepeatedForward
from pippy.drivers.worker.stage_runs import AutogradRun, Run
from pippy.ir.run.in_place import (
    NamedInputs,
    apart_from,
    check_inputs,
    check_unchanged,
    input_versions,
    memory_of_layers,
)
from pippy.ir.run.may_draw import Draws, drawn_as_whole, seed_whole
from pippy.ir.run.stage_run import run_stage

if TYPE_CHECKING:
    from pippy.drivers.worker.compiled.stage_graphs import StageGraphs

Result = TypeVar("Result")
MaybeRun = TypeVar("MaybeRun", Run, None)


@dataclass(frozen=True)
class StageCall:
    """A stage that can be run: its module, how the graph calls it, and which of its tensors and inputs must not change.

    A program may have its ``backward``, and that in ``halves``. ``own`` are the values that nothing else takes, and whose
    memory nothing else has. With ``repeated``, its forward may be run again for the backward; ``outside`` says which of its
    inputs are made by other computations. With ``graphs``, its forward and backward are these, where they can be.
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
    graphs: "StageGraphs | None" = None

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

    def begin(self, inputs: tuple[Any, ...], args: Sequence[Any], step: int | None) -> tuple[Any, Run]:
        """Run the forward, in a step or to try it. Gives what it leaves for the backward, too. ``args`` are the inputs, or rows
        of them."""
        if self.graphs is not None and args is inputs and step is not None:
            return self._by_graph(self.graphs, inputs, step, True, partial(self.begin, inputs, inputs, None))
        if self.halves:
            with self.deferral.recording(inputs) as deferred:
                outputs = self.run(args)
        else:
            outputs, deferred = self.run(args), None
        return outputs, AutogradRun(self.name, self.module, outputs, inputs, deferred)

    def run(self, inputs: Sequence[Any], step: int | None = None) -> Any:
        """Run the forward, which no backward follows; in a step, as a graph."""
        if self.graphs is not None and step is not None:
            return self._by_graph(self.graphs, inputs, step, False, lambda: (self.run(inputs), None))[0]
        if self.buffers is not None and self.buffers.active:
            return self._in_buffers(self._run, inputs)
        return self._run(inputs)  # most often

    def _by_graph(
        self,
        graphs: "StageGraphs",
        inputs: Sequence[Any],
        step: int,
        backward: bool,
        eagerly: Callable[[], tuple[Any, MaybeRun]],
    ) -> tuple[Any, Run | MaybeRun]:
        """Run the forward as a graph where there is one, and else eagerly."""
        try:
            made = self._in_buffers(partial(self._run_graph, graphs, step, backward), inputs)
        except Exception as error:  # it most often fails without graphs, too, and then says why
            done = eagerly()
            graphs.give_up(inputs, backward, error)
            graphs.check_eager(inputs, backward)
            return done
        if made is None:
            graphs.check_eager(inputs, backward)
            return eagerly()
        return made

    def _in_buffers(self, run: Callable[[Sequence[Any]], Result], inputs: Sequence[Any]) -> Result:
        with nullcontext() if self.buffers is None else self.buffers.of(self.name):
            return run(inputs)

    def _run_graph(
        self, graphs: "StageGraphs", step: int, backward: bool, inputs: Sequence[Any]
    ) -> tuple[Any, Run] | None:
        seed_whole(self.name, self.drawn_as_whole)
        with check_unchanged(self.name, self.module, self.constant) if self.constant else nullcontext():
            made = graphs.forward(inputs, step, backward, self.halves)
        if made is None or not self.memory:
            return made
        outputs, run = made
        return apart_from(self.memory, outputs), run

    def _run(self, inputs: Sequence[Any]) -> Any:
        if self.drawn_as_whole is not Draws.NOTHING:
            seed_whole(self.name, self.drawn_as_whole)
        args = inputs if self.template is None else filled(self.template, inputs)
        before = input_versions(inputs, self.seen) if self.seen else None
        if self.constant:
            with check_unchanged(self.name, self.module, self.constant):
                outputs = run_stage(self.name, self.module, args)
        else:
            outputs = run_stage(self.name, self.module, args)
        if before is not None:
            check_inputs(before, inputs, self.seen, self.name, self.module)
        return apart_from(self.memory, outputs) if self.memory else outputs
