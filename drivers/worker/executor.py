"""Runs a worker's part of a program, one step at a time, as `BoundProgram` has made it of the instructions; and what it does of
an exchange.

`BoundProgram` binds a worker's part of a program to what runs it, once for all steps: an instruction to its handler and
arguments.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from pippy.drivers.lowering.flow import Work
from pippy.drivers.plan.language.edges import Pass
from pippy.drivers.plan.language.instructions import (
    NOTES,
    Add,
    Compute,
    Free,
    Instruction,
    InstructionKey,
    Op,
    Payload,
    Receive,
    ReceiveExchanged,
    Reduce,
    Send,
    SendExchanged,
    own_value,
    sum_value,
)
from pippy.drivers.plan.language.program import computations_of, computes_until
from pippy.drivers.protocol.programs import AddProgram
from pippy.drivers.protocol.steps import StepResult
from pippy.drivers.wire.gpu.copies import DeviceCopies
from pippy.drivers.wire.transport import Transport
from pippy.drivers.worker import handlers
from pippy.drivers.worker.gradients.buffers import StepBuffers
from pippy.drivers.worker.gradients.single_loss import SingleLoss
from pippy.drivers.worker.measure.calls import BoundCall, Handle
from pippy.drivers.worker.measure.profiler import is_profiled, named, naming
from pippy.drivers.worker.measure.recorder import Recorder
from pippy.drivers.worker.stage_call import RepeatedForward, SliceCaches, StageCall
from pippy.drivers.worker.step_context import Key, StepContext, is_number
from pippy.ir.base.names import LOSS
from pippy.ir.base.trees import map_tensors
from pippy.ir.run.may_draw import Draws, stage_draws
from pippy.ir.run.random_state import DrawKey, RandomStep, set_draw_key

if TYPE_CHECKING:
    from pippy.drivers.worker.compiled.stage_graphs import GraphsOfStages


class BoundProgram:
    """A program on one worker: ``code`` has the handler of each of its instructions, and what that takes after the step.

    ``sums`` are the numbers of those that add up gradients. ``gathers`` says whether the loss is computed once over the whole
    mini-batch, on this worker. ``draws`` is what the stages draw from.
    """

    def __init__(
        self,
        program: AddProgram,
        modules: Mapping[str, nn.Module],
        constant: Mapping[str, Sequence[str]],
        device: torch.device,
        buffers: StepBuffers | None = None,
        graphs: "GraphsOfStages | None" = None,
    ) -> None:
        self.program = program
        computed = computations_of(program.order)
        self.backward = {key.stage for key in program.work if key.phase == "B"}  # a program may have more by hand
        self.again = {
            (each.stage, each.microbatch)
            for each in computed
            if each.op == Op.RECOMPUTE and each.stage in self.backward
        }
        stages = {each.call: key.stage for key, work in program.work.items() if key.phase == "F" for each in work}
        repeated = {call for call, stage in stages.items() if any(stage == each for each, _ in self.again)}
        with_backward = {each.call for key, work in program.work.items() if key.phase == "B" for each in work}
        halves = any(each.op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) for each in computed)
        own = _received_for_one_call(program)
        self.calls = {
            name: StageCall(
                call.name,
                modules[name],
                call.template,
                constant.get(name, ()),
                seen=call.seen,
                buffers=buffers,
                own=own,
                backward=name in with_backward,
                halves=halves,
                repeated=RepeatedForward(name, modules[name], device, stages[name]) if name in repeated else None,
                outside=self._outside(stages[name], name) if name in repeated else (),
                graphs=graphs.of(name, modules[name], call.template, program.graph) if graphs else None,
            )
            for name, call in program.calls.items()
        }
        self.draws = Draws.of(stage_draws(call.module) for call in self.calls.values())
        self.gathers = program.single_loss and LOSS in self.calls
        self.computes_until = computes_until(program.order)
        self.code: list[BoundCall] = []
        for self.at, instruction in enumerate(program.order):
            self.code.append(BINDERS[instruction.key](self, instruction))
        self.sums = [at for at, each in enumerate(program.order) if each.kind.adds_up]

    @cached_property
    def chosen(self) -> frozenset[str]:
        """The values that are chosen here, for the next run."""
        chosen = [work for key, work in self.program.work.items() if key.phase == "C"]
        return frozenset(name for work in chosen for each in work for name in each.gives if name)

    def _outside(self, stage: int, call: str) -> list[bool]:
        work = self.program.work[Pass("F", stage)]
        made = {name for each in work for name in each.gives}
        return [name not in made for each in work if each.call == call for name in each.takes]

    @cached_property
    def last_takers(self) -> dict[Key, int]:
        """The stage that takes an input of the model last on this worker, for each input and micro-batch."""
        forwards = {key.stage: work for key, work in self.program.work.items() if key.phase == "F"}
        made = {name for work in forwards.values() for each in work for name in each.gives}
        found: dict[Key, int] = {}
        for each in computations_of(self.program.order):
            if each.op == Op.FORWARD:
                names = [name for work in forwards.get(each.stage, ()) for name in work.takes]
                inputs = [name for name in names if name not in made and name not in self.program.value_numbers]
                found.update({(name, each.microbatch): each.stage for name in inputs})
        return found

    def rank(self, worker: int) -> int:
        """The worker of the cluster for one of the program."""
        return self.program.ranks[worker]

    def send(self, send: Send) -> BoundCall:
        number, ahead = self.program.value_numbers[send.value], len(self.program.share) * (send.value in self.chosen)
        return handlers.send, (own_value(send), self.rank(send.to), number, ahead)

    def receive(self, receive: Receive) -> BoundCall:
        return handlers.receive, (
            own_value(receive),
            self.rank(receive.source),
            self.program.value_numbers[receive.value],
        )

    def receive_gradients(self, receive: ReceiveExchanged) -> BoundCall:
        return handlers.receive_gradients, (receive.of, self.rank(receive.source), self.at > self.computes_until)

    def notes_of(self, worker: int) -> tuple[int, int]:
        """The key of the notes of a worker."""
        return self.program.value_numbers[NOTES], worker

    def forward(self, compute: Compute) -> BoundCall:
        stage, microbatch = compute.stage, compute.microbatch
        again = (stage, microbatch) in self.again
        work = self.program.work.get(Pass("F", stage), ())
        names = {name for each in work for name in each.takes}
        last = [name for name in names if self.last_takers.get((name, microbatch)) == stage]
        handle = handlers.forward_to_repeat if again else handlers.forward
        keeps = stage in self.backward and not again
        return self._pass(Pass("F", stage), microbatch, handle, handlers.gather, last, int(keeps), makes=True)

    def recompute(self, again: Compute) -> BoundCall:
        if again.stage not in self.backward:
            return handlers.nothing, ()
        work = self.program.work.get(Pass("F", again.stage), ())
        calls = [self._operands(each, again.microbatch) for each in work if not (self.gathers and each.call == LOSS)]
        bound = ((handlers.recompute, (calls,)),)
        return handlers.computation, (bound, again.microbatch, (), again.kind.live, True)

    def backward_pass(self, compute: Compute) -> BoundCall:
        handle, of_gathered = {
            Op.BACKWARD: (handlers.backward, handlers.backward_of_gathered),
            Op.BACKWARD_INPUT: (handlers.backward_input, handlers.backward_of_gathered),
            Op.BACKWARD_WEIGHT: (handlers.backward_weight, None),
        }[compute.op]
        key = Pass("B", compute.stage)
        return self._pass(key, compute.microbatch, handle, of_gathered, (), compute.kind.live, makes=False)

    def choose(self, compute: Compute) -> BoundCall:
        key = Pass("C", compute.stage)
        return self._pass(key, compute.microbatch, handlers.choose_tokens, None, (), compute.kind.live, makes=False)

    def _pass(
        self,
        key: Pass,
        microbatch: int,
        handle: Handle,
        of_gathered: Handle | None,
        last: Sequence[str],
        live: int,
        makes: bool,
    ) -> BoundCall:
        """``last`` are the inputs of the model that no later computation takes. ``of_gathered`` is what there is to do for a
        loss over the whole mini-batch, if anything."""
        work = self.program.work.get(key, ())
        given = [name for each in work for name in each.gives if name and name not in self.program.value_numbers]
        own = tuple((name, microbatch) for name in [*given, *last])
        by_call = [(of_gathered if self.gathers and each.call == LOSS else handle, each) for each in work]
        calls = tuple((do, self._operands(each, microbatch)) for do, each in by_call if do is not None)
        return handlers.computation, (calls, microbatch, own, live, makes)

    def _operands(self, work: Work, microbatch: int) -> tuple[Any, ...]:
        def keys(taken: Any) -> Any:
            if isinstance(taken, str):
                return taken, microbatch
            return tuple((name, microbatch) for name in taken) if isinstance(taken, tuple) else taken

        gives = tuple(name and (name, microbatch) for name in work.gives)
        return self.calls[work.call], microbatch, tuple(map(keys, work.takes)), gives


# What binds each kind of instruction, by its key in the table of instructions.
BINDERS: dict[InstructionKey, Callable[[BoundProgram, Any], BoundCall]] = {
    Op.FORWARD: BoundProgram.forward,
    Op.RECOMPUTE: BoundProgram.recompute,
    Op.BACKWARD: BoundProgram.backward_pass,
    Op.BACKWARD_INPUT: BoundProgram.backward_pass,
    Op.BACKWARD_WEIGHT: BoundProgram.backward_pass,
    Op.CHOOSE: BoundProgram.choose,
    Send: BoundProgram.send,
    Receive: BoundProgram.receive,
    Free: lambda bound, free: (handlers.free, (own_value(free),)),
    Add: lambda bound, add: (handlers.add, (own_value(add), sum_value(add))),
    Reduce: lambda bound, each: (handlers.add_up, (each.of,)),
    (SendExchanged, Payload.GRADIENTS): lambda bound, it: (handlers.send_gradients, (it.of, bound.rank(it.to))),
    (ReceiveExchanged, Payload.GRADIENTS): BoundProgram.receive_gradients,
    (SendExchanged, Payload.SUM): lambda bound, it: (handlers.send_sum, (it.of, bound.rank(it.to))),
    (ReceiveExchanged, Payload.SUM): lambda bound, it: (handlers.receive_sum, (it.of, bound.rank(it.source))),
    (SendExchanged, Payload.NOTES): lambda bound, it: (
        handlers.send_notes,
        (bound.rank(it.to), bound.notes_of(bound.program.worker)),
    ),
    (ReceiveExchanged, Payload.NOTES): lambda bound, it: (
        handlers.receive_notes,
        (bound.rank(it.source), bound.notes_of(it.source)),
    ),
}


def _received_for_one_call(program: AddProgram) -> frozenset[str]:
    """The values that other workers send and that one call takes, once. Nothing else uses their memory."""
    taken = Counter(
        name for key, work in program.work.items() if key.phase == "F" for each in work for name in each.takes
    )
    received = {each.value for each in program.order if isinstance(each, Receive)}
    return frozenset(name for name in received if taken[name] == 1)


class Watcher(Protocol):
    """What sees the instructions of a step run."""

    def watching(self, code: Sequence[BoundCall]) -> Sequence[BoundCall]:
        """The instructions, changed so that this sees them."""


class Running:
    """Instructions of one worker. ``at`` is the number of the one that runs now. ``ranks`` has the workers of the cluster."""

    def __init__(self, order: Sequence[Instruction], transport: Transport, ranks: Sequence[int] | None = None) -> None:
        self.order, self.transport, self.ranks, self.at = order, transport, ranks, 0

    def current(self) -> Instruction:
        """The instruction that runs now."""
        return self.order[self.at]

    def source(self) -> int | None:
        """The worker of the cluster that the instruction takes a value from."""
        if (source := self.current().kind.receives_from) is None:
            return None
        worker: int = source(self.current())
        return worker if self.ranks is None else self.ranks[worker]


class Executor(Running):
    """One program on one worker. ``run_of`` names the run. The step had ``earlier`` micro-batches, of other programs."""

    def __init__(
        self, bound: BoundProgram, transport: Transport, device: torch.device, copies: DeviceCopies | None = None
    ) -> None:
        super().__init__(bound.program.order, transport, bound.program.ranks)
        self.bound, self.program, self.code, self.draws = bound, bound.program, bound.code, bound.draws
        self.device, self.copies, self.run_of, self.earlier = device, copies, "", 0

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


def _packed(values: list[Any]) -> Any:
    """Numbers as one tensor. A message with one tensor for each of many micro-batches would be slow."""
    if all(map(is_number, values)):
        return torch.stack(values).cpu()
    return [value.result() if isinstance(value, Future) else map_tensors(torch.Tensor.cpu, value) for value in values]


class Passed(Protocol):
    """What is passed on: the values that an instruction moves, each with its number in the keys of messages."""

    def leaving(self, send: Instruction) -> Iterable[tuple[int, Any]]:
        """What a send moves."""

    def awaited(self, receive: Instruction) -> Iterable[int]:
        """The numbers of what a receive waits for."""

    def take(self, number: int, value: Any) -> None:
        """Take what another worker has sent."""


class ExchangeRun(Running):
    """A worker's instructions of one exchange."""

    def run(self, command: int, passed: Passed) -> None:
        """Run all instructions, in the command with this number."""
        order = self.order
        for self.at, each in enumerate(order):
            with named(each):
                if to := each.kind.sends_to:
                    for number, value in passed.leaving(each):
                        self.transport.send(to(each), (command, number, 0), value)
                elif source := each.kind.receives_from:
                    for number in passed.awaited(each):
                        passed.take(number, self.transport.receive((command, number, 0), source(each)))
