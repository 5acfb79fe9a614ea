"""The bytes of the stages of a Pipe and of the values between them, counted on fake tensors: nothing is computed.

A copy of the stages, with fake tensors, runs as on a worker: all stages on one worker, one micro-batch after the other. Values
that stages pass to each other are copied, as if they were sent. The bytes that are alive are counted before each computation,
after it, and at their most. After a forward its values are dropped: what is then alive of them and of its inputs, its run has.

    F0.0 F1.0 B1.0 B0.0   the gradients of parameters appear          F0.1 F1.1 B1.1 B0.1   they are there
    F0.0 F1.0 I1.0 W1.0 I0.0 W0.0 ...                                 the same, with backwards in halves

Where micro-batches are slices of a sequence, two rows of them run, slice by slice, and those of the second are counted.

So the bytes of custom functions, of checkpoints inside of the model, of autocast's casts and of deferred layers are counted.
Stages with ``compile=`` run as graphs here, too, and keep what these keep. The memory that a kernel takes for itself while it
runs, and what a compiled piece holds while it runs, are not counted.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode
from torch.nn.modules.batchnorm import _NormBase

from pippy.drivers.batch.division import Division
from pippy.drivers.count.fake_errors import explain_fake_errors
from pippy.drivers.count.optimizer_bytes import CountedOptimizer
from pippy.drivers.lowering.flow import Work
from pippy.drivers.lowering.lower import Lowered, lower
from pippy.drivers.placement.placed_pipe import PlacedPipe
from pippy.drivers.plan import add_communication, make_schedule
from pippy.drivers.plan.cost.held_bytes import ModelInput, PipeBytes, StageBytes
from pippy.drivers.plan.language.edges import Pass
from pippy.drivers.plan.language.instructions import Compute, Op
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.passes.rewrites import in_halves
from pippy.drivers.protocol.compile_options import GRAPHS, CompileOptions
from pippy.drivers.wire.worker_transport import in_process
from pippy.drivers.worker.executor import BoundProgram, Executor
from pippy.drivers.worker.measure.live_storages import LiveStorages
from pippy.drivers.worker.step_context import StepContext, StepDevice
from pippy.ir.base.fake_mode import FakeMode
from pippy.ir.base.interrupts import heard
from pippy.ir.base.names import stage_index
from pippy.ir.base.trees import map_tensors, plain_parts, tensors
from pippy.ir.pipe import Pipe, compiled_of
from pippy.ir.run.batch_norm import StepStatistics
from pippy.ir.run.in_place import Snapshot
from pippy.ir.run.key_value_cache import SliceCache
from pippy.ir.run.random_state import untouched_random_state
from pippy.ir.run.stage_run import as_leaf

if TYPE_CHECKING:
    from pippy.drivers.worker.compiled.stage_graphs import GraphsOfStages

ROWS = 2  # of micro-batches, each of one or of several slices


_Storages = frozenset[tuple[int, int, int]]  # as `LiveStorages.storages_of` gives them


@dataclass(frozen=True)
class _RunBytes:
    """What the run of a forward holds: bytes apart from values, the values that it gives, and not these inputs."""

    kept: int
    outputs: frozenset[str]
    freed: frozenset[str]
    keys: int  # for other slices


_OfSlice = tuple[int, int]  # a stage, and a slice of a sequence


@dataclass(frozen=True)
class _ComputationBytes:
    """The bytes of a computation beyond those alive before it: at its most, and after it."""

    most: int
    more: int


def count_pipe(
    pipe: Pipe,
    division: Division,
    device: torch.device,
    trains: bool = True,
    optimizers: Sequence[CountedOptimizer] = (),
    halves: bool = True,
    compile: CompileOptions | None = None,
) -> PipeBytes:
    """The bytes of the stages of a Pipe, for the micro-batches of ``division`` (the largest counts) on ``device``.

    Needs no driver and no worker. The state of ``optimizers`` is that after their first step. Without ``halves``, backwards in
    halves are not counted, and half as much is run. ``compile`` says whether stages run as graphs. The result's ``divided`` has
    the bytes that are divided among replicas, by the worker's number in the cluster.

    >>> from pippy.drivers.batch.divide_call import divide_call
    >>> pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.MSELoss())
    >>> division = divide_call(compiled_of(pipe), 4, (torch.zeros(16, 4), torch.zeros(16, 4)), {})
    >>> sizes = count_pipe(pipe, division, torch.device("cpu"))
    >>> sizes.stages[0].parameters, sizes.stages[0].gradients, sizes.values["_0"]
    (80, 80, 64)
    """
    compiled = compiled_of(pipe)
    stages, slices = compiled.num_stages, division.slices
    orders = {
        trained: make_schedule(name, workers=1, chunks=ROWS, slices=slices, stages_per_worker=stages)
        for trained, name in ((True, "1f1b"), (False, "forward_only"))
    }
    with heard():
        lowered = _lower(pipe, orders[trains])
    largest = max(range(0, division.chunks, slices), key=lambda each: _rows(division, each))
    with heard(), untouched_random_state(), torch.inference_mode(False), explain_fake_errors():
        counted = _FakeRun(pipe, division, largest, device, trains, compile)
        counted.run(lowered)
        halved = None
        if trains and halves:
            halved = _FakeRun(pipe, division, largest, device, trains, compile)
            halved.run(_lower(pipe, in_halves(orders[True])))
        named, mode_and_unit = counted.named(), (counted.mode, counted.live.unit)
        undivided = [each for each in optimizers if each.shares is None]
        states = [sum(each.of(of_stage, *mode_and_unit) for each in undivided) for of_stage in named]
        divided = Counter[int]()
        for each in optimizers:
            divided.update(each.of_workers(named, *mode_and_unit))
    parameters = {group.name: group.copies[0][1] for group in counted.placed.replicated}
    replicated = {
        name: sum(part.nbytes for part in plain_parts(_tensor(counted.modules, place)))
        for name, place in parameters.items()
    }
    by_slice = [
        PipeBytes(
            tuple(_stages(counted, halved, lowered, number, states)),
            counted.values[number],
            frozenset(counted.owned),
            frozenset(counted.copied),
            tuple(_inputs(lowered, division, counted, number)),
            device.type == "cpu",
            replicated,
            divided,
        )
        for number in range(slices)
    ]
    return by_slice[0] if slices == 1 else replace(by_slice[-1], slices=tuple(by_slice))


def _lower(pipe: Pipe, schedule: Program) -> Lowered:
    """Lower a schedule for one worker, which adds up no gradients before a backward: what several workers send, it does not."""
    lowered = lower(pipe, schedule)
    if not lowered.program.added:
        return lowered
    return lower(pipe, add_communication(replace(lowered.program, added=())))


def _tensor(modules: Mapping[str, nn.Module], place: Any) -> torch.Tensor:
    path, _, leaf = place.name.rpartition(".")
    found: torch.Tensor = getattr(modules[place.call].get_submodule(path), leaf)
    return found


def _rows(division: Division, microbatch: int) -> int:
    return 0 if division.sizes is None else division.sizes[microbatch]


class _FakeRun:
    """A run of all stages on fake tensors, on one worker."""

    def __init__(
        self,
        pipe: Pipe,
        division: Division,
        microbatch: int,
        device: torch.device,
        trains: bool,
        compile: CompileOptions | None,
    ) -> None:
        self.placed = PlacedPipe(compiled_of(pipe), [0] * compiled_of(pipe).num_stages)
        self.slices, self.chunks = division.slices, ROWS * division.slices
        self.trains, self.device = trains, device
        self.graphs = None if compile is None else _graphs(compile)
        self.mode = FakeMode()
        self.live = LiveStorages(unit=1 if device.type == "cpu" else 512)
        real = {call: self.placed.compiled.stage(call) for call in self.placed.nodes}
        held = [each for module in real.values() for each in (*module.parameters(), *module.buffers())]
        moved = {id(each): self._moved(each) for each in held if each.device.type != device.type}
        with FakeCopyMode(self.mode):
            self.modules: dict[str, nn.Module] = copy.deepcopy(real, moved)
        for norm in (
            each for module in self.modules.values() for each in module.modules() if isinstance(each, _NormBase)
        ):
            norm.momentum = norm.momentum or 0.1  # else it asks for the number of its calls, of which no size depends
        self.inputs = {
            name: [
                map_tensors(self._fake, division.take(name, microbatch + at % self.slices)) for at in range(self.chunks)
            ]
            for name in division.arguments
        }
        self.passes: dict[str, _ComputationBytes] = {}
        self.values: list[dict[str, int]] = [{} for _ in range(self.slices)]
        self.owned: set[str] = set()
        self.copied: set[str] = set()
        self.gradients: dict[str, int] = {}
        self.repeating: dict[int, int] = {}
        self.runs: dict[_OfSlice, _RunBytes] = {}
        self.key_gradients: dict[_OfSlice, int] = {}
        self.results: dict[str, int] = {}
        # The values that a stage takes and gives in a micro-batch, and those of them that its half W frees.
        self.noted: dict[tuple[int, int], dict[tuple[str, str], _Storages]] = {}
        self.freed: dict[_OfSlice, dict[tuple[str, str], _Storages]] = {}

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.mode:
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self.device)
        return made.requires_grad_(tensor.requires_grad)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        fake = self._fake(tensor.detach())
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake

    def parameters(self, calls: Iterable[str]) -> list[torch.Tensor]:
        """The parameters of stages, each once."""
        return list({id(each): each for call in calls for each in self.modules[call].parameters()}.values())

    def named(self) -> list[dict[str, torch.Tensor]]:
        """The parameters of each stage by the user's names."""
        by_stage: list[dict[str, torch.Tensor]] = [{} for _ in range(self.placed.compiled.num_stages)]
        for call, module in self.modules.items():
            index = stage_index(call)
            of_stage = by_stage[self.placed.loss_stage if index is None else index]
            for name, parameter in module.named_parameters():
                user = self.placed.compiled.remap_qualname(f"{call}.{name}")
                of_stage[self.placed.compiled.qualnames.canonical.get(user, user)] = parameter
        return by_stage

    def run(self, lowered: Lowered) -> None:
        """Run all, and note the bytes of each computation."""
        (program,) = self.placed.programs(0, lowered, single_loss=False).values()
        (transport,) = in_process(1)
        statistics = StepStatistics.of(self.modules, {})
        bound = BoundProgram(program, self.modules, {}, self.device, graphs=self.graphs)
        self.executor = executor = Executor(bound, transport, self.device)
        self.program, weights = lowered.program, (1 / self.chunks,) * self.chunks
        self.step = StepContext(1, self.inputs, weights, self.trains, transport, StepDevice(self.device), statistics)
        executor.code = [
            (self._watched(instruction, handle), operands)
            for instruction, (handle, operands) in zip(program.order, executor.code)
        ]
        known = [each for module in self.modules.values() for each in (*module.parameters(), *module.buffers())]
        self.live.add([*known, *tensors(list(self.inputs.values()))])
        with self.mode, self.live, statistics.step(1) if statistics is not None else nullcontext():
            executor.run(self.step)

    def of(self, op: Op, stage: int, number: int, first: bool = False) -> _ComputationBytes | None:
        """The bytes of a computation of a slice, of the second row or of the first; None if there is none."""
        return self.passes.get(str(Compute(op, stage, number + (0 if first else self.slices))))

    def _watched(self, instruction: Any, handle: Callable[..., None]) -> Callable[..., None]:
        if not isinstance(instruction, Compute):
            return handle

        def watched(*operands: Any) -> None:
            live, names = self.live, self._made_by(instruction)
            of_slice = instruction.stage, instruction.microbatch % self.slices
            keys = self._keys_of(instruction)
            buffers = Snapshot(dict(enumerate(self._buffers(instruction.stage))))
            there, inputs = live.bytes, self._taken_apart(instruction)
            before, seen = live.restart(), live.seen
            self._note_places(instruction, self._taken_by(instruction), "taken")
            held = self._held_of(instruction)
            handle(*operands)
            if instruction.op == Op.BACKWARD_WEIGHT:
                left = self._held_of(instruction)
                self.freed[of_slice] = {key: each for key, each in held.items() if key not in left}
            self._note_places(instruction, names, "given")
            torch.clear_autocast_cache()  # the next computation does, first
            self.passes[str(instruction)] = _ComputationBytes(live.most - before, live.bytes - before)
            self.step.values.update({key: value for key, value in inputs.items() if key in self.step.values})
            arrived = self._note_values(instruction, names, seen)
            self.gradients[f"{instruction.op}{instruction.stage}"] = self._gradients_of(instruction.stage)
            made, gradients = (after - before for before, after in zip(keys, self._keys_of(instruction)))
            if instruction.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
                self.key_gradients[of_slice] = max(gradients, 0)
            if instruction.op == Op.FORWARD:
                own = [name for name, _ in inputs]
                more = live.bytes - there - arrived
                self.runs[of_slice] = self._run_of(instruction, own, names, more, max(made, 0))
                written = [buffers.tensors[each] for each in buffers.changed()]
                averages = [
                    each for each in self._averages(instruction.stage) if all(each is not one for one in written)
                ]
                self.repeating[instruction.stage] = sum(each.nbytes for each in [*written, *averages])

        return watched

    def _keys_of(self, compute: Compute) -> tuple[int, int]:
        """The bytes of keys and values that the slices of a row have made for one another, and of their gradients."""
        calls = self._calls(compute.stage)
        caches = [] if self.step.slices is None else self.step.slices.of_row(calls, compute.microbatch)
        keys, gradients = (
            [each for cache in caches for each in its(cache)] for its in (SliceCache.keys, SliceCache.gradients)
        )
        return self.live.bytes_of(keys), self.live.bytes_of(gradients)

    def _work(self, stage: int) -> Sequence[Work]:
        return self.executor.program.work.get(Pass("F", stage), ())

    def _calls(self, stage: int) -> list[str]:
        return [work.call for work in self._work(stage)]

    def _buffers(self, stage: int) -> list[torch.Tensor]:
        return [each for call in self._calls(stage) for each in self.modules[call].buffers()]

    def _averages(self, stage: int) -> list[torch.Tensor]:
        """The running statistics that batch norms change in training. On fake tensors a change cannot be seen."""
        modules = [each for call in self._calls(stage) for each in self.modules[call].modules()]
        norms = [each for each in modules if isinstance(each, _NormBase) and each.training]
        return [each for norm in norms for each in (norm.running_mean, norm.running_var) if each is not None]

    def _gradients_of(self, stage: int) -> int:
        grads = [each.grad for each in self.parameters(self._calls(stage)) if each.grad is not None]
        return self.live.bytes_of(grads)

    def _made_by(self, compute: Compute) -> list[str]:
        phase = "F" if compute.op == Op.FORWARD else "B"
        return [edge.value for edge in self.program.flow if edge.source == Pass(phase, compute.stage)]  # type: ignore[arg-type]

    def _taken_by(self, compute: Compute) -> list[str]:
        if compute.op == Op.FORWARD:
            names = [name for work in self._work(compute.stage) for name in work.takes]
            return [name for name in dict.fromkeys(names) if (name, compute.microbatch) in self.step.values]
        return [edge.value for edge in self.program.flow if Pass("B", compute.stage) in edge.targets]

    def _taken_apart(self, compute: Compute) -> dict[tuple[str, int], Any]:
        """Give a forward inputs that nothing else holds. Returns those that were in their place. Inputs of the model stay."""
        if compute.op != Op.FORWARD:
            return {}
        stay = self.inputs if self.device.type == "cpu" else ()
        keys = [(name, compute.microbatch) for name in self._taken_by(compute) if name not in stay]
        before = {key: self.step.values[key] for key in keys}
        for key, value in before.items():
            self.step.values[key] = map_tensors(self._apart, value)
        return before

    def _apart(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._fake(tensor) if tensor.layout is torch.strided else _received(tensor)

    def _run_of(self, forward: Compute, takes: Iterable[str], gives: Iterable[str], more: int, keys: int) -> _RunBytes:
        """What the run of a forward holds. So many bytes are ``more`` than before it, and nothing else holds these values.

        Of these, ``keys`` are for other slices.
        """
        alive = self._held_of(forward)
        inputs = {name: alive["input", name] for name in takes if ("input", name) in alive}
        outputs = frozenset(name for name in gives if ("other", name) in alive)
        of_inputs = sum(size for _, _, size in frozenset[tuple[int, int, int]]().union(*inputs.values()))
        values = self.values[forward.microbatch % self.slices]
        of_outputs = sum(values[name] for name in outputs - self.owned)
        freed = frozenset(takes).difference(inputs)
        return _RunBytes(more - of_inputs - of_outputs - keys, outputs, freed, keys)

    def _note_places(self, compute: Compute, names: Iterable[str], how: str) -> None:
        """Note the storages of values: those that a forward takes as inputs, all others alike."""
        if compute.op == Op.BACKWARD_WEIGHT:
            return
        of_stage = self.noted.setdefault((compute.stage, compute.microbatch), {})
        role = "input" if compute.op == Op.FORWARD and how == "taken" else "other"
        for name in names:
            value = tensors(self.step.values.get((name, compute.microbatch)))
            of_stage[role, name] = self.live.storages_of(value)

    def _held_of(self, compute: Compute) -> dict[tuple[str, str], _Storages]:
        """The noted values of a stage whose memory is all alive."""
        noted = self.noted.get((compute.stage, compute.microbatch), {})
        return {key: each for key, each in noted.items() if each and all(map(self.live.is_alive, each))}

    def _note_values(self, compute: Compute, names: Sequence[str], seen: int) -> int:
        """Note the values that a computation gives, and put what another worker receives in their place: so many bytes."""
        arrived: list[torch.Tensor] = []
        for name in names:
            value_tensors = list(tensors(self.step.values.get((name, compute.microbatch))))
            self.values[compute.microbatch % self.slices][name] = sum(
                -(-each.nbytes // self.live.unit) * self.live.unit for each in value_tensors
            )
            keys = {part.untyped_storage()._cdata for each in value_tensors for part in plain_parts(each)}
            if value_tensors and self.live.newest_of(value_tensors) <= seen:
                self.owned.add(name)
            if any(as_leaf(each).untyped_storage()._cdata not in keys for each in value_tensors):
                self.copied.add(name)
            key = name, compute.microbatch
            if key in self.step.values:
                self.step.values[key] = map_tensors(_received, self.step.values[key])
                arrived += tensors(self.step.values[key])
        if compute.op == Op.FORWARD:
            for work in self._work(compute.stage):
                for name in filter(None, work.gives):
                    if name in self.step.returned:
                        self.results[name] = self.live.bytes_of(tensors(self.step.returned[name][compute.microbatch]))
        return self.live.bytes_of(arrived)


def _graphs(options: CompileOptions) -> "GraphsOfStages":
    from pippy.drivers.worker.compiled.stage_graphs import GraphsOfStages  # slow to import

    return GraphsOfStages(replace(options, backend=GRAPHS, mode=None, options={}, fullgraph=False))


def _received(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as it arrives at another worker: with memory of its own, and no gaps in it."""
    found: torch.Tensor = as_leaf(tensor).detach().clone()
    return found.requires_grad_(tensor.requires_grad)


def _stages(
    counted: _FakeRun, halved: _FakeRun | None, lowered: Lowered, number: int, states: Sequence[int]
) -> Iterator[StageBytes]:
    """The bytes of each stage for one slice."""
    for stage, state in enumerate(states):
        found = replace(_stage(stage, counted, number, stage in lowered.program.backward), optimizer=state)
        yield found if halved is None else _between_halves(stage, found, halved, number)


def _stage(stage: int, counted: _FakeRun, number: int, trains: bool) -> StageBytes:
    calls = counted._calls(stage)
    state = [each for call in calls for each in (*counted.modules[call].parameters(), *counted.modules[call].buffers())]
    results = sum(counted.results.get(name, 0) for work in counted._work(stage) for name in work.gives if name)
    forward, run = counted.of(Op.FORWARD, stage, number), counted.runs[stage, number]
    assert forward is not None
    if not trains:
        return StageBytes(counted.live.bytes_of(state), results=results, keys=run.keys, forward=forward.most)
    first, later = (counted.of(Op.BACKWARD, stage, number, first=each) for each in (True, False))
    assert first is not None and later is not None
    gradients = counted.gradients[f"B{stage}"]
    return StageBytes(
        parameters=counted.live.bytes_of(state),
        gradients=gradients,
        kept=run.kept,
        kept_outputs=run.outputs,
        freed_inputs=run.freed,
        repeating=counted.repeating[stage],
        results=results,
        keys=run.keys,
        key_gradients=counted.key_gradients[stage, number],
        forward=forward.most,
        backward=later.most,
        first_backward=first.most,
    )


def _between_halves(stage: int, stage_bytes: StageBytes, counted: _FakeRun, number: int) -> StageBytes:
    """The bytes of a stage, with those between the two halves of its backward."""
    inputs_first, inputs_later, first, later = (
        counted.of(op, stage, number, first=each)
        for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
        for each in (True, False)
    )
    if inputs_first is None or inputs_later is None or first is None or later is None:
        return stage_bytes
    freed = counted.freed[stage, number]
    inputs, others = (frozenset(name for role, name in freed if role == which) for which in ("input", "other"))
    of_values = sum(size for _, _, size in frozenset[tuple[int, int, int]]().union(*freed.values()))
    return replace(
        stage_bytes,
        deferred=-later.more - of_values,
        deferred_inputs=inputs,
        deferred_values=others,
        early_gradients=stage_bytes.gradients - (first.more - later.more),
        backward_input=inputs_later.most,
        first_input=inputs_first.most,
        backward_weight=later.most,
        first_weight=first.most,
    )


def _inputs(lowered: Lowered, division: Division, counted: _FakeRun, number: int) -> Iterator[ModelInput]:
    for name in lowered.inputs:
        stages = sorted(
            key.stage
            for key, work in lowered.work.items()
            if key.phase == "F" and any(name in each.takes for each in work)
        )
        if stages:
            one = counted.live.bytes_of(tensors(counted.inputs[name][number]))
            total = sum(each.nbytes for each in division.whole(name))
            masked = division.chunks * one if division.mask else 0  # then each micro-batch is a copy
            yield ModelInput(name, one, total + masked, tuple(stages))
