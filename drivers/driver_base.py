"""What all drivers share: one script runs a Pipe on the workers of a cluster.

A driver makes the schedule's program for as many micro-batches as are asked for, lowers it for its Pipe, sends every
worker its part, once, and from then on one message per worker for each step.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from pippy.drivers.auto import Auto, Part, auto_placement
from pippy.drivers.batches.division import divide_call
from pippy.drivers.clusters.cluster import Cluster, current_cluster
from pippy.drivers.control.dispatch import Dispatch, Posted
from pippy.drivers.control.messages import (
    Fetch,
    GradientNorms,
    ReduceGradients,
    ScaleGradients,
    Step,
    StepResult,
    Store,
    TensorLocation,
    Unload,
)
from pippy.drivers.errors import DriverError
from pippy.drivers.interrupts import uninterrupted
from pippy.drivers.lowering.lower import Lowered, lower
from pippy.drivers.optimizer import PipelineOptimizer
from pippy.drivers.recording.record import Recording
from pippy.drivers.results import Results
from pippy.drivers.schedules import Program, make_schedule
from pippy.drivers.schedules.programs.instructions import Op
from pippy.drivers.schedules.programs.placement import Placement
from pippy.drivers.shipping import Shipment
from pippy.drivers.workers.compiling import compile_options
from pippy.ir.pipe import Pipe, compiled_of
from pippy.ir.trees import describe, tensors

_PLAIN = Part("")  # a step that nothing is to be learnt from


class RunningStep:
    """A step that was dispatched with `run_async`."""

    def __init__(
        self,
        dispatch: Dispatch,
        posted: Posted,
        results: Results,
        note: Callable[[Mapping[int, StepResult]], None] | None,
    ) -> None:
        self._dispatch, self._posted, self._results, self._note = dispatch, posted, results, note

    def result(self) -> Any:
        """Wait for the step, and give what `run` would have given."""
        answers = self._dispatch.wait(self._posted)
        self.peak_live = {worker: answer.peak_live for worker, answer in answers.items()}
        if self._note is not None:
            self._note(answers)
        return self._results.assemble({name: v for answer in answers.values() for name, v in answer.values.items()})


class PipelineDriverBase:
    """Runs a Pipe on a cluster by a schedule. Take a subclass, or `PipelineDriver` for any schedule or program.

    ``cluster`` is the one in force if it is left out. ``world_size`` says how many of its workers to use, the first
    ones, or ``all_ranks`` which. What the other arguments mean is written in docs/running.md.

    >>> PipelineDriverBase(7)
    Traceback (most recent call last):
    pippy.drivers.errors.DriverError: a driver runs a Pipe, and this is a int; make one: pipeline(model, loss_fn)
    """

    schedule: str | Program
    _auto: Auto | None = None  # chooses the schedule

    def __init__(
        self,
        pipe: Pipe,
        cluster: Cluster | None = None,
        *,
        world_size: int | None = None,
        all_ranks: Sequence[int] | None = None,
        chunk_spec: Sequence[Any] | Mapping[str, Any] | None = None,
        batch_dims: Sequence[int | None] | Mapping[str, int | None] | None = None,
        output_spec: Any = None,
        loss_reduction: str | Callable[..., Any] | None = None,
        single_loss: bool = False,
        step_timeout: float | None = None,
        compile: bool | Mapping[str, Any] | None = None,
        out_of_order: bool | int = False,
        _debug_mask_minibatches: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(pipe, Pipe):
            raise DriverError(
                f"a driver runs a Pipe, and this is a {type(pipe).__name__}; make one: pipeline(model, loss_fn)"
            )
        if cluster is not None and not isinstance(cluster, Cluster):
            raise DriverError(
                f"cluster={cluster!r} is a {type(cluster).__name__}; give what `with local_cluster(n) as cluster:` gives, and "
                "numbers of workers as world_size="
            )
        self.pipe, self.compiled = pipe, compiled_of(pipe)
        self.cluster = current_cluster() if cluster is None else cluster
        self.chunk_spec, self.batch_dims, self.output_spec = chunk_spec, batch_dims, output_spec
        self.loss_reduction, self.single_loss = loss_reduction, single_loss
        self.step_timeout, self.out_of_order = _seconds(step_timeout), _overtaking(out_of_order)
        self.mask, self.options = _debug_mask_minibatches, options
        self.compile = compile_options(compile)
        chosen = self._chosen_workers(world_size, all_ranks)
        first = self._make(chunks=1 if isinstance(self.schedule, str) else self.schedule.chunks, workers=len(chosen))
        self.placement = first.placement
        if self.placement.stages != self.compiled.num_stages:
            raise DriverError(
                f"the {'placement' if isinstance(self.schedule, str) else 'program'} is for {self.placement.stages} stages, "
                f"and the Pipe has {self.compiled.num_stages}; give each of them a worker"
            )
        self.ranks = tuple(chosen[: self.placement.workers])
        if self._auto is not None:
            self._auto.check(self.placement)
        self._shipment = Shipment(
            self.compiled, [self.ranks[worker] for worker in self.placement.worker_of], self.compile
        )
        self._check_single_loss()
        self._programs: dict[tuple[int, bool | str], tuple[int, Lowered]] = {}
        self._optimizers = 0
        self._zero = self._unreduced = False
        self._runs = self._runs_before_update = 0
        self._recording: Recording | None = None
        self._flags = False  # whether the workers are to be told the training flags
        self._flags_told = self._training_flags()
        self.dispatch = self.cluster.dispatch
        self.number = self.cluster.next_driver()
        try:
            self._call(self._shipment.loads())
        except BaseException:  # some workers may hold their stages already
            self.dispatch.forget(self.number, self._shipment.workers)
            raise
        self._finalizer = weakref.finalize(self, self.dispatch.forget, self.number, self._shipment.workers)
        self._finalizer.atexit = False

    # The workers and the program

    def _chosen_workers(self, world_size: int | None, all_ranks: Sequence[int] | None) -> list[int]:
        there = len(self.cluster)
        if all_ranks is not None:
            ranks = list(all_ranks)
            wrong = [rank for rank in ranks if not (isinstance(rank, int) and 0 <= rank < there)]
            if wrong or len(set(ranks)) != len(ranks) or not ranks:
                raise DriverError(f"all_ranks={ranks}: name workers of the cluster, 0 to {there - 1}, each once")
            if world_size is not None and world_size != len(ranks):
                raise DriverError(f"world_size={world_size} and all_ranks={ranks} disagree; give one of them")
            return ranks
        if world_size is None:
            return list(range(min(there, self.compiled.num_stages)))
        if not isinstance(world_size, int) or not 0 < world_size <= there:
            raise DriverError(f"world_size={world_size!r}: the cluster has {there} workers; ask for 1 to {there}")
        return list(range(world_size))

    def _make(self, chunks: int, workers: int) -> Program:
        """The schedule for a number of micro-batches, not lowered yet."""
        if isinstance(self.schedule, Program):
            if self.schedule.workers > workers:
                raise DriverError(
                    f"the program is for {self.schedule.workers} workers, and there are {workers}; start a larger cluster"
                )
            if chunks != self.schedule.chunks:
                raise DriverError(
                    f"chunks={chunks}, and the program was made for {self.schedule.chunks}; run it with as many, or make "
                    "another program"
                )
            return self.schedule
        stages = self.compiled.num_stages
        if workers > stages:
            raise DriverError(
                f"{workers} workers for {stages} stages; name {stages} workers, or cut the model into more stages"
            )
        per_worker = [stages // workers + (worker < stages % workers) for worker in range(workers)]
        if self._auto is not None:
            return make_schedule("1f1b", workers=workers, chunks=chunks, **auto_placement(self.options, per_worker))
        dealt = (
            {} if isinstance(self.options.get("placement"), Mapping | Placement) else {"stages_per_worker": per_worker}
        )
        return make_schedule(self.schedule, workers=workers, chunks=chunks, **{**dealt, **self.options})

    def _check_single_loss(self) -> None:
        if not self.single_loss:
            return
        if self.mask:
            raise DriverError(
                "single_loss=True and _debug_mask_minibatches=True do not go together; leave one of them out"
            )
        if self._shipment.loss_stage < 0:
            raise DriverError("single_loss=True, and the Pipe has no loss function; give one: pipeline(model, loss_fn)")
        example = self._make(
            chunks=3 if isinstance(self.schedule, str) else self.schedule.chunks, workers=len(self.ranks)
        )
        worker = self.placement.worker_of[self._shipment.loss_stage]
        ops = [each.op for each in example.computations[worker] if each.stage == self._shipment.loss_stage]
        if sorted(ops, key=lambda op: op != Op.FORWARD) != ops:
            raise DriverError(
                f"single_loss=True needs all forwards before the loss, and {example.schedule} begins backwards earlier; "
                "use PipelineDriverFillDrain"
            )

    def program(self, chunks: int) -> Program:
        """The program that the workers run for ``chunks`` micro-batches: print it, draw it, simulate it.

        With ``schedule="auto"``, the one that the next step runs.
        """
        trains = self._trains()
        if self._auto is None or not trains:
            return self._lowered(chunks, trains)[1].program
        part, program = self._auto.peek(chunks, partial(self._make, chunks, len(self.ranks)))
        return self._sent((chunks, part.name), program)[1].program

    def _trains(self) -> bool:
        return self.compiled.loss is not None and torch.is_grad_enabled()

    def _lowered(self, chunks: int, trains: bool) -> tuple[int, Lowered]:
        key = chunks, trains
        if key in self._programs:
            return self._programs[key]
        program = self._make(chunks, len(self.ranks))
        if not trains:
            program = make_schedule("forward_only", workers=program.workers, chunks=chunks, placement=program.placement)
        return self._sent(key, program)

    def _sent(self, key: tuple[int, bool | str], program: Program) -> tuple[int, Lowered]:
        """A program, lowered, and its number on the workers; it is sent the first time."""
        if key not in self._programs:
            lowered = lower(self.pipe, program)
            number = len(self._programs)
            overtaking = False if key[1] is False else self.out_of_order
            _refuse_too_low(overtaking, lowered.program)
            self._call(self._shipment.programs(number, lowered, self.single_loss, overtaking))
            self._programs[key] = number, lowered
        return self._programs[key]

    # Steps

    def run(self, chunks: int, *args: Any, **kwargs: Any) -> Any:
        """Run a mini-batch through the pipeline in ``chunks`` micro-batches.

        Takes what the Pipe takes. Gives the loss (or what the model returns), with gradients left on the workers, or for a
        Pipe without a loss, or under `torch.no_grad()`, the outputs.
        """
        try:
            return self.run_async(chunks, *args, **kwargs).result()
        except KeyboardInterrupt as interrupt:
            self.dispatch.stop(interrupt)
            raise

    def run_async(self, chunks: int, *args: Any, **kwargs: Any) -> RunningStep:
        """Like `run`, but return at once; ``.result()`` of what this gives waits for the step."""
        if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
            raise DriverError(
                f"chunks={describe(chunks)}: give the number of micro-batches first, as in driver.run(4, x, target)"
            )
        self.compiled.check_mode()
        trains = self._trains()
        if trains:
            _refuse_inputs_with_gradients([*args, *kwargs.values()])
        division = divide_call(self.compiled, chunks, args, kwargs, self.chunk_spec, self.batch_dims, self.mask)
        part = _PLAIN
        if self._auto is None or not trains:
            number, lowered = self._lowered(chunks, trains)
        else:
            part, program = self._auto.next(chunks, partial(self._make, chunks, len(self.ranks)))
            number, lowered = self._sent((chunks, part.name), program)
        results = Results(self, division)
        if (flags := self._training_flags()) != self._flags_told:  # by the driver, the Pipe or the model
            self._flags, self._flags_told = True, flags
        reduce = trains and bool(lowered.program.replicated) and self._runs + 1 == self._runs_before_update
        steps = {
            rank: Step(
                number,
                trains,
                division.only([name for name, workers in lowered.inputs.items() if worker in workers]),
                results.weights,
                flags[rank] if self._flags else None,
                reduce,
                self._recording is not None or part.record,
                part.weigh,
            )
            for worker, rank in enumerate(self.ranks)
        }
        self.dispatch.let_go(self.step_timeout)
        note = None
        if self._recording is not None:
            names = [self.cluster.workers[rank] for rank in self.ranks]
            note = self._recording.begin(lowered.program, self.ranks, names)
        measured = None
        if self._auto is not None and trains:
            measured = self._auto.begin(chunks, lowered.program, self.ranks)
        with uninterrupted():
            posted = self._post(steps, self.step_timeout)
            self._unreduced = not reduce and (self._unreduced or (trains and bool(self._shipment.replicated)))
            self._runs += 1
        if measured is not None:
            measured(partial(self.dispatch.wait, posted))
        return RunningStep(self.dispatch, posted, results, note)

    @contextmanager
    def record(self, limit: int = 100) -> Iterator[Recording]:
        """Note what each worker does when in the steps that begin inside; the latest ``limit`` are kept.

        docs/recording.md says what a Recording shows.
        """
        before, self._recording = self._recording, Recording(limit)
        try:
            yield self._recording
        finally:
            self._recording = before

    def train(self, mode: bool = True) -> "PipelineDriverBase":
        """Put all stages in training mode."""
        self.pipe.train(mode)
        return self

    def _training_flags(self) -> dict[int, dict[str, tuple[bool, ...]]]:
        return {rank: self._shipment.flags(rank) for rank in self._shipment.workers}

    def eval(self) -> "PipelineDriverBase":
        """Put all stages in evaluation mode."""
        return self.train(False)

    # Gradients

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._zero, self._unreduced = True, False
        self._updated()

    def _updated(self) -> None:
        """Note how many steps made one update: the gradients of the next update are added up in the last of as many."""
        if self._runs:
            self._runs_before_update, self._runs = self._runs, 0

    def _call_reducing(self, command: Callable[[bool], Mapping[int, Any]]) -> dict[int, Any]:
        """Send a command that is told whether the gradients of replicated parameters are still to be added up first."""
        values = self._call(command(self._unreduced))
        self._unreduced = False
        return values

    def reduce_gradients(self) -> None:
        """Add up the gradients of replicated parameters, if that was not done; whatever reads gradients does it first."""
        if self._unreduced:
            self._call_reducing(lambda _: dict.fromkeys(self._shipment.workers, ReduceGradients()))

    def get_grad(self, name: str) -> torch.Tensor | None:
        """The gradient of the parameter that the user calls ``name``, fetched from its worker."""
        return self.gradients([name])[name]

    def gradients(self, names: Sequence[str] | None = None) -> dict[str, torch.Tensor | None]:
        """The gradients of all parameters, or of some, by the user's names."""
        wanted = [name for name, _ in self.pipe.named_parameters()] if names is None else list(names)
        self.reduce_gradients()
        return self._fetch(wanted, gradients=True)

    def _fetch(self, names: Sequence[str], gradients: bool = False) -> dict[str, Any]:
        by_worker: dict[int, dict[str, TensorLocation]] = {}
        found: dict[str, Any] = {}
        for name in names:
            places = self._shipment.places(name)
            found[name] = None
            if places:
                by_worker.setdefault(places[0][0], {})[name] = places[0][1]
        bodies = {worker: Fetch(tuple(places.values()), gradients) for worker, places in by_worker.items()}
        for worker, tensors_ in self._call(bodies).items():
            found.update(zip(by_worker[worker], tensors_))
        return found

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their norm, taken over the whole model, is at most ``max_norm``; gives the norm.

        As `torch.nn.utils.clip_grad_norm_` for the whole model; a replicated parameter counts once.
        """
        total = self.grad_norm(norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise DriverError(
                f"the norm of the gradients is {total.item()}; pass error_if_nonfinite=False to clip anyway"
            )
        factor = float(torch.clamp(max_norm / (total + 1e-6), max=1.0))  # min() would take 1.0 for a norm that is NaN
        self._call(dict.fromkeys(self._shipment.workers, ScaleGradients(factor)))
        return total

    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of all gradients together."""
        owners: dict[int, dict[str, TensorLocation]] = {worker: {} for worker in self._shipment.workers}
        names = [name for name, _ in self.pipe.named_parameters()]
        for name in names:
            for worker, place in self._shipment.places(name)[:1]:
                owners[worker][name] = place
        wanted = {worker: tuple(places.values()) for worker, places in owners.items()}
        answers = self._call_reducing(
            lambda reduce: {w: GradientNorms(own, norm_type, reduce) for w, own in wanted.items()}
        )
        norms: dict[str, Any] = {}
        for worker, values in answers.items():
            norms.update(zip(owners[worker], values))
        there = [norms[name] for name in names if norms.get(name) is not None]
        return torch.linalg.vector_norm(torch.stack(there), norm_type) if there else torch.tensor(0.0)

    # Parameters

    def state_dict(self) -> dict[str, Any]:
        """The model's state dict, with the parameters and buffers as they are on the workers."""
        state = self.pipe.state_dict()
        used = [name for name, value in state.items() if isinstance(value, torch.Tensor) and self._places(name)]
        fetched = self._fetch(used)
        for name, value in state.items():
            state[name] = fetched.get(name, value)
        return state

    def _places(self, name: str) -> list[tuple[int, TensorLocation]]:
        known = self.compiled.qualnames.canonical
        return self._shipment.places(name) if name in known else []

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a state dict, in the model's names, into the Pipe and into all workers."""
        loaded = self.pipe.load_state_dict(state_dict, strict)
        stores: dict[int, dict[TensorLocation, torch.Tensor]] = {worker: {} for worker in self._shipment.workers}
        for name in state_dict:
            for worker, place in self._places(name):
                stores[worker][place] = state_dict[name].detach().cpu()
        self._call({worker: Store(tensors_) for worker, tensors_ in stores.items()})
        return loaded

    def instantiate_optimizer(self, optimizer_class: type, *args: Any, **kwargs: Any) -> PipelineOptimizer:
        """An optimizer of torch's, on all workers, for the parameters where they are.

        Takes what the class takes after its parameters. Groups are given as ``param_groups=[{"params": names, ...}]``, with
        names, patterns as for a shell, or parameters of the model; parameters that no group names are in the first group.
        """
        self._optimizers += 1
        return PipelineOptimizer(self, self._optimizers, optimizer_class, args, kwargs)

    # Messages

    def _prepared(self, bodies: Mapping[int, Any]) -> tuple[Mapping[int, Any], bool, Callable[[], None]]:
        """A command, with what goes along, and what is to be called if it is given up."""
        if not self._finalizer_alive():
            raise DriverError("this driver was closed; make another")
        if self._zero:
            bodies = {**dict.fromkeys(self._shipment.workers), **bodies}
        return bodies, self._zero, partial(self._undo, self._zero, self._flags, self._unreduced, self._runs)

    def _undo(self, zero: bool, flags: bool, unreduced: bool, runs: int) -> None:
        """A command was given up. Some workers may have dropped the gradients as it said, so the next one says it again."""
        self._flags = self._flags or flags
        if not self._zero:
            self._zero, self._unreduced, self._runs = zero, unreduced and not zero, runs

    def _post(self, bodies: Mapping[int, Any], limit: float | None) -> Posted:
        bodies, zero, undo = self._prepared(bodies)
        posted = self.dispatch.post(self.number, bodies, zero, undo, limit)
        self._zero = self._flags = False
        return posted

    def _finalizer_alive(self) -> bool:
        return not hasattr(self, "_finalizer") or self._finalizer.alive

    def _call(self, bodies: Mapping[int, Any]) -> dict[int, Any]:
        if self.dispatch.outstanding:  # before the gradients are dropped, or what is to be undone is noted
            self.dispatch.wait(self.dispatch.outstanding[-1])
        told, zero, undo = self._prepared(bodies)
        self._zero = False
        answers = self.dispatch.call(self.number, told, zero, undo)
        return {worker: answers[worker] for worker in bodies}  # others were told to drop their gradients

    def close(self) -> None:
        """Drop the stages, programs and optimizers from the workers; the cluster goes on."""
        if self._finalizer.detach() and not self.dispatch.control.broken:
            self.dispatch.call(self.number, dict.fromkeys(self._shipment.workers, Unload()))

    def __reduce__(self) -> Any:
        raise TypeError(
            "a driver belongs to its cluster's controller and cannot be pickled; pickle driver.state_dict()"
        )


