"""What each worker holds while a program runs, in bytes: by kind at its peak, and over time.

The sizes are given, for each stage and for each value that stages pass to each other. Then the instructions of each worker are
gone through in order:

    receive   a value is there                                        free   it is not, unless a run of a stage has it
    F         its outputs are there, and for its backward a run: the inputs, and what autograd keeps, which may be outputs
              computed again later, only the inputs
    add       one value less is there; while it runs, the sum is there beside what is added
    R         a run is there
    B, I      the run is gone; the gradients of its inputs are there, and those of the stage's parameters, which stay
    W         what was held between I and W is gone: what autograd keeps, and values

While a computation runs, it may hold more than before and after it: that is its ``working`` memory. A value that several
runs have, such as the output of one stage that is the input of another on the same worker, counts once.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from pippy.drivers.plan.language.edges import Pass
from pippy.drivers.plan.language.instructions import (
    Add,
    Compute,
    Instruction,
    MicrobatchValue,
    Op,
    Payload,
    ReceiveExchanged,
    Reduce,
    SendExchanged,
)
from pippy.drivers.plan.language.program import Program, computations_of, computes_until
from pippy.drivers.plan.passes.communicate import add_communication


@dataclass(frozen=True)
class StageBytes:
    """The bytes of one stage. Those of micro-batches are for one of them, the largest.

    | field | |
    |---|---|
    | parameters | its parameters and buffers |
    | gradients | of its parameters: they appear in its first backward, and stay |
    | optimizer | the state of its optimizer |
    | kept | what a backward needs, apart from the values that the stage takes and gives |
    | kept_outputs, freed_inputs | the values that the stage gives and its backward needs; the inputs that it does not need |
    | repeating | what a forward that is computed again keeps of the state before it, beside its inputs |
    | deferred | what is held between the halves I and W, apart from values |
    | deferred_inputs, deferred_values | the values that are held between them: inputs of the stage, and others that it takes \
or gives |
    | early_gradients | those of ``gradients`` that the half I makes |
    | results | what it returns to the controller: held until the step ends |
    | keys, key_gradients | what the forward, and the backward, of a slice of a sequence make for other slices: held until the \
last backward of the row |
    | forward, backward, ... | the most that this computation needs at a time, above what is held when it begins; \
``first_...`` is where gradients appear |

    >>> StageBytes(parameters=80, gradients=80).persistent
    80
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    kept: int = 0
    kept_outputs: frozenset[str] = frozenset()
    freed_inputs: frozenset[str] = frozenset()
    repeating: int = 0
    deferred: int = 0
    deferred_inputs: frozenset[str] = frozenset()
    deferred_values: frozenset[str] = frozenset()
    early_gradients: int = 0
    results: int = 0
    keys: int = 0
    key_gradients: int = 0
    forward: int = 0
    backward: int = 0
    first_backward: int = 0
    backward_input: int = 0
    first_input: int = 0
    backward_weight: int = 0
    first_weight: int = 0

    @property
    def persistent(self) -> int:
        """What is held between steps, once gradients are dropped."""
        return self.parameters + self.optimizer

    @property
    def activations(self) -> "StageBytes":
        """The same of what micro-batches take: gradients of parameters are as if they were there."""
        nothing = {"parameters": 0, "gradients": 0, "early_gradients": 0, "optimizer": 0}
        later = {
            "first_backward": self.backward,
            "first_input": self.backward_input,
            "first_weight": self.backward_weight,
        }
        return StageBytes(**{**vars(self), **nothing, **later})


@dataclass(frozen=True)
class ModelInput:
    """An input of the model: its bytes in the largest micro-batch and in all of them, and the stages that take it."""

    name: str
    bytes: int
    total: int
    stages: tuple[int, ...]


