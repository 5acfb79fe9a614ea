"""One call of a stage on a worker: it runs the module, and holds it to what must not change.

What a forward leaves for the backward is its `Run`.

In a step whose micro-batches are slices of sequences, `SliceCaches` has the keys and values between the runs of a stage.

`RepeatedForward` keeps the inputs only, and is run again for the backward.

    first     runs the stage as ever; its graph is dropped at once, and what it gives is cut from the graph
    again     runs it on the same inputs, with the random numbers, buffers and attributes of the first run; afterwards these
              are as they were before it

The first run makes a graph too: so it takes the same kernels, its outputs require a gradient where they would, and what fails
fails there. Where the first run changes something that earlier ones did not change, nothing is known of how that was: then the
graph is kept, as it is where it changes a parameter.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import nn

from pippy.drivers.compare.alike import norms_are_still
from pippy.drivers.protocol.programs import filled
from pippy.drivers.worker.gradients.buffers import StepBuffers
from pippy.drivers.worker.halves.split_backward import DeferredGradients, WeightDeferral
from pippy.ir.base.errors import StageError
from pippy.ir.base.trees import describe, map_leaves, map_tensors, tensors
from pippy.ir.run import in_place
from pippy.ir.run.forward_state import Before, Change, RandomNumbers, RandomNumbersThen, as_before, said
from pippy.ir.run.key_value_cache import MadeForLater, SliceCache, roots
from pippy.ir.run.may_draw import Draws, drawn_as_whole, seed_whole
from pippy.ir.run.stage_backward import edges_of, stage_backward
from pippy.ir.run.stage_run import StageRun, as_leaf, run_backward, run_stage

if TYPE_CHECKING:
    from pippy.drivers.worker.compiled.stage_graphs import StageGraphs


RunStage = Callable[[tuple[Any, ...]], Any]  # runs the stage on leaves


@dataclass
class Kept:
    """What is kept of a first run: its inputs, and what it changed, as that was before."""

    inputs: tuple[Any, ...]
    tensors: in_place.Snapshot[int]
    changes: Sequence[Change]
    drew: RandomNumbersThen | None
    outputs: list[torch.Tensor] | None  # to compare with, in the first run of all


@dataclass
class _Known:
    """What the forwards of a stage are known to write, with these training flags, and with batch norms still or not."""

    flags: list[bool]
    tensors: set[tuple[int, str]] = field(default_factory=set)
    inputs: set[int] = field(default_factory=set)


class RepeatedForward:
    """The first and second runs of one call of a stage, with the number of the stage."""

    def __init__(self, name: str, module: nn.Module, device: torch.device, stage: int) -> None:
        self.name, self.modules, self.stage = name, list(module.modules()), stage
        self.parameters = list(module.parameters())
        self.random = RandomNumbers(self.modules, device)
        self.known: _Known | None = None

    def first(self, inputs: tuple[Any, ...], outside: Sequence[bool], run: RunStage) -> tuple[Any, Kept | None]:
        """Run the stage. Gives its outputs, and what is kept to run it again.

        Of inputs, only those from ``outside`` are kept. None if the stage cannot be run again from these.
        """
        flags = [*(module.training for module in self.modules), norms_are_still()]
        known = self.known if self.known is not None and self.known.flags == flags else None
        own = tuple(map_leaves(lambda leaf: leaf, value) if is_own else None for value, is_own in zip(inputs, outside))
        tensors_given = dict(enumerate(tensors(own)))
        given = in_place.Snapshot(
            tensors_given, [each for each in tensors_given if known is None or each in known.inputs]
        )
        before = Before(self.modules, None if known is None else known.tensors)
        random, weights = self.random.now(), in_place.Snapshot(dict(enumerate(self.parameters)))
        with said("checkpointing"):
            outputs = run(inputs)
        changes, written, complete = before.changes()
        changed = set(given.changed())
        first_of_all = known is None
        known = self.known = known or _Known(flags)
        known.tensors |= written
        known.inputs |= changed
        if not complete or not changed <= given.copies.keys() or weights.changed():
            return outputs, None
        numbers = iter(tensors_given)
        inputs = tuple(map_tensors(lambda _: _as_given(given, changed, next(numbers)), value) for value in own)
        compared = [each.detach().clone() for each in tensors(outputs)] if first_of_all else None
        drew = None if random.is_now() else random
        return outputs, Kept(inputs, in_place.Snapshot(dict(enumerate(tensors(inputs)))), changes, drew, compared)

    def again(self, kept: Kept, inputs: Sequence[Any], run: RunStage) -> Any:
        """Run the stage once more, and give its outputs. ``inputs`` has those that do not come from outside."""
        if kept.tensors.changed():
            raise StageError(
                f"another stage has changed an input of {self.name} in place, so the forward cannot be computed again with "
                "the input that it had. What to do: use the operation that makes a new tensor there, or leave stage "
                f"{self.stage} out of checkpoint=, in a dict of the other stages"
            )
        both = tuple(as_leaf(other if mine is None else mine) for mine, other in zip(kept.inputs, inputs, strict=True))
        with ExitStack() as stack:
            if kept.drew is not None:
                stack.enter_context(kept.drew.in_force())
            stack.enter_context(as_before(kept.changes))
            stack.enter_context(said("recomputing"))
            outputs = run(both)
        self._compare(kept, outputs)
        return outputs

    def _compare(self, kept: Kept, outputs: Any) -> None:
        if kept.outputs is None:
            return
        found = [each.detach() for each in tensors(outputs)]
        if len(found) == len(kept.outputs) and all(map(_as_good_as_equal, kept.outputs, found)):
            return
        raise StageError(
            f"{self.name} returns something else when its forward is computed again: {describe(outputs)}. The "
            "forward depends on more than its inputs, its buffers and the random numbers of torch, numpy and "
            f"Python: on a clock, a file, or an object that it changes. What to do: leave stage {self.stage} out of "
            "checkpoint=, in a dict of the other stages"
        )


def cut(value: Any) -> Any:
    """A value without the graph that made it. Its tensors require a gradient as before."""
    return map_tensors(lambda tensor: tensor.detach().requires_grad_() if tensor.requires_grad else tensor, value)


def _as_given(given: in_place.Snapshot[int], changed: Container[int], number: int) -> torch.Tensor:
    tensor = given.tensors[number]
    return given.copies[number].requires_grad_(tensor.requires_grad) if number in changed else tensor


def _as_good_as_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors differ by no more than sums in another order do, as on a GPU."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.dtype.is_floating_point or one.layout is not torch.strided:
        return one.layout is not torch.strided or torch.equal(one, other)
    if torch.equal(one, other):
        return True
    epsilon = 1e3 * torch.finfo(one.dtype).eps
    scale = one.abs().nan_to_num().max().item() if one.numel() else 0.0
    return torch.allclose(one, other, rtol=epsilon, atol=epsilon * scale, equal_nan=True)


_PUT_OFF = StageRun((), ())  # the half W has neither inputs nor outputs


class Run(Protocol):
    """What a forward has left for the backward."""

    @property
    def held(self) -> Any:
        """The inputs that it holds, and all else that it holds."""

    def backward(self, output_grads: Any) -> Sequence[Any]:
        """The whole backward. Gives the gradients of the inputs."""

    def backward_input(self, output_grads: Any) -> Sequence[Any]:
        """The half I. Gives the gradients of the inputs."""

    def backward_weight(self) -> None:
        """The half W."""


class AutogradRun(StageRun):
    """A run whose backward is autograd's. In a program with halves, ``deferred`` takes the gradients that are put off.

    It holds the inputs, and not the outputs: these are freed when they were sent, and read by those who need them here.
    """

    def __init__(
        self, name: str, module: nn.Module, outputs: Any, inputs: tuple[Any, ...], deferred: DeferredGradients | None
    ) -> None:
        self.outputs, self.inputs = edges_of(outputs), inputs
        self.name, self.module, self.deferred = name, module, deferred

    @property
    def held(self) -> Any:
        return self.inputs, ()

    def backward(self, output_grads: Any) -> Sequence[Any]:
        if self.deferred is None:
            return run_backward(self.name, self.module, self, output_grads, stage_backward)
        gradients = self.backward_input(output_grads)
        self.deferred.run()
        return gradients

    def backward_input(self, output_grads: Any) -> Sequence[Any]:
        run, self.outputs, self.inputs = StageRun(self.outputs, self.inputs), (), ()
        assert self.deferred is not None
        return run_backward(self.name, self.module, run, output_grads, self.deferred.backward_input)

    def backward_weight(self) -> None:
        run_backward(self.name, self.module, _PUT_OFF, None, self._weights)

    def _weights(self, *_: Any) -> tuple[Any, ...]:
        assert self.deferred is not None
        self.deferred.run()
        return ()


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
    seen: in_place.NamedInputs = ()
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
        return in_place.memory_of_layers(self.module)

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
        with in_place.check_unchanged(self.name, self.module, self.constant) if self.constant else nullcontext():
            made = graphs.forward(inputs, step, backward, self.halves)
        if made is None or not self.memory:
            return made
        outputs, run = made
        return in_place.apart_from(self.memory, outputs), run

    def _run(self, inputs: Sequence[Any]) -> Any:
        if self.drawn_as_whole is not Draws.NOTHING:
            seed_whole(self.name, self.drawn_as_whole)
        args = inputs if self.template is None else filled(self.template, inputs)
        before = in_place.input_versions(inputs, self.seen) if self.seen else None
        if self.constant:
            with in_place.check_unchanged(self.name, self.module, self.constant):
                outputs = run_stage(self.name, self.module, args)
        else:
            outputs = run_stage(self.name, self.module, args)
        if before is not None:
            in_place.check_inputs(before, inputs, self.seen, self.name, self.module)
        return in_place.apart_from(self.memory, outputs) if self.memory else outputs


class SliceCaches:
    """The caches of one step on one worker: one for each call of a stage, and row of micro-batches with ``slices`` each.

    A cache is dropped with the backward of its first slice, which is the last of the row; or with the last forward, if
    forwards have no backwards.
    """

    def __init__(self, slices: int) -> None:
        self.slices = slices
        self._caches: dict[tuple[str, int], SliceCache] = {}
        # Stands for what a slice reads of earlier ones: it makes the half I of a backward give gradients to them.
        self._earlier = torch.zeros(0, requires_grad=True)

    def begin(
        self, call: StageCall, microbatch: int, inputs: tuple[Any, ...], args: Sequence[Any], step: int | None
    ) -> tuple[Any, Run]:
        """`StageCall.begin` for a slice."""
        row, number = divmod(microbatch, self.slices)
        with self._cache(call, row).running(number) as made:
            outputs, run = call.begin((*inputs, self._earlier), args, step)
        assert isinstance(run, AutogradRun)
        return outputs, SliceRun(run, made, (lambda: self._drop(call, row)) if number == 0 else None)

    def run(self, call: StageCall, microbatch: int, args: Sequence[Any], step: int | None) -> Any:
        """`StageCall.run` for a slice."""
        row, number = divmod(microbatch, self.slices)
        with self._cache(call, row).running(number):
            outputs = call.run(args, step)
        if number == self.slices - 1:
            self._drop(call, row)
        return outputs

    def of_row(self, calls: Iterable[str], microbatch: int) -> list[SliceCache]:
        """The caches of some calls, of the row of a micro-batch, as far as there are any."""
        keys = [(call, microbatch // self.slices) for call in calls]
        return [self._caches[key] for key in keys if key in self._caches]

    def _cache(self, call: StageCall, row: int) -> SliceCache:
        return self._caches.setdefault((call.name, row), SliceCache(self.slices))

    def _drop(self, call: StageCall, row: int) -> None:
        self._caches.pop((call.name, row), None)


class SliceRun:
    """A run of a slice: its backward begins with the gradients that later slices have given of what it has ``made``, too.

    ``ends`` is called after the backward of the last slice of a row to go backward.
    """

    def __init__(self, run: AutogradRun, made: Sequence[MadeForLater], ends: Callable[[], None] | None) -> None:
        self.run, self.made, self.ends = run, made, ends

    @property
    def held(self) -> Any:
        return self.run.held

    def backward(self, output_grads: Any) -> Sequence[Any]:
        return self._from_later(self.run.backward, output_grads)

    def backward_input(self, output_grads: Any) -> Sequence[Any]:
        return self._from_later(self.run.backward_input, output_grads)

    def backward_weight(self) -> None:
        self.run.backward_weight()

    def _from_later(self, backward: Callable[[Any], Sequence[Any]], output_grads: Any) -> Sequence[Any]:
        edges, gradients = roots(self.made)
        self.run.outputs, self.made = (self.run.outputs, *edges), ()
        found = backward((output_grads, *gradients))[:-1]
        if self.ends is not None:
            self.ends()
        return found
