"""What a worker holds for one driver: stages, programs, gradients, optimizers. It carries out the driver's commands on them."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from pippy.drivers.compare.alike import alike
from pippy.drivers.compare.tolerance import wide_tensors
from pippy.drivers.plan.language.instructions import Instruction
from pippy.drivers.protocol import programs, state, steps
from pippy.drivers.protocol.commands import Command
from pippy.drivers.protocol.compile_options import CompileOptions
from pippy.drivers.wire.pickling import Pickled, unpickle
from pippy.drivers.wire.transport import Transport
from pippy.drivers.worker.data import DatasetReader, shared_generators
from pippy.drivers.worker.executor import BoundProgram, ExchangeRun, Executor, Passed, Running
from pippy.drivers.worker.generating import GenerateCall, Generation
from pippy.drivers.worker.gradients.buffers import ReplicaBuffers, StepBuffers
from pippy.drivers.worker.gradients.gradient_sums import AddingUp, GradientSums, ParameterShares
from pippy.drivers.worker.gradients.gradients import Gradients, norm
from pippy.drivers.worker.gradients.hooks import ParameterHooks, hooks_hold_the_same
from pippy.drivers.worker.gradients.worker_optimizer import WorkerOptimizer
from pippy.drivers.worker.handlers import given_gradients
from pippy.drivers.worker.measure.calls import OutputProbe, SeenCalls
from pippy.drivers.worker.measure.profiler import WorkerProfiler
from pippy.drivers.worker.measure.watch import Watch
from pippy.drivers.worker.model_graphs import ModelGraphs, made_stages
from pippy.drivers.worker.out_of_order import OutOfOrderExecutor
from pippy.drivers.worker.state.initialization import initialize
from pippy.drivers.worker.state.stores import CopiesOfPoints, Disk, NeighbourCopies, Snapshots
from pippy.drivers.worker.step_context import StepContext, StepDevice
from pippy.drivers.worker.trials import Trials, normalizes_by_batches
from pippy.drivers.worker.worker_context import WorkerContext
from pippy.ir.base.trees import map_tensors, tensors
from pippy.ir.run.batch_norm import StepStatistics
from pippy.ir.run.in_place import get_tensor
from pippy.ir.run.may_draw import Draws

if TYPE_CHECKING:
    from pippy.drivers.worker.compiled.stage_graphs import GraphsOfStages

_NONE = Pickled(b"", [])


class DriverState:
    """The stages, programs, gradients and optimizers of one driver on one worker, and a handler for each command.

    ``kept`` are the copies of states, for recoveries, that were there before.
    """

    def __init__(
        self,
        load: programs.Load,
        context: WorkerContext,
        given_up: Callable[[], bool],
        kept: CopiesOfPoints | None = None,
    ) -> None:
        self.given_up, self.index, self.shares_process = given_up, context.index, context.shares_process
        self.transport, self.copies, self.constant = context.transport, context.copies, load.constant
        self.device = device = torch.device(context.device or "cpu")
        self.place = StepDevice(device, context.copies)
        self.modules = made_stages(load.modules, state.unreadable, device)
        self.model_graphs = ModelGraphs(self.modules, load.constant, device)
        self.graphs = None if load.compile is None else _graphs(unpickle(load.compile))
        unique = {id(p): p for module in self.modules.values() for p in module.parameters()}
        self.gradients = Gradients(list(unique.values()), GradientSums(load.buckets, self.index, self.tensor))
        self.statistics = StepStatistics.of(self.modules, self.constant)
        self.buffers = ReplicaBuffers(self.modules) if load.replicas else None
        self.programs: dict[int, Executor] = {}
        self.sums: Executor | None = None  # a program that adds up gradients
        self.optimizers: dict[int, WorkerOptimizer] = {}
        self.settings: dict[str, Pickled] = {}  # attributes of modules that were set, by stage
        self.buckets = load.buckets
        self.shares: dict[int, tuple[Sequence[Instruction], ParameterShares]] = {}  # of divided optimizers
        self.running: Running | None = None
        self.hooks_looked_at = False  # whether hooks of modules are known to change nothing that the script would miss
        self.generation: Generation | None = None
        self.snapshots = Snapshots(self.modules, self.optimizers, self.gradients, self.tensor, device)
        self.disk = Disk(self.snapshots, given_up)
        self.datasets = DatasetReader(self.modules, given_up, self.shares_process)
        exchange = partial(self._exchange, self.transport.on_host)
        self.neighbours = NeighbourCopies(self.index, self.snapshots, exchange, kept)
        self.step_buffers = StepBuffers(self.model_graphs.modules)
        hold = partial(self.snapshots.hold, random=not self.shares_process)
        self.trials = Trials(self.modules, self.step_buffers, self.gradients.of_last_step, hold)
        self.profiler = WorkerProfiler(device)
        self.put_back: Callable[[], None] | None = None  # all that is held while something is tried
        self.unsure: dict[int, Callable[[], None]] = {}  # what puts back what steps have changed that may fail a guard
        self.handlers: Mapping[type, Callable[[Any, int], Any]] = {
            type(None): lambda body, number: None,  # the command only drops gradients, or drivers
            programs.AddProgram: self._add_program,
            programs.AddGraph: self._add_graph,
            programs.AddDataset: lambda body, number: self.datasets.add(body),
            steps.Step: self._step,
            steps.StepReturning: self._step,
            steps.RunTrial: self._try_out,
            state.GiveState: self._give_state,
            state.RestoreState: self._restore_state,
            state.Initialize: self._initialize,
            state.FetchGradients: self._fetch_gradients,
            state.ChangeGradients: self._change_gradients,
            state.MakeOptimizer: self._make_optimizer,
            state.OptimizerStep: self._optimizer_step,
            state.WriteState: lambda body, number: self.disk.put(body),
            state.ReadState: lambda body, number: self.disk.get(body),
            state.TakeState: lambda body, number: self.disk.take(body),
            state.KeepState: self.neighbours.put,
            state.TakeKept: self.neighbours.get,
            state.HoldState: self._hold_state,
            programs.AskCompiled: lambda body, number: {} if self.graphs is None else self.graphs.said(self.modules),
            programs.AddGeneration: self._add_generation,
            programs.Generate: self._generate,
            steps.StartProfile: self.profiler.start,
            steps.AskTime: self.profiler.time,
            steps.StopProfile: self.profiler.stop,
        }

    def obey(self, command: Command) -> Any:
        """Carry out a command, and return its result."""
        self.gradients.settle(command.settled)
        self.unsure = {number: each for number, each in self.unsure.items() if number > command.settled}
        if self.statistics is not None:
            self.statistics.settle(command.settled)
        if command.zero_grad is True:
            self.gradients.zero()
        elif command.zero_grad:
            self.gradients.zero_of(self._parameters_of(command.zero_grad))
        return self.handlers[type(command.body)](command.body, command.number)

    def drop(self, first: int, last: int) -> None:
        """Drop what the commands from ``first`` to ``last`` did to gradients and deferred batch norms: they were given up."""
        self.gradients.drop(first, last)
        for number in sorted(self.unsure, reverse=True):
            if first <= number <= last:
                self.unsure.pop(number)()
        if self.statistics is not None:
            self.statistics.drop(first, last)

    def close(self) -> None:
        """End what this has started."""
        self.profiler.close()

    def _parameters_of(self, optimizers: Sequence[int]) -> set[int]:
        """The ids of the parameters that some optimizers have on this worker."""
        own = [self.optimizers[number] for number in optimizers if number in self.optimizers]
        shares = [self.shares[number][1] for number in optimizers if number in self.shares]
        return {key for each in own for key in each.parameters} | {key for each in shares for key in each.copies}

    def tensor(self, place: state.TensorLocation) -> torch.Tensor:
        """The parameter or buffer at a location."""
        return get_tensor(self.modules[place.call], place.name)

    def _places(self, keys: Container[int]) -> Iterator[state.TensorLocation]:
        """Where the parameters with these ids are."""
        for call, module in self.modules.items():
            for name, parameter in module.named_parameters():
                if id(parameter) in keys:
                    yield state.TensorLocation(call, name)

    def _add_program(self, program: programs.AddProgram, number: int) -> None:
        modules, constant = self.model_graphs.modules[program.graph], self.model_graphs.constant[program.graph]
        bound = BoundProgram(program, modules, constant, self.device, self.step_buffers, self.graphs)
        given, limits = (bound, self.transport, self.device, self.copies), program.out_of_order
        self.programs[program.program] = made = OutOfOrderExecutor(*given, limits) if limits else Executor(*given)
        if bound.sums and (self.sums is None or len(program.ranks) >= len(self.sums.program.ranks)):
            self.sums = made  # a trial has one replica of the pipeline only

    def _add_graph(self, add: programs.AddGraph, number: int) -> None:
        self.model_graphs.add(add)
        self.step_buffers.find()

    def _step(self, step: steps.Step, number: int) -> steps.StepResult:
        if not step.record:
            return self._run_step(self._loaded(step), number)
        recorder, *others = [self.programs[each.program].recorder for each in step.parts]
        for each in (recorder, *others):
            each.begin(step.reduce)
        step = self._loaded(step)
        with recorder.counting(self._held(step)) if step.count_memory else nullcontext():
            result = self._run_step(step, number)
            then = [replace(part, record=each.record()) for part, each in zip(result.then, others)]
            return replace(result, record=recorder.record(), then=tuple(then))

    def _loaded(self, step: steps.Step) -> steps.Step:
        """The step with the inputs that this worker loads, and with what is known by them."""
        if not step.inputs.loads:
            return step
        inputs, weights = self.datasets.load(step.inputs, step.trains, step.weighed)
        return replace(step, inputs=inputs, weights=weights or step.weights)

    def _held(self, step: steps.Step) -> list[torch.Tensor]:
        """All tensors that are there when a step begins."""
        modules = [each for module in self.modules.values() for each in (*module.parameters(), *module.buffers())]
        states = [each.held() for each in self.optimizers.values()]
        inputs = [step.inputs.whole(name) for name in step.inputs.arguments]
        return list(tensors([modules, self.gradients.held(), states, inputs]))

    def _set_flags(self, flags: Mapping[str, steps.StageFlags]) -> None:
        self.model_graphs.set_flags(0, flags)
        for call, its in flags.items():
            if its.settings is not None and not state.same_bytes(its.settings.values, self.settings.get(call, _NONE)):
                self._set_attributes(call, its.settings.values)

    def _set_attributes(self, call: str, values: Pickled) -> None:
        """Set what the script has set. Graphs that were recorded have what was there before."""
        modules, self.settings[call] = list(self.modules[call].modules()), values
        for (number, name), value in unpickle(values).items():
            setattr(modules[number], name, map_tensors(lambda each: each.to(self.device), value))
        if self.graphs is not None:
            self.graphs.forget(call)

    def _try_out(self, trial: steps.RunTrial, number: int) -> steps.TrialResult:
        self._set_flags(trial.step.flags or {})  # they stay, and what the trial changes does not
        step = self._loaded(trial.step)
        return self.trials.try_out(replace(trial, step=step), lambda: self._run_step(step, number, trial))

    def _run_step(self, step: steps.Step, number: int, trial: steps.RunTrial | None = None) -> steps.StepResult:
        self._set_flags(step.flags or {})
        for graph, flags in step.graph_flags.items():
            self.model_graphs.set_flags(graph, flags)
        if step.unsure:
            self.unsure[number] = self.snapshots.hold_buffers(random=not self.shares_process)
        if step.hooks is not None:
            self.gradients.hooks = ParameterHooks(step.hooks, self.tensor)
        self.running = executor = self.programs[step.program]
        context = self._context(step, number)
        context.tries = trial is not None and (trial.few or normalizes_by_batches(self.modules.values()))
        if trial is not None and trial.wide:
            context.inputs = wide_tensors(context.inputs)
        adding = self.gradients.begin_step(step.reduce and step.trains, step.scale)
        context.adding = None if step.then else adding  # the last part adds up
        if step.inputs.mask:
            context.own_rows = step.inputs.own_rows
        outputs = OutputProbe(executor.program.order, step.inputs) if step.probe_outputs else None
        seen = SeenCalls(executor.program.order, given_gradients) if step.see else None
        watch = Watch(step.inputs) if step.watch else None
        watchers = (executor.recorder if step.record else None, outputs, seen)
        random = self._random(executor, step)
        unchanged = nullcontext() if self.buffers is None else self.buffers.unchanged()
        prepared = 0 if self.graphs is None else self.graphs.prepared
        with ExitStack() as stack:
            stack.enter_context(random)
            stack.enter_context(unchanged)
            if not self.hooks_looked_at and trial is None:
                stack.enter_context(hooks_hold_the_same(self.modules))
            stack.enter_context(self.step_buffers.step(step.chunks, refuses=trial is None))
            if watch is not None:
                stack.enter_context(watch)
            if step.alike:
                stack.enter_context(alike())
            elif self.statistics is not None:
                stack.enter_context(self.statistics.step(number))
            result = executor.run(context, [each for each in watchers if each is not None])
            if step.then:
                result = replace(result, then=tuple(self._run_others(step, number, adding)))
        self.running, self.hooks_looked_at = None, self.hooks_looked_at or trial is None
        nonfinite = self.gradients.end_step(number, adding, step.scale) if step.trains else ()
        return replace(
            result,
            prepared=self.graphs is not None and self.graphs.prepared != prepared,
            by_chance=() if outputs is None else tuple(outputs.by_chance),
            seen=() if seen is None else tuple(seen.seen),
            asked=result.asked if watch is None else watch.asked(),
            weights=step.weights if step.weighed else None,
            nonfinite=tuple(self._places(nonfinite)) if nonfinite else (),
        )

    def _run_others(self, step: steps.Step, number: int, adding: AddingUp | None) -> Iterator[steps.StepResult]:
        """Run the micro-batches of a step that go by other graphs, one graph after the other."""
        earlier = len(step.inputs.held)
        for part in step.then:
            self.running = executor = self.programs[part.program]
            context = self._context(step, number, part)
            context.adding, context.earlier = adding if part is step.then[-1] else None, earlier
            yield executor.run(context, [executor.recorder] if step.record else ())
            earlier += len(part.inputs.held)

    def _context(self, step: steps.Step, number: int, part: steps.GraphStep | None = None) -> StepContext:
        """The context of a step, or of another ``part`` of it."""
        own: steps.Step | steps.GraphStep = step if part is None else part
        return StepContext(
            number,
            {name: own.inputs.microbatches(name) for name in own.inputs.arguments},
            own.weights if step.scale is None else [weight * step.scale for weight in own.weights],
            step.trains,
            self.transport,
            self.place,
            self.statistics,
            self.given_up,
            returns=own.returns if isinstance(own, steps.StepReturning | steps.GraphStep) else None,
            random=step.random,
        )

    def _random(self, executor: Executor, step: steps.Step) -> AbstractContextManager[None]:
        """A context in which the stages may seed the generators of this process."""
        if not self.shares_process or step.random is None or executor.draws is Draws.NOTHING:
            return nullcontext()
        return shared_generators.borrowed([self.device] if self.device.type == "cuda" else [], executor.draws)

    def _give_state(self, body: state.GiveState, number: int) -> state.WorkerState:
        return cast(
            state.WorkerState,
            map_tensors(torch.Tensor.cpu, self.snapshots.snapshot(body.tensors, body.optimizers, False)),
        )

    def _restore_state(self, body: state.RestoreState, number: int) -> None:
        self.snapshots.restore(body.state)

    def _initialize(self, body: state.Initialize, number: int) -> list[str]:
        copies = {name: [self.tensor(place) for place in places] for name, places in body.tensors.items()}
        own = {name: first for name, (first, *_) in copies.items()}
        model, function = unpickle(body.model, lambda each: own[each] if isinstance(each, str) else each.made())
        unwritten = initialize(model, own, body.seed, function)
        with torch.no_grad():
            for first, *others in copies.values():
                for other in others:
                    other.copy_(first)
        for optimizer in self.optimizers.values():
            optimizer.parameters_changed = True
        return unwritten

    def _fetch_gradients(self, fetch: state.FetchGradients, number: int) -> list[torch.Tensor | None]:
        if fetch.reduce:
            self._add_up(number)
        found = [self.gradients.of(id(self.tensor(place))) for place in fetch.locations]
        if fetch.norm_type is not None:
            found = [None if each is None else norm(each, fetch.norm_type) for each in found]
        return [None if each is None else each.detach().cpu() for each in found]

    def _change_gradients(self, change: state.ChangeGradients, number: int) -> None:
        if change.reduce:
            self._add_up(number)
        self.gradients.change(number, change.factor, change.limit)

    def _add_up(self, number: int) -> None:
        """Add up the gradients of copies, by the instructions of a program that do so."""
        adding = self.gradients.begin_reduction()
        if self.sums is not None:
            given, self.running = (self.transport, self.place), self.sums
            self.sums.add_up(StepContext(number, {}, (), True, *given, given_up=self.given_up, adding=adding))
            self.running = None
        self.gradients.end_reduction(number, adding)

    def _exchange(self, transport: Transport, order: Sequence[Instruction], number: int, passed: Passed) -> None:
        """Do what instructions outside of a step say."""
        self.running = run = ExchangeRun(order, transport)
        run.run(number, passed)
        self.running = None

    def _make_optimizer(self, make: state.MakeOptimizer, number: int) -> None:
        groups = [{"params": [self.tensor(place) for place in places], **options} for places, options in make.groups]
        if any(group["params"] for group in groups):
            made = WorkerOptimizer(unpickle(make.factory), groups, make.master_dtype)
            made.set_attributes({id(self.tensor(place)): each for place, each in make.attributes.items()})
            self.optimizers[make.optimizer] = made
            self.gradients.wider.update({key: master.dtype for key, master in made.masters.items()})
        divided, sums = make.passes_on is not None, self.gradients.sums
        if make.passes_on is not None:
            shares = ParameterShares(self.buckets, set(make.names), self.index, self.tensor)
            self.shares[make.optimizer] = make.passes_on, shares
        (sums.divided if divided else sums.undivided).update(make.names)

    def _optimizer_step(self, step: state.OptimizerStep, number: int) -> None:
        if step.reduce:
            self._add_up(number)
        if step.optimizer in self.optimizers:  # else no stage on this worker has parameters of it
            optimizer, attributes = self.optimizers[step.optimizer], step.attributes or {}
            optimizer.set_attributes({id(self.tensor(place)): each for place, each in attributes.items()})
            optimizer.step(self.gradients, step.groups or ())
        if step.optimizer in self.shares:
            order, shares = self.shares[step.optimizer]
            self._exchange(self.transport, order, number, shares)
            for number_of, each in self.optimizers.items():
                each.parameters_changed = each.parameters_changed or number_of != step.optimizer

    def _hold_state(self, body: state.HoldState, number: int) -> None:
        if not body.put_back:
            self.put_back = self.snapshots.hold()
        elif self.put_back is not None:
            self.put_back()
            self.put_back = None

    def _add_generation(self, add: programs.AddGeneration, number: int) -> None:
        if add.modules is not None:
            self.generation = Generation(add.modules, self.transport, self.place, self.tensor)
        assert self.generation is not None
        self.generation.add(add)

    def _generate(self, generate: programs.Generate, number: int) -> programs.Generated | None:
        assert self.generation is not None
        with closing(GenerateCall(self.generation, number, generate, self.given_up)) as call:
            for self.running, step in call.runs():
                self.running.run(step, [call])
            self.running = None
            return call.generated()


def _graphs(options: CompileOptions) -> "GraphsOfStages":
    from pippy.drivers.worker.compiled.stage_graphs import GraphsOfStages  # slow to import: fake tensors

    return GraphsOfStages(options)