@dataclass(frozen=True)
class PipeBytes:
    """The bytes of all stages, and of what passes between them: what `held_bytes` needs to know of a Pipe.

    ``values`` are the values that stages pass to each other, by the names of the program's edges; one that is missing counts
    nothing. ``copied`` are those that have gaps or another order in memory, so that a stage on the same worker takes a copy.
    ``owned`` are those that are, where they are made, a part of something that is counted already: a parameter, or an
    input of the stage. ``inputs_stay`` says that the inputs of the model are held until the step ends, as on the CPU, where
    micro-batches are views; on another device they are copies, made for the first forward that takes one, and each goes with
    its last use. ``replicated`` are the parameters that several stages have a copy of. ``divided`` has, for each worker, the
    state of optimizers whose state is divided among replicas, which is no part of the stages'. ``slices`` has the same for each
    slice of a sequence, where slices are micro-batches; all else is for the last one.
    """

    stages: tuple[StageBytes, ...]
    values: Mapping[str, int] = field(default_factory=dict)
    owned: frozenset[str] = frozenset()
    copied: frozenset[str] = frozenset()
    inputs: tuple[ModelInput, ...] = ()
    inputs_stay: bool = True
    replicated: Mapping[str, int] = field(default_factory=dict)
    divided: Mapping[int, int] = field(default_factory=dict)
    slices: tuple["PipeBytes", ...] = ()

    @cached_property
    def activations(self) -> "PipeBytes":
        """The same of what micro-batches take: without parameters, gradients of parameters, and states of optimizers.

        >>> sizes = PipeBytes((StageBytes(parameters=80, gradients=80, kept=10, backward=5, first_backward=85),))
        >>> sizes.activations == PipeBytes((StageBytes(kept=10, backward=5, first_backward=5),))
        True
        """
        stages, slices = (each.activations for each in self.stages), (each.activations for each in self.slices)
        return replace(self, stages=tuple(stages), replicated={}, divided={}, slices=tuple(slices))

    def of_slice(self, number: int) -> "PipeBytes":
        """The same for one slice."""
        return self.slices[number] if self.slices else self


