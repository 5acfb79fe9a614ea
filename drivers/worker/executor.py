"""Runs a worker's part of a program: a handler for each kind of instruction, and no scheduling.

When the program arrives, each instruction is bound to its handler and arguments. A step then goes through the list:

    F  forward   takes values, runs the stage, keeps the run (its inputs and outputs) for the backward
    R  recompute takes what a forward has kept instead of the run, its inputs, and runs the stage again: repeated_forward.py
    B  backward  takes the run and the gradients of its outputs, gives the gradients of its inputs
    I  the half  as B, but the gradients of the weights are put off
    W  the half  computes those
    send, receive, free      move and drop values, by name and micro-batch
    reduce stage             the gradients of a stage are whole, and those that others add up may leave
    reduce                   does nothing here: Gradients adds up when the step ends
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch
from torch import nn

from pippy.drivers.base.errors import PeerLost
from pippy.drivers.lowering.flow import Work
from pippy.drivers.plan.language.edges import Pass
from pippy.drivers.plan.language.instructions import (
    Compute,
    Free,
    Instruction,
    Op,
    Receive,
    Reduce,
    ReduceStage,
    Send,
)
from pippy.drivers.plan.language.instructions import Key as InstructionKey
from pippy.drivers.protocol.programs import AddProgram, InputIndex
from pippy.drivers.protocol.steps import StepResult
from pippy.drivers.wire.gpu.copies import DeviceCopies, HostCopy
from pippy.drivers.wire.received_values import Interrupted
from pippy.drivers.wire.transport import Transport
from pippy.drivers.worker.gradients.single_loss import SingleLoss
from pippy.drivers.worker.gradients.step_buffers import StepBuffers
from pippy.drivers.worker.halves.split_backward import DeferredGradients, WeightDeferral
from pippy.drivers.worker.measure.output_probe import OutputProbe
from pippy.drivers.worker.measure.recorder import Recorder
from pippy.drivers.worker.measure.saved_memory import SavedMemory
from pippy.drivers.worker.measure.witness import Witness
from pippy.ir.base.errors import StageError
from pippy.ir.base.names import LOSS
from pippy.ir.base.trees import describe, map_instances, map_tensors
from pippy.ir.batch_norm.step_statistics import StepStatistics
from pippy.ir.run.changing_tensors import apart_from, memory_of_layers
from pippy.ir.run.given_inputs import NamedInputs, check_versions, versions
from pippy.ir.run.keyed_draws import DrawKey, RandomStep, set_draw_key
from pippy.ir.run.may_draw import Draws
from pippy.ir.run.opaque_values import check_opaque_leaves
from pippy.ir.run.repeated_forward import Kept, RepeatedForward, cut
from pippy.ir.run.shared_tensors import check_unchanged
from pippy.ir.run.stage_backward import add_gradients, loss_inside, stage_backward, weighted
from pippy.ir.run.stage_draws import drawn_as_whole, seed_whole, stage_draws
from pippy.ir.run.stage_run import StageRun, as_leaf, run_backward, run_stage

OwnRows = Callable[[Any, int], Any]
Handle = Callable[..., None]
_PUT_OFF = StageRun((), ())  # the half W has neither inputs nor outputs
Key = tuple[str, int]  # a value, by its name and micro-batch


@dataclass(frozen=True)
class StageCall:
    """A stage that can be run: its module, how the graph calls it, and which of its tensors and inputs must not change."""

    name: str
    module: nn.Module
    template: Any
    constant: Sequence[str]
    seen: NamedInputs = ()
    buffers: StepBuffers | None = None

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
        before = versions(inputs, self.seen) if self.seen else ()
        if self.constant:
            with check_unchanged(self.name, self.module, self.constant):
                outputs = run_stage(self.name, self.module, args)
        else:
            outputs = run_stage(self.name, self.module, args)
        if before:
            check_versions(before, inputs, self.seen, self.name, self.module)
        return apart_from(self.memory, outputs) if self.memory else outputs


def filled(template: Any, inputs: Sequence[Any]) -> Any:
    """A template with the inputs in their places.

    >>> filled((InputIndex(1), [InputIndex(0), "x"]), inputs=["a", "b"])
    ('b', ['a', 'x'])
    """
    return map_instances(InputIndex, lambda each: inputs[each.index], template)


class Executor:
    """One program on one worker."""

    def __init__(
        self,
        program: AddProgram,
        modules: Mapping[str, nn.Module],
        constant: Mapping[str, Sequence[str]],
        transport: Transport,
        device: torch.device,
        statistics: StepStatistics | None = None,
        copies: DeviceCopies | None = None,
        buffers: StepBuffers | None = None,
    ) -> None:
        self.program, self.transport, self.device, self.statistics = program, transport, device, statistics
        self.copies, self.takes_inputs_up = copies, copies is not None or device.type != "cpu"
        self.calls = {
            name: StageCall(name, modules[name], call.template, constant.get(name, ()), call.seen, buffers)
            for name, call in program.calls.items()
        }
        self.halves = any(
            isinstance(each, Compute) and each.op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) for each in program.order
        )
        self.with_backward = {each.call for key, work in program.work.items() if key.phase == "B" for each in work}
        with_backward = {key.stage for key in program.work if key.phase == "B"}  # a program may have more by hand
        again = [
            each
            for each in program.order
            if isinstance(each, Compute) and each.op == Op.RECOMPUTE and each.stage in with_backward
        ]
        self.repeated = {
            each.call: RepeatedForward(each.call, modules[each.call], device, stage)
            for stage in {each.stage for each in again}
            for each in program.work.get(Pass("F", stage), ())
        }
        self.again = frozenset(
            (call, each.microbatch)
            for each in again
            for call, repeated in self.repeated.items()
            if repeated.stage == each.stage
        )
        self.outside = {
            each.call: [name not in [made for other in work for made in other.gives] for name in each.takes]
            for key, work in program.work.items()
            for each in work
            if key.phase == "F" and each.call in self.repeated
        }
        self.ours = _received_for_one_call(program)
        self.draws = Draws.of(stage_draws(call.module) for call in self.calls.values())
        self.single = SingleLoss(self.calls[LOSS]) if program.single_loss and LOSS in self.calls else None
        self.at = 0
        self.step = 0
        self.code = [self._bound(instruction) for instruction in program.order]
        self._clear()

    def _clear(self) -> None:
        self.values: dict[Key, Any] = {}
        self.runs: dict[tuple[str, int], StageRun] = {}
        self.deferred: dict[tuple[str, int], DeferredGradients] = {}
        self.kept: dict[tuple[str, int], Kept] = {}
        self.returned: dict[str, list[Any]] = {}
        self.live = self.peak_live = 0

    def run(
        self,
        step: int,
        inputs: Mapping[str, Sequence[Any]],
        weights: Sequence[float],
        trains: bool,
        given_up: Callable[[], bool] = lambda: False,
        own_rows: OwnRows | None = None,
        record: bool = False,
        weigh: bool = False,
        returns: Mapping[str, Any] | None = None,
        output_probe: OutputProbe | None = None,
        random: RandomStep | None = None,
        stage_is_through: Callable[[Sequence[str]], None] = lambda calls: None,
        see: bool = False,
    ) -> StepResult:
        """Run all instructions once, or until the step is given up.

        ``own_rows`` takes a micro-batch's rows from the inputs of the loss, if each of those is the whole mini-batch. With
        ``record``, the times of the instructions are noted; with ``weigh``, the bytes that stages keep are measured. An
        ``output_probe`` sees what returned values are.
        ``returns`` are the values to return, if not those of the program, each with the place of the loss if only that is
        wanted. ``random`` says of which step the random numbers are. ``stage_is_through`` is called with the calls of a stage
        of replicas when its last backward is over. With ``see``, it is noted what each call takes and gives.
        """
        self.stage_is_through, self.given_up = stage_is_through, given_up
        self.own_rows, self.output_probe = own_rows, output_probe
        self.step, self.weights, self.trains = step, weights, trains
        self.casts = torch._C._is_any_autocast_enabled()
        self.draw_keys = self._draw_keys(random, len(weights))
        self.seeds = dict.fromkeys(self.program.returns) if returns is None else returns
        self.returned = {name: [None] * len(self.program.share) for name in self.seeds}
        self.given = inputs.keys()
        for name, microbatches in inputs.items():
            for microbatch, value in zip(self.program.share, microbatches, strict=True):
                self.values[name, microbatch] = value
        code = self.recorder.timed(self.values) if record else self.code
        code = self.saved_memory.measured(code) if weigh else code
        witness = (
            Witness(self.values, self._forward, (self._backward, self._backward_input), self._given) if see else None
        )
        code = code if witness is None else witness.watching(code)
        try:
            with torch.set_grad_enabled(trains):
                self._go_through(code)
            if self.single is not None:
                set_draw_key(self.draw_keys.get(None))
                self.returned[LOSS] = [self.single.loss()]
            returned = {name: _packed(values) for name, values in self.returned.items()}
            kept = dict(self.saved_memory.kept) if weigh else None
            by_chance = () if output_probe is None else tuple(output_probe.by_chance)
            seen = () if witness is None else tuple(witness.seen)
            return StepResult(returned, self.peak_live, None, kept, by_chance=by_chance, seen=seen)
        finally:
            set_draw_key(None)
            self._clear()
            if self.single is not None:
                self.single.clear()

    def _draw_keys(self, random: RandomStep | None, chunks: int) -> dict[int | None, DrawKey]:
        """What the random numbers of each micro-batch are drawn with, and those of the mini-batch; none if nothing draws."""
        if random is None or self.draws is Draws.NOTHING:
            return {}
        return random.keys(chunks, self.device)

    def _go_through(self, code: Sequence[tuple[Handle, tuple[Any, ...]]]) -> None:
        for self.at, (handle, operands) in enumerate(code):
            handle(*operands)

    @cached_property
    def recorder(self) -> Recorder:
        """Notes the times of instructions, in the steps that are recorded."""
        return Recorder(self.program.order, self.code, self.program.ranks, self.transport, self.device, self.copies)

    @cached_property
    def saved_memory(self) -> SavedMemory:
        """Measures the bytes that stages keep for their backwards, in the steps that ask for it."""
        modules = {name: call.module for name, call in self.calls.items()}
        return SavedMemory(self.program.order, modules, lambda: self.runs)

    @cached_property
    def last_takers(self) -> dict[Key, int]:
        """The stage that takes an input of the model last on this worker, for each input and micro-batch."""
        forwards = {key.stage: work for key, work in self.program.work.items() if key.phase == "F"}
        made = {name for work in forwards.values() for each in work for name in each.gives}
        found: dict[Key, int] = {}
        for each in self.program.order:
            if isinstance(each, Compute) and each.op == Op.FORWARD:
                names = [name for work in forwards.get(each.stage, ()) for name in work.takes]
                inputs = [name for name in names if name not in made and name not in self.program.value_numbers]
                found.update({(name, each.microbatch): each.stage for name in inputs})
        return found

    def current(self) -> Instruction:
        """The instruction that runs now."""
        return self.program.order[self.at]

    def _here(self, value: Any) -> Any:
        if self.copies is not None:
            return self.copies.to_device(value)
        return map_tensors(lambda tensor: tensor.to(self.device), value)

    def _leaves_device(self, value: Any) -> Any:
        """Outputs do not wait on the device for the end of the step. Numbers do: they are fetched in one piece."""
        if self.copies is None:
            return map_tensors(_off_the_device, value)
        return value if _is_number(value) else self.copies.to_host(value)

    def _bound(self, instruction: Instruction) -> tuple[Handle, tuple[Any, ...]]:
        return BINDERS[instruction.key](self, instruction)

    def _bound_send(self, send: Send) -> tuple[Handle, tuple[Any, ...]]:
        number, rank = self.program.value_numbers[send.value], self.program.ranks[send.to]
        return self._send, ((send.value, send.microbatch), rank, number, send.microbatch)

    def _bound_receive(self, receive: Receive) -> tuple[Handle, tuple[Any, ...]]:
        number, rank = self.program.value_numbers[receive.value], self.program.ranks[receive.source]
        return self._receive, ((receive.value, receive.microbatch), rank, number, receive.microbatch)

    def _bound_free(self, free: Free) -> tuple[Handle, tuple[Any, ...]]:
        return self._free, ((free.value, free.microbatch),)

    def _bound_reduce_stage(self, each: ReduceStage) -> tuple[Handle, tuple[Any, ...]]:
        return self._reduce_stage, ([work.call for work in self.program.work.get(Pass("F", each.stage), ())],)

    def _bound_reduce(self, each: Reduce) -> tuple[Handle, tuple[Any, ...]]:
        """Gradients are added up when the step ends, in the same order on all workers."""
        return _nothing, ()

    def _bound_recompute(self, again: Compute) -> tuple[Handle, tuple[Any, ...]]:
        if Pass("B", again.stage) not in self.program.work:
            return _nothing, ()
        bound = (self._operands_of(Pass("F", again.stage), again.microbatch),)
        return self._computation, (self._recompute, again.microbatch, bound, (), again.kind.live, True)

    def _bound_forward(self, compute: Compute) -> tuple[Handle, tuple[Any, ...]]:
        stage, microbatch = compute.stage, compute.microbatch
        work = self.program.work.get(Pass("F", stage), ())
        names = {name for each in work for name in each.takes}
        last = [name for name in names if self.last_takers.get((name, microbatch)) == stage]
        keeps = Pass("B", stage) in self.program.work and (work[0].call, microbatch) not in self.again
        return self._bound_pass(self._forward, Pass("F", stage), microbatch, last, int(keeps), makes=True)

    def _bound_backward(self, compute: Compute) -> tuple[Handle, tuple[Any, ...]]:
        handle = {
            Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUT: self._backward_input,
            Op.BACKWARD_WEIGHT: self._backward_weight,
        }[compute.op]
        return self._bound_pass(
            handle, Pass("B", compute.stage), compute.microbatch, [], compute.kind.live, makes=False
        )

    def _bound_pass(
        self, handle: Handle, key: Pass, microbatch: int, last: Sequence[str], live: int, makes: bool
    ) -> tuple[Handle, tuple[Any, ...]]:
        """``last`` are the inputs of the model that no later computation takes."""
        work = self.program.work.get(key, ())
        given = [name for each in work for name in each.gives if name and name not in self.program.value_numbers]
        own = tuple((name, microbatch) for name in [*given, *last])
        return self._computation, (handle, microbatch, self._operands_of(key, microbatch), own, live, makes)

    def _operands_of(self, key: Pass, microbatch: int) -> tuple[Any, ...]:
        return tuple(self._operands(each, microbatch) for each in self.program.work.get(key, ()))

    def _operands(self, work: Work, microbatch: int) -> tuple[Any, ...]:
        def keys(taken: Any) -> Any:
            if isinstance(taken, str):
                return taken, microbatch
            return tuple((name, microbatch) for name in taken) if isinstance(taken, tuple) else taken

        gives = tuple(name and (name, microbatch) for name in work.gives)
        return self.calls[work.call], microbatch, tuple(map(keys, work.takes)), gives

    def _computation(
        self,
        handle: Handle,
        microbatch: int,
        bound: Sequence[tuple[Any, ...]],
        own: Sequence[Key],
        live: int,
        makes: bool,
    ) -> None:
        """Run the calls of a computation, unless the step was given up.

        ``own`` are the values that no later one takes and that no instruction frees. A computation that ``makes`` something to
        keep is alive while it runs, and ``live`` is by how many there are more after it.
        """
        if self.given_up():
            raise Interrupted
        if makes and self.live >= self.peak_live:
            self.peak_live = self.live + 1
        if self.casts:
            torch.clear_autocast_cache()  # a weight is cast once in a computation, and never kept beyond an update
        if self.statistics is not None:
            self.statistics.microbatch = microbatch
        if self.draw_keys:
            set_draw_key(self.draw_keys[microbatch])
        for operands in bound:
            handle(*operands)
        for key in own:
            self.values.pop(key, None)
        self.live += live

    def _forward(self, call: StageCall, microbatch: int, takes: Sequence[Key], gives: Sequence[Key]) -> None:
        values = self.values
        if self.takes_inputs_up:  # inputs of the model: all at once would take as much memory as the mini-batch
            for key in takes:
                if key[0] in self.given:
                    values[key] = self._here(values[key])
        inputs = tuple([self._as_leaf(key) if self.trains else values[key] for key in takes])
        args = self._args(call, microbatch, inputs)
        if self.single is not None and call.name == LOSS:
            self.single.gather(microbatch, inputs)
            return
        if self.again and (call.name, microbatch) in self.again:
            outputs = self._run_keeping_inputs(call, microbatch, inputs)
        elif not self.trains or call.name not in self.with_backward:
            outputs = call.run(args)
        else:
            outputs = self._run(call, microbatch, inputs, args)
        for key, value in zip(gives, (outputs,) if len(gives) == 1 else outputs, strict=True):
            values[key] = value
            if self.returned and key[0] in self.returned:
                seed = self.seeds[key[0]]
                kept = map_tensors(_detached, value if seed is None else loss_inside(seed, value))
                self.returned[key[0]][microbatch - self.program.share.start] = (
                    kept if self.trains else self._leaves_device(kept)
                )
        if self.output_probe is not None and microbatch == 0 and call.name != LOSS:
            given = {key[0]: values[key] for key in gives}
            self.output_probe.see(call, [key[0] for key in takes], args, given, self.returned)

    def _as_leaf(self, key: Key) -> Any:
        """A value as a leaf of this call's own; what was sent for this call alone is one already."""
        value = self.values[key]
        return value if key[0] in self.ours and type(value) is torch.Tensor and value.is_leaf else as_leaf(value)

    def _run(self, call: StageCall, microbatch: int, inputs: tuple[Any, ...], args: Sequence[Any]) -> Any:
        """Run a stage, and keep the run for its backward."""
        key = (call.name, microbatch)
        if self.halves:
            with call.deferral.recording(inputs) as self.deferred[key]:
                outputs = call.run(args)
        else:
            outputs = call.run(args)
        self.runs[key] = StageRun(outputs, inputs)
        return outputs

    def _args(self, call: StageCall, microbatch: int, inputs: tuple[Any, ...]) -> Sequence[Any]:
        if call.name == LOSS and self.own_rows is not None:
            return tuple(self.own_rows(value, microbatch) for value in inputs)
        return inputs

    def _run_keeping_inputs(self, call: StageCall, microbatch: int, inputs: tuple[Any, ...]) -> Any:
        """Run a stage that is run again for its backward, and keep its inputs only."""
        key = (call.name, microbatch)
        outputs, kept = self.repeated[call.name].first(
            inputs,
            self.outside[call.name],
            lambda leaves: self._run(call, microbatch, leaves, self._args(call, microbatch, leaves)),
        )
        if kept is None:
            return outputs
        self.kept[key] = kept
        del self.runs[key]
        self.deferred.pop(key, None)
        return cut(outputs)

    def _recompute(self, *calls: tuple[StageCall, int, Sequence[Key], Sequence[Key]]) -> None:
        """Run the calls of a forward again, for their backwards. What they give goes nowhere else."""
        made: dict[Key, Any] = {}
        for call, microbatch, takes, gives in calls:
            if self.single is not None and call.name == LOSS:
                continue
            kept = self.kept.pop((call.name, microbatch), None)
            if kept is None:
                outputs = self.runs[call.name, microbatch].outputs
            else:
                outputs = self.repeated[call.name].again(
                    kept,
                    [made.get(key) for key in takes],
                    lambda leaves: self._run(call, microbatch, leaves, self._args(call, microbatch, leaves)),  # noqa: B023
                )
            made.update(zip(gives, [outputs] if len(gives) == 1 else outputs, strict=True))

    def _given(self, takes: Sequence[Any], microbatch: int) -> Any:
        """The gradients of a call's outputs: the sum over the uses of each output, or the weight of the loss."""
        if len(takes) == 1 and type(takes[0]) is tuple and len(takes[0]) == 1:  # most often
            return self.values[takes[0][0]]
        totals = [
            reduce(add_gradients, [self.values[key] for key in each], None)
            if isinstance(each, tuple)
            else weighted(each, self.weights[microbatch])
            for each in takes
        ]
        return totals if len(totals) > 1 else totals[0]

    def _backward(self, call: StageCall, microbatch: int, takes: Sequence[Any], gives: Sequence[Key | None]) -> None:
        if self.single is not None and call.name == LOSS:
            set_draw_key(self.draw_keys.get(None))
            gradients: Sequence[Any] = self.single.backward(microbatch, self.weights[microbatch])
        else:
            run, deferred = self.runs.pop((call.name, microbatch)), self.deferred.pop((call.name, microbatch), None)
            backward = stage_backward if deferred is None else deferred.backward_input
            gradients = run_backward(call.name, call.module, run, self._given(takes, microbatch), backward)
            if deferred is not None:
                deferred.run()
        self._give(gives, gradients)

    def _give(self, gives: Sequence[Key | None], gradients: Sequence[Any]) -> None:
        for key, gradient in zip(gives, gradients, strict=True):
            if key is not None:
                self.values[key] = gradient

    def _backward_input(
        self, call: StageCall, microbatch: int, takes: Sequence[Any], gives: Sequence[Key | None]
    ) -> None:
        if self.single is not None and call.name == LOSS:
            self._backward(call, microbatch, takes, gives)
            return
        run, deferred = self.runs.pop((call.name, microbatch)), self.deferred[call.name, microbatch]
        given = self._given(takes, microbatch)
        self._give(gives, run_backward(call.name, call.module, run, given, deferred.backward_input))

    def _backward_weight(
        self, call: StageCall, microbatch: int, takes: Sequence[Any], gives: Sequence[Key | None]
    ) -> None:
        if self.single is None or call.name != LOSS:
            deferred = self.deferred.pop((call.name, microbatch))
            run_backward(call.name, call.module, _PUT_OFF, None, lambda *_: _weights(deferred))

    def _send(self, key: Key, to: int, number: int, microbatch: int) -> None:
        value = self.values[key]
        if self.trains and type(value) is not torch.Tensor:
            check_opaque_leaves(value)
        try:
            self.transport.send(to, (self.step, number, microbatch), value)
        except StageError:  # of a value that was to leave the device before
            raise
        except Exception as error:
            what = f"{key[0]} of micro-batch {microbatch}, {describe(self.values[key])}"
            raise StageError(f"{what}, could not be sent to worker {to}: {type(error).__name__}: {error}") from error

    def _receive(self, key: Key, source: int, number: int, microbatch: int) -> None:
        try:
            self.values[key] = self.transport.receive((self.step, number, microbatch), source)
        except (Interrupted, PeerLost, StageError):
            raise
        except Exception as error:
            what = f"{key[0]} of micro-batch {microbatch}, from worker {source}"
            raise StageError(f"{what}, could not be read: {type(error).__name__}: {error}") from error

    def _reduce_stage(self, calls: Sequence[str]) -> None:
        if self.given_up():
            raise Interrupted
        self.stage_is_through(calls)

    def _free(self, key: Key) -> None:
        del self.values[key]


