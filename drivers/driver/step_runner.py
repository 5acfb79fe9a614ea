"""Steps of one driver: a call is divided, prepared for each worker, posted, and its result put together from the answers."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pippy.drivers.base.errors import DriverError, MicrobatchError, StepError
from pippy.drivers.batch.divide import advising
from pippy.drivers.batch.divide_call import divide_call
from pippy.drivers.batch.division import Division
from pippy.drivers.batch.refusals import refuse_inputs
from pippy.drivers.batch.slices import SlicedCalls
from pippy.drivers.choice.auto import UNMEASURED, StepPurpose
from pippy.drivers.choice.given_limits import DividedCall, call_to_fit, fails_guard
from pippy.drivers.count.fake_errors import UncountedError
from pippy.drivers.count.optimizer_bytes import CountedOptimizer
from pippy.drivers.driver.check.check_step import StepAside, result_numbers, witness_of
from pippy.drivers.driver.check.comparisons import Budget, room
from pippy.drivers.driver.check.differences import Numbers
from pippy.drivers.driver.check.first_step import FirstStep
from pippy.drivers.driver.check.trial_steps import TrialBytes, TrialSteps, Tried
from pippy.drivers.driver.data import SentDatasets, check_no_columns, columns_in
from pippy.drivers.driver.steps.arrangement import Arrangement
from pippy.drivers.driver.steps.driver_arguments import StepSettings
from pippy.drivers.driver.steps.graphs import DriverGraphs, GraphPart, StepGraph, StepPlan
from pippy.drivers.driver.steps.prepared_step import StepRequest, prepare
from pippy.drivers.driver.steps.programs import DriverPrograms, SentProgram
from pippy.drivers.driver.steps.results import PostedStep, Results, asked_outputs
from pippy.drivers.model.model_on_workers import ModelOnWorkers
from pippy.drivers.placement.placed_pipe import PlacedHooks, PlacedPipe
from pippy.drivers.placement.replicas import RunningStatistics
from pippy.drivers.protocol.state import TensorLocation
from pippy.drivers.protocol.steps import Step, StepResult
from pippy.drivers.report.record import Recording
from pippy.drivers.report.step_data import batch_size
from pippy.drivers.session.command_log import PendingCommand
from pippy.drivers.session.driver_commands import Flags, Hooks
from pippy.ir.base.errors import PippyError
from pippy.ir.base.surroundings import Surroundings, refused_here
from pippy.ir.other_graphs import OtherGraph
from pippy.ir.pipe import Pipe, compiled_of, given_in_example

CountOf = Callable[[Pipe, Division], Any]
GraphCount = tuple[StepGraph, Division, Any]  # the graph, the micro-batches, and what was counted of them


class StepRunner:
    """Runs the steps of a Pipe whose ``model`` is on workers: those of the ``arrangement``, by its schedule.

    ``sliced`` divides the calls of a driver that cuts sequences into slices. The latest of the ``recordings`` notes the steps.
    ``first_check`` says how the first step is checked, if it is: whether buffers are compared as they are after the step, and
    within which budget.
    """

    def __init__(
        self,
        model: ModelOnWorkers,
        settings: StepSettings,
        arrangement: Arrangement,
        programs: DriverPrograms,
        sliced: SlicedCalls | None,
        recordings: Sequence[Recording],
        first_check: tuple[bool, Budget] | None,
    ) -> None:
        self.model, self.settings, self.programs, self.recordings = model, settings, programs, recordings
        self.ranks, self.placement = arrangement.ranks, arrangement.placement
        self.is_single, self._auto = arrangement.schedule.replicas == 1, arrangement.schedule.auto
        self.placed, self.commands, pipe, cluster = model.placed, model.commands, model.pipe, model.cluster
        self.compiled, self.workers = self.placed.compiled, cluster.workers
        self.session, self.device = cluster.session, torch.device(cluster.device_type)
        specs = settings.chunk_spec, settings.batch_dims, settings.mask
        first = StepGraph(0, pipe, self.placed, programs, given_in_example(pipe))
        self.graphs = DriverGraphs(first, specs, self._placed_alike)
        self.datasets = SentDatasets(self.compiled, self.commands, self.workers, settings.loss_reduction)
        self.hooks = PlacedHooks(pipe, self.placed)
        self._statistics = RunningStatistics(self.compiled, arrangement.schedule.replicas)
        self._sliced = sliced
        self._flags: Flags = {}  # of modules and parameters, when they were noted last
        self._has_run = False  # whether workers may have other buffers than the model in this process
        self._probed: set[tuple[int, int, bool, bool]] = set()  # kinds of steps whose outputs were checked
        self.first_steps: dict[int, FirstStep] = {}  # by the graph's number
        self._first_check = first_check
        self._check_of(first)

    def _check_of(self, graph: StepGraph) -> None:
        """Have the first steps of a graph checked, if the driver checks any."""
        if self._first_check is None:
            return
        settings, (by_step, budget) = self.settings, self._first_check
        given = graph.placed, graph.programs, self.commands, self.datasets, settings.timeout, self.device.type
        may_be_single = self.compiled.loss_module is not None and self.is_single
        of_loss = settings.loss_reduction, settings.single_loss, may_be_single
        witness = witness_of(self.model, graph.compiled, lambda: not self._has_run and self.model.stale.is_current)
        found = None if self.first_step is None else self.first_step.found
        fits = partial(self.trial_fits, graph)
        self.first_steps[graph.number] = FirstStep(TrialSteps(*given, by_step), witness, *of_loss, budget, fits, found)

    @property
    def first_step(self) -> FirstStep | None:
        """What checks the first steps of the Pipe's graph; None if nothing is checked."""
        return self.first_steps.get(0)

    def _placed_alike(self, other: OtherGraph, number: int, given: frozenset[str], why: str) -> StepGraph:
        """Another graph, with its stages on the same workers."""
        first, placed = self.graphs.all[0], self.placed
        replicas = placed.replicas
        own = PlacedPipe(compiled_of(other.pipe), replicas[0], placed.compile, replicas[1:], number, placed.buckets)
        programs = first.programs.of_graph(other.pipe, own)
        made = StepGraph(number, other.pipe, own, programs, given, why, other.held)
        self._check_of(made)
        return made

    @property
    def trains(self) -> bool:
        """Whether a step leaves gradients: there is a loss, and gradients are on."""
        return self.compiled.loss is not None and torch.is_grad_enabled()

    def forget(self, workers: Collection[int]) -> None:
        """Other processes are in the places of these workers: they have no data, and the next step is the first of them."""
        self.datasets.forget(workers)
        self._has_run = True
        self.graphs.lost()
        self._forget_checks()

    def _forget_checks(self) -> None:
        for each in self.first_steps.values():
            each.forget()

    def follow(self) -> None:
        """Have the next step follow what the script has changed, or raise. Nothing is sent if nothing has changed."""
        watch = self.model.watch
        if self._flags and not watch.has_changed():
            return
        before, compared = _settings(watch.settings), _compared_settings(watch.settings)
        watch.follow(self.model.pipe, self.compiled)
        self.model._check_written()
        self._statistics.check()
        watch.note()
        self.placed.set(watch.settings)
        self._flags = self.placed.flags()
        if _settings(watch.settings) != before:
            self.graphs.forget()  # their code may have the values of before
        if _compared_settings(watch.settings) != compared:
            self._forget_checks()

    def divided(self, chunks: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Division:
        """How the arguments of a call are cut."""
        settings = self.settings
        if self._sliced is not None:
            return self._sliced.divide(self.compiled, chunks, args, kwargs)
        return divide_call(self.compiled, chunks, args, kwargs, settings.chunk_spec, settings.batch_dims, settings.mask)

    def run(self, chunks: int | None, args: Sequence[Any], kwargs: dict[str, Any], outputs: Any) -> PostedStep:
        """Begin a step. One that may fail a guard of the model is waited for, and begun again by other graphs if it does."""
        outputs, kwargs = asked_outputs(self.compiled, outputs, args, kwargs)
        surroundings = surroundings_of("run")
        self.follow()
        fitted = None
        if self._auto is not None and self._auto.counts_bytes:
            fitted = self._fitted(args, kwargs)
            chunks = self._count_of_chunks(fitted) if chunks is None else chunks
        assert chunks is not None
        while True:
            call = self.request(surroundings, chunks, args, kwargs, outputs)
            plan = call.plan
            try:
                running = self._begin(call, chunks, fitted)
                if not plan.unsure:
                    return running
                running.result()
            except PippyError as error:
                failed = _failed_microbatch(error)
                if not plan.unsure or failed is None:
                    raise
                self.graphs.reject(plan, failed, error)
            else:
                self.graphs.accept(plan)
                return running

    def _count_of_chunks(self, fitted: DividedCall) -> int:
        """The number of micro-batches for a call that gives none. One row is one micro-batch, by whatever graph."""
        try:
            return self.programs.count_of_chunks(fitted, self.trains)
        except PippyError as error:
            if fitted.rows != 1 or not fails_guard(error):
                raise
            return 1

    def counted(self, chunks: int, args: Sequence[Any], kwargs: Mapping[str, Any], count: CountOf) -> GraphCount:
        """What ``count`` gives for the largest micro-batches of a call, by the graph that these go by."""
        while True:
            plan = self.planned(chunks, args, kwargs)
            part = max(plan.parts, key=lambda each: (plan.division.sizes or (0,) * each.end)[each.first])
            division = plan.inputs(part)
            try:
                return part.graph, division, count(part.graph.pipe, division)
            except PippyError as error:
                if not plan.unsure or not fails_guard(error):
                    raise
                self.graphs.reject(plan, part.first, error)

    def _begin(self, call: StepRequest, chunks: int, fitted: DividedCall | None) -> PostedStep:
        """Check a call, if it is the first of its kind, and send it."""
        plan, first_step = call.plan, self.first_steps.get(call.plan.graph.number)
        results = self.results(call, self.settings.output_spec)
        purpose, sent = self._programs_for(plan, chunks, call.trains, fitted)
        if call.trains:
            self._statistics.warn(chunks)
        if first_step is not None:
            how = first_step.how
            with advising(call.division):
                self._check_first(first_step, call, sent)
            if first_step.how is not how:  # the check has found what weighs the losses
                results = self.results(call, self.settings.output_spec)
        elif plan.is_of_other_rows:
            what = "without a loss" if self.compiled.loss is None else "with check=False"
            raise MicrobatchError(_OTHER_ROWS.format(why=plan.parts[-1].graph.why, what=what))
        unprobed = (plan.graph.number, chunks, call.trains, call.outputs is not None)
        record, is_one = self.recordings[-1] if self.recordings else None, len(plan.parts) == 1
        steps = self._prepared(
            call,
            sent,
            results,
            record=record is not None or purpose.record,
            count_memory=record is not None and record.memory,
            probe_outputs=is_one and unprobed not in self._probed and _can_probe(call, results),
            watch=first_step is not None and first_step.watches and call.trains,
        )

        def accept(answers: Mapping[int, StepResult]) -> None:
            results.accept(answers)
            if first_step is not None:
                first_step.check_choices_of(answers)
            self._probed.add(unprobed)

        self.session.wait_given_up()
        note = measured = None
        if record is not None:
            note = self._note(record, call, sent)
        if self._auto is not None and call.trains and plan.is_plain:
            measured = self._auto.begin(chunks, sent[0].lowered.program, self.ranks)
        posted, self._has_run = self._post(steps, call, accept), True
        if measured is not None:
            measured(partial(self.session.wait, posted))
        return PostedStep(self.session, posted, results, note)

    def _programs_for(
        self, plan: StepPlan, chunks: int, trains: bool, fitted: DividedCall | None = None
    ) -> tuple[StepPurpose, list[SentProgram]]:
        """What is measured in a step, and the program of each of its parts; workers are sent what they lack."""
        if plan.is_plain:
            purpose, sent = self.programs.for_step(chunks, trains, fitted)
            return purpose, [sent]
        for part in plan.parts:
            part.graph.load(self.commands)
        slices = plan.division.slices
        return UNMEASURED, [each.graph.programs.plain((each.end - each.first) // slices, trains) for each in plan.parts]

    def _note(
        self, record: Recording, call: StepRequest, sent: Sequence[SentProgram]
    ) -> Callable[[Mapping[int, StepResult]], None]:
        """What notes the answers of a recorded step, part by part."""
        names = [self.workers[rank] for rank in self.ranks]
        notes = [
            record.begin(
                its.lowered.program, self.ranks, names, batch_size(call.plan.inputs(part), part.graph.compiled)
            )
            for part, its in zip(call.plan.parts, sent)
        ]

        def note(answers: Mapping[int, StepResult]) -> None:
            for at, each in enumerate(notes):
                each({rank: (answer, *answer.then)[at] for rank, answer in answers.items()})

        return note

    def aside(self, call: StepRequest, outputs: bool, see: bool) -> StepAside:
        """A step of which nothing is to remain: random numbers and batch norms are the same for every row."""
        call = replace(call, outputs=outputs)
        chunks, plan = call.division.row_chunks, call.plan
        sent = (
            [self.programs.next(chunks, call.trains)]
            if plan.is_plain
            else self._programs_for(plan, chunks, call.trains)[1]
        )
        first_step = self.first_steps.get(plan.graph.number)
        if first_step is not None and call.trains:
            with suppress(MicrobatchError):  # the report says what differs
                self._check_first(first_step, call, sent)
        results = self.results(call, self.settings.output_spec if outputs else None)
        answers: list[Mapping[int, StepResult]] = []
        posted = self._post(self._prepared(call, sent, results, alike=True, see=see), call, results.accept)
        result = PostedStep(self.session, posted, results, answers.append).result()
        seen = [each for answer in answers[0].values() for each in answer.seen]
        return StepAside(result, results.weights, seen)

    def _check_first(self, first_step: FirstStep, call: StepRequest, sent: Sequence[SentProgram]) -> None:
        """Check a step, if none of its kind was checked. The witness leaves the model as it was; versions of tensors rise.

        Of steps without gradients, those are checked whose micro-batches go by other graphs than all of their rows may.
        """
        if not call.trains:
            if not call.plan.is_of_other_rows:
                return
            call = replace(call, trains=True)
            sent = self._programs_for(call.plan, call.division.row_chunks, True)[1]
        checked = first_step.checked
        try:
            with torch.enable_grad():
                first_step.check(call, partial(self._tried, first_step, call, sent))
        except BaseException:
            self.model.watch.note_numbers()
            raise
        if first_step.checked is not checked:
            self.model.watch.note_numbers()

    def _tried(
        self,
        first_step: FirstStep,
        call: StepRequest,
        sent: Sequence[SentProgram],
        division: Division,
        written: frozenset[str],
        follow: Collection[TensorLocation],
    ) -> Tried:
        """The step as a trial, on rows that are in this process. What is put together by a spec of the user's is left out."""
        more = bool(self.results(call, None).merges) and self.settings.output_spec is None
        call = replace(call, division=division, scale=None, outputs=more)
        results = self.results(call, None)
        flags, numbers = self.placed.flags(), self.commands.numbers
        random = None if numbers is None else numbers.next(call.trains)
        steps = {
            rank: replace(step, reduce=True, hooks=call.hooks.get(rank), flags=flags[rank], random=random)
            for rank, step in self._prepared(
                call, sent, results, alike=True, probe_outputs=_can_probe(call, results)
            ).items()
        }

        def result(answers: Mapping[int, StepResult]) -> Numbers:
            return result_numbers(results.accept(answers))

        return first_step.trials.of_step(steps, written, follow, result, results.weights)

    def request(
        self,
        surroundings: Surroundings,
        chunks: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        outputs: bool | None,
    ) -> StepRequest:
        """What a step is asked to do. Raises if an argument cannot be cut, or cannot be sent."""
        trains = self.trains
        refuse_inputs([*args, *kwargs.values()], trains)
        plan = self.planned(chunks, args, kwargs)
        hooks = self.hooks.now() if trains else self.commands.hooks
        scaler = self.model.recovery.scaler if trains else None
        scale = None if scaler is None else scaler.scale_of_steps
        return StepRequest(plan, plan.division, columns_in(args, kwargs), trains, outputs, surroundings, hooks, scale)

    def planned(self, chunks: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> StepPlan:
        """By which graphs a call goes."""
        if self._sliced is None:
            return self.graphs.plan(chunks, args, kwargs)
        division = self.divided(chunks, args, kwargs)
        return StepPlan((GraphPart(self.graphs.all[0], 0, division.chunks),), {0: division})

    def _prepared(
        self, call: StepRequest, sent: Sequence[SentProgram], results: Results, **how: Any
    ) -> dict[int, Step]:
        """The message for each worker, and before it the datasets that the worker loads from. ``how`` are fields of `Step`."""
        self._check_parts(call.plan)
        message = replace(call.message(sent[0], results.weights, call.trains and self._adds_up(call.hooks)), **how)
        told = self.commands.flags_to_send(self._flags, call.hooks)
        steps = prepare(call, message, sent, results, self.ranks, self.datasets, told)
        self.datasets.send(call.columns, {rank: step.inputs for rank, step in steps.items()})
        return steps

    def _check_parts(self, plan: StepPlan) -> None:
        """Raise if a step cannot go by several graphs."""
        what = "replicas=" if self.placed.replicas[1:] else "single_loss=" if self.settings.single_loss else ""
        if len(plan.parts) > 1 and what:
            raise MicrobatchError(_ONE_GRAPH.format(what=what, why=plan.parts[-1].graph.why))

    def _post(
        self, steps: Mapping[int, Step], call: StepRequest, accept: Callable[[Mapping[int, StepResult]], Any]
    ) -> PendingCommand:
        accept = accept if call.scale is None else self.commands.nonfinite.step(accept)
        reduce = any(step.reduce for step in steps.values())
        return self.commands.post_step(steps, call.trains, reduce, self.settings.timeout, call.surroundings, accept)

    def _adds_up(self, hooks: Hooks) -> bool:
        """Whether the next step adds up the gradients of copies at its end."""
        if self.hooks.of_copies(hooks):
            self.model.reduce_gradients()  # of the steps before, which these hooks have not seen
        return bool(self.placed.replicated) and (self.commands.last_before_update or self.hooks.of_copies(hooks))

    def _fitted(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DividedCall:
        """What is to fit into the memory of the workers, and is counted if it was not."""
        assert self._auto is not None
        check_no_columns((args, kwargs), f"schedule='auto' with {self._auto.limits.option}")

        def divided(chunks: int) -> Division:
            return self.divided(chunks, args, kwargs)

        return call_to_fit(self.model.pipe, (args, kwargs), divided, self.device, self._states(), self.placed.compile)

    def _states(self) -> list[CountedOptimizer]:
        return [each.counted() for each in self.model._optimizers]

    def trial_bytes(self, graph: StepGraph) -> TrialBytes:
        """What counts the bytes of trials."""
        return TrialBytes(graph.pipe, self.placement, self.device)

    def trial_fits(self, graph: StepGraph, rows: Division) -> bool:
        """Whether a trial with these rows keeps the limit of bytes."""
        if self._auto is None or not self._auto.counts_bytes:
            return True
        return self.trial_bytes(graph).fit(rows, self._auto.limits, self._states())

    def witness_bytes(self, graph: StepGraph, division: Division) -> int:
        """The bytes that the check of the first step takes in this process."""
        first_step = self.first_steps.get(graph.number)
        witness = None if first_step is None else first_step.witness
        return 0 if witness is None else self.trial_bytes(graph).of_witness(division, room(witness.device))

    def results(self, call: StepRequest, output_spec: Any) -> Results:
        """What puts together the result of a call."""
        graph = call.plan.graph
        how = self.settings.loss_reduction if self.first_step is None else self.first_step.how
        given = output_spec, how, self.settings.single_loss, call.trains, call.outputs
        return Results(graph.compiled, graph.placed.value_names, call.division, *given, call.plan.renames())


_ONE_GRAPH = (
    "forward goes on in another way for some micro-batches than for others, and a driver with {what} runs them all alike: "
    "{why}\nGive a mini-batch that is cut into equal micro-batches (drop_last=True of a DataLoader), other chunks, or leave "
    "{what} out"
)
_OTHER_ROWS = (
    "forward depends on the number of rows: {why}\nWhether micro-batches give what the whole mini-batch gives cannot be "
    "compared {what}.\nWhat to do: run one micro-batch, chunks=1"
)


def _failed_microbatch(error: PippyError) -> int | None:
    """The micro-batch for which a stage has found that forward would go on in another way; None for another error."""
    if isinstance(error, StepError):
        failure = error.failure
        return failure.microbatch if failure is not None and failure.guard else None
    return 0 if isinstance(error, UncountedError) and fails_guard(error) else None  # the first is the largest


def _settings(settings: Mapping[str, Mapping[Any, Any]]) -> dict[Any, Any]:
    """What was followed of a script."""
    return {(stage, key): value for stage, changed in settings.items() for key, value in changed.items()}


def _compared_settings(settings: Mapping[str, Mapping[Any, Any]]) -> dict[Any, Any]:
    """What was followed, as far as the check of a step depends on it: of a float, that it changes, as rates do."""
    return {key: type(value) if isinstance(value, float) else value for key, value in _settings(settings).items()}


def _can_probe(call: StepRequest, results: Results) -> bool:
    """Whether workers can look which returned values have as many rows as a micro-batch by chance."""
    division = call.division
    return results.merges and division.chunks > 1 and division.slices == 1 and not division.mask


def surroundings_of(method: str) -> Surroundings:
    """What surrounds the call of a method of a driver. Raises if it has no effect on workers."""
    refused = refused_here()
    if refused is not None:
        raise DriverError(
            f"driver.{method}() is called inside of {refused.name}, which has no effect on workers, where the "
            f"stages run; {refused.remedy}"
        )
    return Surroundings.current()