class Held(NamedTuple):
    """The bytes that a worker holds at a time, by kind.

    ``kept`` are what backwards need of micro-batches whose forward has run, ``inputs`` those of the model and of stages,
    ``values`` those that wait to be taken, or to be returned. ``working`` is what the computation that runs needs.

    >>> Held(parameters=8, kept=4).total
    12
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    kept: int = 0
    inputs: int = 0
    values: int = 0
    working: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return sum(self)


@dataclass(frozen=True)
class HeldBytes:
    """What one worker holds while a program runs.

    ``peak`` is the most, by kind, and ``at`` the number of the instruction that runs then. ``most`` has the most that is held
    while each instruction runs, and ``after`` what is held when it is done; both end with what the end of the step takes.
    """

    peak: Held
    at: int
    most: tuple[int, ...]
    after: tuple[int, ...]


def held_bytes(program: Program, sizes: PipeBytes) -> tuple[HeldBytes, ...]:
    """What each worker holds while a program runs. A program that is not lowered is, first.

    >>> from pippy.drivers.plan import make_schedule
    >>> program = make_schedule("1f1b", workers=2, chunks=4)
    >>> sizes = PipeBytes((StageBytes(kept=10), StageBytes(kept=100)), values={"activation_0": 1})
    >>> [worker.peak.total for worker in held_bytes(program, sizes)]
    [21, 101]
    >>> again = make_schedule("1f1b", workers=2, chunks=4, checkpoint="always")
    >>> [worker.peak.total for worker in held_bytes(again, sizes)]
    [10, 101]
    """
    lowered = lowered_program(program)
    return tuple(_Walk(lowered, sizes, worker).run() for worker in range(lowered.workers))


def lowered_program(program: Program) -> Program:
    """The program with its communication, which `held_bytes` counts with."""
    return program if program.lowered else add_communication(program)


def peak_bytes(program: Program, sizes: PipeBytes) -> tuple[int, ...]:
    """The most bytes that each worker holds."""
    return tuple(worker.peak.total for worker in held_bytes(program, sizes))


class _Values:
    """The values that a worker holds, and who has each of them: runs as an input or output, or the table of values."""

    def __init__(self) -> None:
        self.holders: dict[MicrobatchValue, list[int]] = {}
        self.totals = [0, 0, 0]  # of the values that count as inputs, as kept, and as waiting

    def change(self, key: MicrobatchValue, holder: int, by: int, size: int) -> None:
        holders = self.holders.setdefault(key, [0, 0, 0])
        before = self._kind(holders)
        holders[holder] += by
        after = self._kind(holders)
        if before != after:
            if before is not None:
                self.totals[before] -= size
            if after is not None:
                self.totals[after] += size
        if after is None:
            del self.holders[key]

    def has(self, key: MicrobatchValue) -> bool:
        return key in self.holders

    @staticmethod
    def _kind(holders: Sequence[int]) -> int | None:
        return next((kind for kind, count in enumerate(holders) if count > 0), None)


_INPUT, _OUTPUT, _WAITING = range(3)
_COPY = " copied"  # behind the name of a value: the copy of it that a stage takes
_SUM = " added up"  # the sum that has this name; the stage that made the first summand may still hold that


class _Walk:
    """One walk over the instructions of a worker."""

    def __init__(self, program: Program, sizes: PipeBytes, worker: int) -> None:
        self.program, self.sizes, self.worker = program, sizes, worker
        self.order = program.orders[worker]
        self.own = program.stages_of(worker)
        self.share = len(program.shares[worker // program.placement.workers])
        self.takes, self.gives = (
            defaultdict(list, {done: [edge.value for edge in edges] for done, edges in by_pass.items()})
            for by_pass in (program.takes, program.gives)
        )
        here = {edge.value for edge in program.flow if edge.source.stage in self.own}
        self.free_of_charge, self.copied = sizes.owned & here, sizes.copied & here
        self.inputs = {each.name: each for each in sizes.inputs if any(stage in self.own for stage in each.stages)}
        self.last_takers = self._last_takers()
        self.values = _Values()
        self.added: set[MicrobatchValue] = set()  # the values that are sums
        self.kept = self.results = self.gradients = 0
        self.with_gradients: set[tuple[int, bool]] = set()  # stages, and whether all of their gradients are there
        stages = [sizes.stages[stage] for stage in self.own]
        self.sums = {each.name: each for each in program.sums}
        self.arrived: dict[str, int] = defaultdict(int)  # the bytes of others' gradients that wait to be added, by sum
        self.computes_until = computes_until(self.order)
        self.computes = True
        self.parameters = sum(each.parameters for each in stages)
        self.optimizer = sum(each.optimizer for each in stages) + sizes.divided.get(worker, 0)

    def _last_takers(self) -> dict[MicrobatchValue, Instruction]:
        takers: dict[MicrobatchValue, Instruction] = {}
        for each in computations_of(self.order):
            if each.op == Op.FORWARD:
                for value in self.inputs.values():
                    if each.stage in value.stages:
                        takers[value.name, each.microbatch] = each
        return takers

    def run(self) -> HeldBytes:
        most, after, peak, at = [], [], self._held(0), 0
        for index, instruction in enumerate(chain(self.order, [None])):
            before = self._held(self._working(instruction) if instruction else 0)
            self.computes = index <= self.computes_until
            if instruction is not None:
                self._apply(instruction)
            held = self._held(0)
            largest = max(before, held, key=lambda each: each.total)
            if largest.total > peak.total:
                peak, at = largest, index
            most.append(largest.total)
            after.append(held.total)
        return HeldBytes(peak, at, tuple(most), tuple(after))

    def _held(self, working: int) -> Held:
        inputs, outputs, waiting = self.values.totals
        if self.sizes.inputs_stay:
            inputs += sum(each.total for each in self.inputs.values()) * self.share // self.program.chunks
        kept, values = self.kept + outputs, waiting + self.results
        working += sum(self.arrived.values())
        return Held(self.parameters, self.gradients, self.optimizer, kept, inputs, values, working)

    def _of(self, microbatch: int) -> PipeBytes:
        return self.sizes.of_slice(self.program.slice_of(microbatch))

    def _of_stage(self, compute: Compute) -> StageBytes:
        return self._of(compute.microbatch).stages[compute.stage]

    def _size(self, name: str, microbatch: int) -> int:
        sizes = self._of(microbatch)
        if name in self.inputs:
            return 0 if sizes.inputs_stay else next(each.bytes for each in sizes.inputs if each.name == name)
        if name.endswith(_SUM):
            return max(sizes.values.get(each, 0) for each in self.program.summands[name.removesuffix(_SUM)])
        return 0 if name in self.free_of_charge else sizes.values.get(name.removesuffix(_COPY), 0)

    def _change(self, key: MicrobatchValue, holder: int, by: int) -> None:
        self.values.change(key, holder, by, self._size(*key))

    def _working(self, instruction: Instruction) -> int:
        """The most that an instruction needs at a time, above what is held when it begins."""
        if isinstance(instruction, ReceiveExchanged) and instruction.payload == Payload.GRADIENTS:
            return self._bytes_of_sum(instruction, instruction.source)
        if isinstance(instruction, Add):
            return self._size(instruction.into + _SUM, instruction.microbatch)
        if not isinstance(instruction, Compute):
            return 0
        sizes, op, microbatch = self._of_stage(instruction), instruction.op, instruction.microbatch
        if op == Op.FORWARD:
            arriving = self._arriving(instruction.stage, microbatch)
            return sizes.forward + sum(self._size(name, microbatch) for name in arriving)
        if op == Op.RECOMPUTE:
            return sizes.forward - sizes.keys  # these are there since the first run
        first = (instruction.stage, op != Op.BACKWARD_INPUT) not in self.with_gradients
        if op == Op.BACKWARD:
            return sizes.first_backward if first else sizes.backward
        if op == Op.BACKWARD_INPUT:
            return sizes.first_input if first else sizes.backward_input
        return sizes.first_weight if first else sizes.backward_weight

    def _apply(self, instruction: Instruction) -> None:
        if isinstance(instruction, Compute):
            self._compute(instruction)
            return
        kind = instruction.kind
        if kind.adds_up:
            self._add_up(instruction)
            return
        if kind.gives and kind.exchange is None:  # notes are small
            self._change(kind.gives(instruction), _WAITING, 1)
        if kind.drops:
            self._change(self._whole(kind.drops(instruction)), _WAITING, -1)
        if kind.changes:
            into = kind.changes(instruction)
            self._change(self._whole(into), _WAITING, -1)
            self.added.add(into)
            self._change(self._whole(into), _WAITING, 1)

    def _whole(self, key: MicrobatchValue) -> MicrobatchValue:
        return (key[0] + _SUM, key[1]) if key in self.added else key

    def _compute(self, compute: Compute) -> None:
        op = compute.op
        if op == Op.FORWARD:
            self._forward(compute)
        elif op == Op.RECOMPUTE:
            self._recompute(compute)
        else:
            if op != Op.BACKWARD_WEIGHT:
                self._begin_backward(compute)
            if op != Op.BACKWARD:
                self._hold(compute, 1 if op == Op.BACKWARD_INPUT else -1)
            self._add_gradients(compute.stage, whole=op != Op.BACKWARD_INPUT)

    def _forward(self, forward: Compute) -> None:
        stage, microbatch = forward.stage, forward.microbatch
        sizes, done = self._of_stage(forward), Pass("F", stage)
        for name in self._arriving(stage, microbatch):
            self._change((name, microbatch), _WAITING, 1)
        for value in self.gives[done]:
            self._change((value, microbatch), _WAITING, 1)
        self.kept += sizes.keys
        if stage not in self.program.backward:
            self.results += sizes.results
            if self.program.slice_of(microbatch) == self.program.slices - 1:
                self._end_row(forward)
        else:
            if (stage, microbatch) in self.program.checkpointed:
                self._hold_inputs(forward, self._inputs_of(stage), 1)
                self.kept += sizes.repeating
                self.results += sizes.results
            else:
                self._hold_inputs(forward, self._needed_inputs(forward), 1)
                self.kept += sizes.kept
                for value in sizes.kept_outputs:
                    self._change((value, microbatch), _OUTPUT, 1)
        for name in self.inputs:
            if self.last_takers.get((name, microbatch)) is forward:
                self._change((name, microbatch), _WAITING, -1)

    def _arriving(self, stage: int, microbatch: int) -> list[str]:
        """The inputs of the model that are put on the device now."""
        taken = [name for name, each in self.inputs.items() if stage in each.stages]
        return [name for name in taken if not self.values.has((name, microbatch))]

    def _inputs_of(self, stage: int) -> Iterator[str]:
        yield from (name + _COPY * (name in self.copied) for name in self.takes[Pass("F", stage)])
        yield from (name for name, each in self.inputs.items() if stage in each.stages)

    def _needed_inputs(self, compute: Compute) -> list[str]:
        freed = self._of_stage(compute).freed_inputs
        return [name for name in self._inputs_of(compute.stage) if name.removesuffix(_COPY) not in freed]

    def _hold_inputs(self, compute: Compute, names: Iterable[str], by: int) -> None:
        for name in names:
            self._change((name, compute.microbatch), _INPUT, by)

    def _run_again(self, compute: Compute) -> int:
        """What a second forward makes: its outputs are not those that were sent."""
        sizes, values = self._of_stage(compute), self._of(compute.microbatch).values
        return sizes.kept - sizes.results + sum(values.get(name, 0) for name in sizes.kept_outputs)

    def _recompute(self, recompute: Compute) -> None:
        self.kept += self._run_again(recompute) - self._of_stage(recompute).repeating
        self._hold_inputs(recompute, self._needed_inputs(recompute), 1)
        self._hold_inputs(recompute, self._inputs_of(recompute.stage), -1)

    def _begin_backward(self, backward: Compute) -> None:
        self._drop_run(backward)
        for value in self.gives[Pass("B", backward.stage)]:
            self._change((value, backward.microbatch), _WAITING, 1)
        self.kept += self._of_stage(backward).key_gradients
        if self.program.slice_of(backward.microbatch) == 0:
            self._end_row(backward)

    def _end_row(self, compute: Compute) -> None:
        """What slices have made for one another is gone."""
        every = [self.sizes.of_slice(number).stages[compute.stage] for number in range(self.program.slices)]
        self.kept -= sum(each.keys + each.key_gradients for each in every)

    def _hold(self, half: Compute, by: int) -> None:
        """What the half I leaves for W is held, or no more: some of it may be in other hands, too, and counts once."""
        stage, microbatch, sizes = half.stage, half.microbatch, self._of_stage(half)
        self.kept += by * sizes.deferred
        for name in self._inputs_of(stage):
            if name.removesuffix(_COPY) in sizes.deferred_inputs:
                self._change((name, microbatch), _INPUT, by)
        again = (stage, microbatch) in self.program.checkpointed
        for name in sizes.deferred_values:
            if again and name in self.gives[Pass("F", stage)]:  # the outputs of a second forward are no values
                self.kept += by * self._of(microbatch).values.get(name, 0)
            else:
                self._change((name, microbatch), _OUTPUT, by)

    def _drop_run(self, backward: Compute) -> None:
        stage, microbatch = backward.stage, backward.microbatch
        sizes = self._of_stage(backward)
        self._hold_inputs(backward, self._needed_inputs(backward), -1)
        if (stage, microbatch) in self.program.checkpointed:
            self.kept -= self._run_again(backward)
            return
        self.kept -= sizes.kept
        self.results += sizes.results
        for value in sizes.kept_outputs:
            self._change((value, microbatch), _OUTPUT, -1)

    def _add_gradients(self, stage: int, whole: bool) -> None:
        sizes = self.sizes.stages[stage]
        early = 0 if (stage, False) in self.with_gradients else sizes.early_gradients
        late = 0 if (stage, True) in self.with_gradients else sizes.gradients - sizes.early_gradients
        self.gradients += early + (late if whole else 0)
        self.with_gradients |= {(stage, False), (stage, whole)}

    def _add_up(self, instruction: Any) -> None:
        """What a part of a sum changes, of a replicated parameter. Those of the stages of replicas, which are in parts and one
        at a time beside the gradients, are left out."""
        match instruction:
            case SendExchanged(Payload.GRADIENTS):
                self.gradients -= self._bytes_of_sum(instruction, self.worker)
            case ReceiveExchanged(Payload.GRADIENTS):
                if self.computes:  # else they are added at once
                    self.arrived[instruction.of] += self._bytes_of_sum(instruction, instruction.source)
            case Reduce():  # the sum and its copies are in the place of this worker's gradients
                self.arrived.pop(instruction.of, None)
            case ReceiveExchanged(Payload.SUM):
                self.gradients += self._bytes_of_sum(instruction, self.worker)

    def _bytes_of_sum(self, instruction: Any, worker: int) -> int:
        """The bytes of the gradients that a worker has of a sum."""
        copies = sum(stage in self.program.stages_of(worker) for stage in self.sums[instruction.of].stages)
        return self.sizes.replicated.get(instruction.of, 0) * copies