def _seconds(limit: Any) -> float | None:
    if limit is None or (isinstance(limit, int | float) and not isinstance(limit, bool) and limit > 0):
        return limit
    raise DriverError(f"step_timeout={limit!r}: give how many seconds a step may take, or None for no limit")


def _overtaking(given: Any) -> bool | int:
    if isinstance(given, bool) or (isinstance(given, int) and given > 0):
        return given
    raise DriverError(
        f"out_of_order={describe(given)}: give True to hold no more micro-batches than the schedule does, or the most that a "
        "worker may hold"
    )


def _refuse_too_low(out_of_order: bool | int, program: Program) -> None:
    peak = max(program.peak_live)
    if not isinstance(out_of_order, bool) and out_of_order < peak:
        raise DriverError(
            f"out_of_order={out_of_order}: worker {program.peak_live.index(peak)} holds up to {peak} micro-batches of a stage "
            f"in {program.schedule} with {program.chunks} micro-batches, in order; give at least {peak}, or True"
        )


def _refuse_inputs_with_gradients(given: Sequence[Any]) -> None:
    wanting = [describe(tensor) for tensor in tensors(given) if tensor.requires_grad]
    if wanting:
        raise DriverError(
            f"an input, {wanting[0]}, requires a gradient, and the gradients of inputs stay on the workers; detach it, or "
            "make it a parameter of the model"
        )