# What binds each kind of instruction to its handler and arguments, by its key in the table of instructions.
BINDERS: dict[InstructionKey, Callable[[Executor, Any], tuple[Handle, tuple[Any, ...]]]] = {
    Op.FORWARD: Executor._bound_forward,
    Op.RECOMPUTE: Executor._bound_recompute,
    Op.BACKWARD: Executor._bound_backward,
    Op.BACKWARD_INPUT: Executor._bound_backward,
    Op.BACKWARD_WEIGHT: Executor._bound_backward,
    Send: Executor._bound_send,
    Receive: Executor._bound_receive,
    Free: Executor._bound_free,
    ReduceStage: Executor._bound_reduce_stage,
    Reduce: Executor._bound_reduce,
}


def _received_for_one_call(program: AddProgram) -> frozenset[str]:
    """The values that come from other workers, so that nothing else has their memory, and that one call takes, once."""
    taken = Counter(
        name for key, work in program.work.items() if key.phase == "F" for each in work for name in each.takes
    )
    received = {each.value for each in program.order if isinstance(each, Receive)}
    return frozenset(name for name in received if taken[name] == 1)


def _weights(deferred: DeferredGradients) -> tuple[Any, ...]:
    deferred.run()
    return ()


def _nothing() -> None:
    pass


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()


def _off_the_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu() if tensor.dim() else tensor


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _packed(values: list[Any]) -> Any:
    """Numbers as one tensor. A message with one tensor for each of many micro-batches would be slow."""
    if all(map(_is_number, values)):
        return torch.stack(values).cpu()
    return [value.wait() if type(value) is HostCopy else map_tensors(torch.Tensor.cpu, value) for value in values]
