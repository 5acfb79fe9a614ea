"""What all drivers share: one script runs a Pipe on the workers of a cluster.

A driver makes the schedule's program for as many micro-batches as are asked for, lowers it for its Pipe, and sends each
worker its part, once. From then on each step takes one message for each worker.

    PipelineDriverBase ──▶ steps         a call divided, prepared, posted, and its result put together
        arguments,     ──▶ programs      made by the schedule, lowered, sent, kept
        run, record    ──▶ commands      what the workers are told, and the state of their gradients
                       ──▶ placed        the Pipe with its stages placed on workers; the others use it, too

What a driver does with the parameters, gradients and optimizers of its model is in model_on_workers.py.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from html import escape
from os import PathLike
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from pippy.drivers.base.errors import DriverError
from pippy.drivers.batch.division import Division
from pippy.drivers.batch.items import next_call
from pippy.drivers.choice.auto import Auto
from pippy.drivers.count.driver_memory import DriverMemory
from pippy.drivers.count.optimizer_bytes import counted_optimizer
from pippy.drivers.count.pipe_bytes import count_pipe
from pippy.drivers.driver.check.check_step import StepCheck, checked_model
from pippy.drivers.driver.check.comparisons import Budget
from pippy.drivers.driver.check.report import Checked, CheckReport
from pippy.drivers.driver.data import check_no_columns
from pippy.drivers.driver.profile import DriverProfile, WorkerProfiles, profile_options, trace_path
from pippy.drivers.driver.step_runner import StepRunner, surroundings_of
from pippy.drivers.driver.steps.arrangement import Arrangement, Arrangements, WorkersToGoOnWith, check_fewer
from pippy.drivers.driver.steps.driver_arguments import (
    StepSettings,
    check_chunks,
    check_options,
    checked_buffers,
    checked_checkpoint,
    checked_out_of_order,
    chosen_workers,
    in_slices_of,
)
from pippy.drivers.driver.steps.graphs import StepGraph
from pippy.drivers.driver.steps.programs import DriverPrograms, RequestedSchedule
from pippy.drivers.driver.steps.results import PostedStep
from pippy.drivers.driver.steps.updates import check_trains, checked_updates, evaluating, loss_alone
from pippy.drivers.engines.cluster import Cluster, DriverPlaces, current_cluster
from pippy.drivers.generation.generation import TokenGeneration
from pippy.drivers.model.model_on_workers import ModelOnWorkers
from pippy.drivers.model.optimizers.stale_models import watch_gradients
from pippy.drivers.model.recovery.recovery import NotReplaced
from pippy.drivers.placement.placed_pipe import PlacedPipe
from pippy.drivers.placement.replicas import Topology
from pippy.drivers.plan import Program
from pippy.drivers.plan.cost.held_bytes import PipeBytes
from pippy.drivers.plan.passes.rewrites import has_halves
from pippy.drivers.protocol.compile_options import compile_options
from pippy.drivers.protocol.programs import AskCompiled
from pippy.drivers.report.model_names import ModelNames, model_names
from pippy.drivers.report.record import Recording
from pippy.drivers.session.driver_commands import DriverCommands, NonFiniteGradients, first_numbers, in_turn
from pippy.ir.base import source
from pippy.ir.base.public_calls import check_amount, placing_words
from pippy.ir.base.readable import brief, count_with_noun, html_table, shortened
from pippy.ir.pipe import Pipe, compiled_of, example_of, follow_changes, follow_training_flags, watch_of
from pippy.ir.show.content import content_of, table_cells

_log = logging.getLogger(__name__)


@placing_words(
    "PipelineDriver1F1B(pipe, cluster)",
    {"run": "driver.run(chunks, x, target)"},
    owner="driver",
)
class PipelineDriverBase(ModelOnWorkers):
    """Runs a Pipe on a cluster by a schedule. Take a subclass, or `PipelineDriver` for any schedule or program.

    ``cluster`` is the one in force if it is left out. ``world_size`` says how many of its workers to use, the first
    ones, or ``all_ranks`` which. What the other arguments mean is written in docs/running.md.

    >>> PipelineDriverBase(7)
    Traceback (most recent call last):
    pippy.drivers.base.errors.DriverError: a driver runs a Pipe, and this is a int; make one: pipeline(model, loss_fn)
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
        compile: bool | str | Callable[..., Any] | Mapping[str, Any] | None = None,
        out_of_order: bool | int = False,
        checkpoint: str | Mapping[int, str] = "never",
        keyed_random: bool | int = True,
        replicas: int = 1,
        slices: int = 1,
        check: bool | float | str = True,
        buffers: str | None = None,
        _debug_mask_minibatches: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(pipe, Pipe):
            raise DriverError(
                f"a driver runs a Pipe, and this is a {type(pipe).__name__}; make one: pipeline(model, loss_fn)"
            )
        if cluster is not None and not isinstance(cluster, Cluster):
            raise DriverError(
                f"cluster={brief(cluster)} is a {type(cluster).__name__}; give what `with cluster(n) as workers:` gives, and "
                "numbers of workers as world_size="
            )
        check_options(type(self), self.schedule, options)
        self.cluster = current_cluster() if cluster is None else cluster
        cutting = chunk_spec, batch_dims, output_spec
        what = "how many seconds a step may take"
        check_amount("step_timeout", step_timeout, what, DriverError, none="for no limit")
        settings = StepSettings(*cutting, loss_reduction, single_loss, _debug_mask_minibatches, step_timeout)
        pipe, self._settings, self._sliced = in_slices_of(pipe, slices, settings, compile, self._auto)
        compiled = compiled_of(pipe)
        self._out_of_order, by_step = checked_out_of_order(out_of_order), checked_buffers(buffers) != "per_microbatch"
        budget = Budget.of(check)
        self._recordings: list[Recording] = []
        self._first_check = (by_step, budget) if budget is not None and compiled.loss is not None else None
        compile_with, numbers = compile_options(compile), first_numbers(keyed_random)
        there, gone = len(self.cluster), self.cluster.gone
        chosen = chosen_workers(there, compiled.num_stages, world_size, all_ranks, replicas, gone)
        checkpoint = checked_checkpoint(checkpoint, compiled.num_stages)
        schedule = RequestedSchedule(
            self.schedule, options, compiled.num_stages, self._auto, checkpoint, replicas, slices
        )
        self._arrangements = Arrangements(compiled, schedule, chosen, single_loss, _debug_mask_minibatches)
        ranks = self._arrangements.first.replicas
        follow_changes(pipe)
        watch = watch_of(pipe).for_driver()
        watch.follow(pipe, compiled)
        placed = PlacedPipe(compiled, ranks[0], compile_with, ranks[1:])
        self.session = self.cluster.session
        self.number = self.cluster.next_driver()
        nonfinite = NonFiniteGradients(placed, [name for name, _ in pipe.named_parameters()])
        commands = DriverCommands(
            self.session, self.number, placed.workers, bool(placed.replicated), nonfinite, numbers
        )
        super().__init__(pipe, placed, commands, self.cluster, watch)
        self._arrange(self._arrangements.first)
        commands.load(placed.loads(), placed.flags())
        watch_gradients(dict(pipe.named_parameters()), commands)
        self.cluster.open_drivers[self.number] = self._places  # a weak reference
        _log.info("%r", self)

    def _arrange(self, arrangement: Arrangement) -> None:
        """Have what depends on the workers and the schedule. The stages are placed."""
        schedule, settings = arrangement.schedule, self._settings
        self._arrangement, self.placement, self.ranks = arrangement, arrangement.placement, arrangement.ranks
        self.schedule, self.replicas, self._auto = schedule.schedule, schedule.replicas, schedule.auto
        given_for_it = self.placement == self._arrangements.first.placement
        limit = self._out_of_order if given_for_it else bool(self._out_of_order)
        to_send = self.placed, self.commands, self.cluster.hosts_of, self.placement.workers
        self.programs = DriverPrograms(self.pipe, schedule, *to_send, settings.single_loss, limit)
        how = self._sliced, self._recordings, self._first_check
        self.steps = StepRunner(self, settings, arrangement, self.programs, *how)
        self._generation = TokenGeneration(self.pipe, self.placed, self.commands, arrangement.pipelines[0])
        self._places = DriverPlaces.of(type(self).__name__, self.placed.replicas)

    def __repr__(self) -> str:
        schedule = self.schedule if isinstance(self.schedule, str) else repr(self.schedule)
        workers = shortened(", ".join(self.cluster.workers[rank] for rank in self.ranks), 200)
        stages = count_with_noun(self.compiled_pipe.num_stages, "stage")
        stages += f" in {self.replicas} replicas" * (self.replicas > 1)
        used = self.cluster.gone.union(self.ranks)
        idle = ", ".join(each for rank, each in enumerate(self.cluster.workers) if rank not in used)
        unused = f"; none on {shortened(idle, 200)}" if idle else ""
        return f"<{type(self).__name__}: {schedule}, {stages} on {workers}{unused}>"

    def __str__(self) -> str:
        """The driver, and the graphs of the model, if it has made others."""
        others = self.graphs if len(self.graphs) > 1 else ()
        return "\n".join([repr(self), *map(str, others)])

    @property
    def graphs(self) -> tuple[StepGraph, ...]:
        """The graphs of the model that steps go by. Print one to see the guard that others failed; ``graph.pipe`` is its Pipe.

        >>> class Net(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return super().forward(x) if len(x) == 1 else super().forward(x) * 1
        >>> from pippy import PipelineDriver1F1B, cluster, pipeline
        >>> example = torch.ones(4, 2), torch.ones(4, 2)
        >>> pipe = pipeline(Net(2, 2), torch.nn.MSELoss(), num_stages=1, split="parameters", example_args=example)
        >>> with cluster(1, threads=1) as workers:
        ...     driver = PipelineDriver1F1B(pipe, workers)
        ...     losses = [driver.run(1, torch.ones(rows, 2), torch.ones(rows, 2)) for rows in (4, 1)]
        >>> len(driver.graphs)
        2
        """
        return tuple(self.steps.graphs.all)

    def _repr_html_(self) -> str:
        """What a notebook shows: the stages, each with its worker."""
        head, *stages, total = table_cells(content_of(self.compiled_pipe))
        workers = [
            ", ".join(self.cluster.workers[rank] for rank in self.placed.workers_of(name)) for name, *_ in stages
        ]
        rows = [[each[0], worker, *each[1:]] for each, worker in zip([head, *stages, total], ["worker", *workers, ""])]
        return f"<div>{escape(repr(self))}{html_table(rows, words=(0, 1, -1), total=True)}</div>"

    @property
    def topology(self) -> Topology:
        """Which worker of the cluster holds which stage of which replica of the pipeline: print it.

        >>> from pippy import Pipe, PipelineDriver1F1B, local_cluster
        >>> pipe = Pipe.from_sequential(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)), torch.nn.MSELoss())
        >>> with local_cluster(4, threads=1) as cluster:
        ...     driver = PipelineDriver1F1B(pipe, cluster, replicas=2)
        ...     print(driver.topology)
        stage      0        1
        replica 0  worker0  worker1
        replica 1  worker2  worker3
        """
        return Topology(self.placed.replicas, self.cluster.workers)

    @in_turn
    def program(self, chunks: int) -> Program:
        """The program that the workers run for ``chunks`` micro-batches: print it, draw it, simulate it.

        With ``schedule="auto"``, the one that the next step runs.
        """
        check_chunks(chunks, None)
        return self.programs.next(chunks, self.trains).lowered.program

    @in_turn
    def generation_programs(self, chunks: int) -> tuple[Program, Program]:
        """The programs that `generate` runs for ``chunks`` groups of rows: for the prompts, and for each token behind them.

        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from pippy import PipelineDriver1F1B, cluster, pipeline
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=4, n_head=1, n_layer=1, use_cache=False))
        >>> pipe = pipeline(model, num_stages=2, split="parameters", example_kwargs={"input_ids": torch.ones(2, 3).long()})
        >>> with cluster(2, threads=1) as workers:
        ...     prompt, token = PipelineDriver1F1B(pipe, workers).generation_programs(chunks=1)
        >>> [str(each) for each in token.orders[0][:3]]
        ['receive token.0 from 1', 'F0.0', 'send values_of_0_for_1.0 to 1']
        """
        check_chunks(chunks, None)
        return self._generation.programs(chunks)

    @property
    def trains(self) -> bool:
        """Whether a step leaves gradients: there is a loss, and gradients are on."""
        return self.steps.trains

    @property
    def compiled(self) -> dict[str, str]:
        """How each stage runs if the driver has ``compile=``: as graphs, or eagerly and why. Empty for other drivers.

        It waits for steps that are under way.

        >>> from pippy import Pipe, PipelineDriver, local_cluster
        >>> pipe = Pipe.from_sequential(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)), torch.nn.MSELoss())
        >>> with local_cluster(2, threads=1) as cluster:
        ...     driver = PipelineDriver(pipe, cluster, schedule="zb_h1", compile="graphs", check=False)
        ...     loss = driver.run(2, torch.ones(4, 2), torch.ones(4, 1))
        ...     print(driver.compiled["submod_0"])
        graphs for 1 form of inputs
        """
        answers = self.commands.call(dict.fromkeys(self.placed.workers, AskCompiled()))
        return {name: said for worker in sorted(answers) for name, said in sorted(answers[worker].items())}

    # Steps

    def run(self, chunks: int | None, *args: Any, outputs: Any = None, **kwargs: Any) -> Any:
        """Run a mini-batch through the pipeline in ``chunks`` micro-batches.

        Takes what the Pipe takes, and gives what it gives: the loss (or what the model returns, the loss in it), or for a
        Pipe without a loss the outputs. A loss leaves its gradients on the workers, unless under `torch.no_grad()`.

        With ``outputs=True`` it gives the loss and what the model returns, as `LossAndOutputs`; with ``outputs=False`` the loss
        alone, also where the model returns more.
        """
        number = self.session.log.number
        try:
            return self.run_async(chunks, *args, outputs=outputs, **kwargs).result()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) or self.session.has_sent_since(number):
                self.session.give_up(error)
            raise

    @in_turn
    def check(self, *args: Any, model: Any = None, **kwargs: Any) -> CheckReport:
        """One training step on the workers beside the plain model in this process: whether they have the same numbers.

        Takes what `run` takes; the number of micro-batches may be left out, for one that suits the schedule. Compared are the
        loss, the outputs, each gradient and buffer, and each parameter after an update by the driver's optimizers. Print the
        result: it says what differs, and in which stage that begins. It is true if nothing does. All is afterwards as it was,
        on the workers and here. ``model`` is the plain model, if it is not the one that the Pipe was made from; its parameters
        are taken from the workers. See docs/checking.md.

        >>> from pippy import Pipe, PipelineDriver1F1B, local_cluster
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)).double()
        >>> x, target = torch.ones(4, 2).double(), torch.ones(4, 1).double()
        >>> with local_cluster(2, threads=1) as cluster:
        ...     driver = PipelineDriver1F1B(Pipe.from_sequential(model, torch.nn.MSELoss()), cluster)
        ...     optimizer = driver.instantiate_optimizer(torch.optim.Adam)
        ...     print(driver.check(2, x, target))
        the same as the plain model, with 2 micro-batches: the loss, 1 output, 4 gradients and 4 parameters after an update
        largest difference ...
        """
        numbers = [each for each in args[:1] if isinstance(each, int) and not isinstance(each, bool)]
        chunks = numbers[0] if numbers else self._usual_chunks()
        args = args[len(numbers) :]
        check_chunks(chunks, None)
        self.filling.check("check()")
        surroundings = surroundings_of("check")
        self.steps.follow()
        self.commands.wait()
        call = self.steps.request(surroundings, chunks, args, kwargs, None)
        plain = checked_model(self, model)
        rows = self.steps.datasets.loaded_here(call.division, call.columns, call.trains)
        try:
            return StepCheck(self, plain, rows, call.trains, partial(self.steps.aside, call)).report()
        finally:
            self.watch.note_numbers()

    @property
    def checked(self) -> Checked | None:
        """What the latest check of a first step has compared: print it. None before the first step, or with ``check=False``.

        >>> from pippy import Pipe, PipelineDriver1F1B, local_cluster
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)).double()
        >>> with local_cluster(2, threads=1) as cluster:
        ...     driver = PipelineDriver1F1B(Pipe.from_sequential(model, torch.nn.MSELoss()), cluster)
        ...     loss = driver.run(2, torch.ones(4, 2).double(), torch.ones(4, 1).double())
        ...     print(driver.checked)
        the first step is the plain model's: 4 of 4 rows in 2 micro-batches, also with other targets: the loss ...
        """
        return None if self.steps.first_step is None else self.steps.first_step.checked

    def _usual_chunks(self) -> int:
        """A number of micro-batches that suits any schedule: as many as a pipeline has workers."""
        workers = self.placement.workers
        return self.programs.schedule.example(chunks=max(2, workers), workers=workers).chunks

    @in_turn
    def run_async(self, chunks: int | None, *args: Any, outputs: Any = None, **kwargs: Any) -> PostedStep:
        """Like `run`, but return at once; ``.result()`` of what this gives waits for the step."""
        self.saving.raise_error()
        check_chunks(chunks, self._auto)
        self.filling.check("run()")
        return self.steps.run(chunks, args, kwargs, outputs)

    def train_batch(
        self,
        data_iter: Iterator[Any],
        *,
        chunks: int,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        max_norm: float | None = None,
    ) -> Any:
        """Train on the next ``chunks`` items of an iterator, each a micro-batch, as DeepSpeed's engine does. Gives the loss.

        All of the driver's optimizers step, or those that are given; then the schedulers. Gradients are clipped before, if
        ``max_norm`` is given, and dropped at the end. An item is a tuple of arguments, a dict of them by name, or one tensor.

        >>> from pippy import Pipe, PipelineDriver1F1B, RepeatingLoader, cluster
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> data = RepeatingLoader([(torch.ones(4, 2), torch.ones(4, 1))])
        >>> with cluster(2, threads=1) as workers:
        ...     driver = PipelineDriver1F1B(Pipe.from_sequential(model, torch.nn.MSELoss()), workers)
        ...     optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
        ...     losses = [driver.train_batch(data, chunks=2) for _ in range(10)]
        >>> bool(losses[-1] < losses[0])
        True
        """
        check_trains(self, "train_batch")
        optimizers = self._optimizers if optimizer is None else optimizer
        updates = checked_updates(self, optimizers, scheduler, scaler or self._grad_scaler, max_norm, None)
        call = next_call(data_iter, chunks, "train_batch")
        loss = self.run(call.chunks, *call.args, **loss_alone(self), **call.kwargs)
        updates.apply(self)
        return loss

    def eval_batch(self, data_iter: Iterator[Any], *, chunks: int, outputs: bool | None = None) -> Any:
        """The loss of the next ``chunks`` items of an iterator, each a micro-batch, in evaluation mode and without gradients.

        With ``outputs=True``, what the model returns, too, as `run` gives it. Modules are then in the mode of before.
        """
        call = next_call(data_iter, chunks, "eval_batch")
        asked = loss_alone(self) if outputs is None else {"outputs": outputs}
        with evaluating(self.pipe), torch.no_grad():
            return self.run(call.chunks, *call.args, **asked, **call.kwargs)

    def recover(
        self,
        *,
        workers: int | Sequence[int] | None = None,
        replicas: int | None = None,
        schedule: str | Program | None = None,
        fewer: bool = False,
    ) -> dict[str, Any]:
        """Go on after a worker was lost, or a step has failed, from the newest point of the run. Gives its plain values.

        A point is the last finished `save`, `load` or `protect` of this driver, or the start, as long as no optimizer has made
        a step. A local cluster starts another process in the place of each worker that died or is stopped; the others keep
        theirs. The parameters, buffers, optimizers and random numbers become those of the point, and so does what was given to
        it by name; gradients are dropped. Each driver of the cluster that had stages on a lost worker recovers by itself. If it
        fails, it can be called again. See docs/checkpoints.md.

        With ``workers=3`` the run goes on with so many workers, and with ``replicas=1`` with so many replicas: the stages are
        placed anew on the driver's workers that are there, and another process is started only if they are too few. With
        ``fewer=True`` it goes on with those that are left if none can be started. ``workers`` may also name them, by number.
        ``schedule`` is another one; a schedule that cannot run the stages on fewer workers is replaced by 1F1B, with a warning.
        See docs/failures.md.

        >>> import os, signal, tempfile
        >>> from pippy import Pipe, PipelineDriver1F1B, errors, local_cluster
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> with tempfile.TemporaryDirectory() as folder, local_cluster(2, threads=1) as cluster:
        ...     driver = PipelineDriver1F1B(Pipe.from_sequential(model, torch.nn.MSELoss()), cluster)
        ...     path = driver.save(folder, step=0)
        ...     os.kill(cluster.session.workers[1].pid, signal.SIGKILL)
        ...     try:
        ...         loss = driver.run(2, torch.ones(4, 2), torch.ones(4, 1))
        ...     except errors.WorkerLostError:
        ...         values = driver.recover()
        ...         loss = driver.run(2, torch.ones(4, 2), torch.ones(4, 1))
        >>> values
        {'step': 0}
        """
        asked = WorkersToGoOnWith(workers, replicas)
        asked.check(len(self.cluster))
        check_fewer(fewer, workers, replicas)
        with suppress(
            Exception
        ):  # if a checkpoint that is written beside the run fails, the newest point is the one before
            self.saving.finish()
        try:
            return self._recover(lambda lost: asked, schedule)
        except NotReplaced as error:
            if not fewer:
                raise
            source.warn(f"{error.why}; the run goes on with the workers that are left")
            return self._recover(partial(self._arrangements.left, self._arrangement), schedule)

    def _recover(
        self, ask: Callable[[Collection[int]], WorkersToGoOnWith], schedule: str | Program | None
    ) -> dict[str, Any]:
        before = next_one = self._arrangement  # also for another try, when the stages are placed anew already
        warning = ""

        def wanted(lost: frozenset[int]) -> Collection[int]:
            nonlocal next_one, warning
            missing = lost | self.cluster.gone
            asked = ask(missing)
            if asked == WorkersToGoOnWith() and schedule is None:
                return lost | missing.intersection(before.ranks)
            next_one, warning = self._arrangements.next(before, asked, schedule, missing)
            return missing.intersection(next_one.ranks)

        def settle() -> None:
            self._settle(next_one)

        values = self.recovery.recover(self._send_again, wanted, settle)
        self._arrangements.note(self._arrangement, schedule)
        if warning:
            source.warn(warning)
        return values

    def _settle(self, arrangement: Arrangement) -> None:
        """Have the stages on these workers from now on. Nothing is sent."""
        if arrangement == self._arrangement:
            return
        if arrangement.schedule.auto is not None:
            arrangement.schedule.auto.forget()
        self.placed.place(arrangement.replicas)
        self.commands.place(self.placed.workers, bool(self.placed.replicated))
        self._arrange(arrangement)
        self.cluster.open_drivers[self.number] = self._places

    def _send_again(self, workers: Collection[int]) -> None:
        """Some workers have stages and optimizers, and nothing else: send them the rest, now or when it is needed."""
        self.programs.send_again(workers)
        self._generation.forget()
        self.steps.forget(workers)

    @cached_property
    def _model_names(self) -> ModelNames:
        return model_names(self.compiled_pipe)

    @property
    def recording(self) -> Recording | None:
        """What notes the steps that begin now, if something does: the innermost `record`."""
        return self._recordings[-1] if self._recordings else None

    @contextmanager
    def record(self, limit: int = 100, memory: bool = False) -> Iterator[Recording]:
        """Note what each worker does when in the steps that begin inside; the latest ``limit`` are kept.

        With ``memory=True`` they also note the bytes that they hold with each instruction, which takes time on the CPU.
        docs/recording.md says what a Recording shows.
        """
        recording = Recording(limit, memory=memory, model=self._model_names)
        self._recordings.append(recording)
        try:
            yield recording
        finally:
            self._recordings.pop()

    @contextmanager
    def profile(
        self,
        path: str | PathLike[str],
        *,
        activities: Iterable[ProfilerActivity] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
    ) -> Iterator[DriverProfile]:
        """Run `torch.profiler` in all workers for what they do inside, and write their traces to one file, for Perfetto.

        Each worker is a row, with its instructions above the operations that they run; all are on one clock. The ``path`` ends
        with .json, or with .json.gz for a compressed file. The other arguments are those of `torch.profiler.profile`; without
        ``activities``, all that the workers have are profiled. See docs/recording.md.

        >>> import json, tempfile
        >>> from pippy import Pipe, PipelineDriver1F1B, local_cluster
        >>> pipe = Pipe.from_sequential(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)), torch.nn.MSELoss())
        >>> with local_cluster(2, threads=1) as cluster, tempfile.TemporaryDirectory() as folder:
        ...     driver = PipelineDriver1F1B(pipe, cluster)
        ...     with driver.profile(f"{folder}/trace.json") as profile:
        ...         loss = driver.run(2, torch.ones(4, 2), torch.ones(4, 1))
        ...     events = json.loads(profile.path.read_text())["traceEvents"]
        >>> {"F0.0", "F1.1", "B0.1", "aten::addmm"} <= {event["name"] for event in events}
        True
        """
        options = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
            "with_flops": with_flops,
        }
        start, to = profile_options(activities, options), trace_path(path)
        with WorkerProfiles(self.cluster, self.commands, to, lambda: self._places.holds).running(start) as profile:
            yield profile

    def memory(
        self, chunks: int, *args: Any, optimizer: Callable[..., torch.optim.Optimizer] | None = None, **kwargs: Any
    ) -> DriverMemory:
        """What each worker holds in a step, in bytes, counted before anything runs. Print it to read it.

        Takes what `run` takes; without arguments, the example that the Pipe was made with is the mini-batch. The state of
        optimizers is that of the driver's own; before it has one, ``optimizer`` is a class to count with. See docs/memory.md.
        """
        if self.steps.settings.single_loss:
            raise DriverError(
                "memory() cannot count a step with single_loss=True, whose loss holds the whole mini-batch at "
                "once; measure a step instead: with driver.record(memory=True) as recording"
            )
        follow_training_flags(self.pipe)
        args, kwargs = (args, kwargs) if args or kwargs else example_of(self.pipe)
        check_no_columns((args, kwargs), "memory()")
        states = [counted_optimizer(optimizer)] if optimizer else [each.counted() for each in self._optimizers]
        program, trains = self.program(chunks), self.trains
        halves, compile = has_halves(program), self.steps.placed.compile

        def count(pipe: Pipe, division: Division) -> PipeBytes:
            return count_pipe(pipe, division, self.steps.device, trains, states, halves, compile)

        graph, division, sizes = self.steps.counted(chunks, args, kwargs, count)
        if graph.number:
            program = graph.programs.made(division.row_chunks, trains)
        sizes = replace(sizes, divided={self.ranks.index(rank): count for rank, count in sizes.divided.items()})
        checks = trains and self.steps.first_step is not None
        check = partial(self.steps.trial_bytes(graph).of_first_step, division, states) if checks else None
        in_script = self.steps.witness_bytes(graph, division) if trains else 0
        return DriverMemory(program, sizes, bool(states) or not trains, check, in_script)

    def train(self, mode: bool = True) -> "PipelineDriverBase":
        """Put all stages in training mode."""
        self.pipe.train(mode)
        return self

    def eval(self) -> "PipelineDriverBase":
        """Put all stages in evaluation mode."""
        return self.train(False)

    def generate(
        self,
        ids: Any = None,
        *,
        max_new_tokens: int | None = None,
        attention_mask: torch.Tensor | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        chunks: int | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Make tokens behind prompts with a causal language model, and give the prompts with them: `generate` of transformers.

        Takes the ids of the prompts, [rows, length], padded on the left, and gives what `model.generate` gives with the same
        arguments and random state, in evaluation mode. What is left out is as the model's ``generation_config`` has it. The
        parameters are those on the workers. ``chunks`` is into how many groups the rows are divided, which are under way at a
        time; without it as many as there are workers. See docs/hugging_face.md.

        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from pippy import PipelineDriver1F1B, cluster, pipeline
        >>> sizes = {"vocab_size": 9, "n_embd": 4, "n_head": 1, "n_layer": 1, "n_positions": 8, "use_cache": False}
        >>> model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).eval()
        >>> ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
        >>> pipe = pipeline(model, num_stages=2, split="parameters", example_kwargs={"input_ids": ids, "labels": ids})
        >>> with cluster(2, threads=1) as workers:
        ...     made = PipelineDriver1F1B(pipe, workers).generate(ids, max_new_tokens=4, pad_token_id=0)
        >>> torch.equal(made, model.generate(ids, max_new_tokens=4, pad_token_id=0))
        True
        """
        surroundings_of("generate")
        self.steps.follow()
        self.filling.check("generate()")
        return self._generation.run(
            others.pop("input_ids", None) if ids is None else ids,
            attention_mask=attention_mask,
            max_new_tokens=max_new_tokens,
            do_sample=do_sample,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            chunks=chunks,
            others=others,
        )

    def close(self) -> None:
        """Drop the stages, programs and optimizers from the workers; the cluster goes on."""
        super().close()
        self.cluster.open_drivers.pop(self.number, None)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a driver belongs to its cluster's controller and cannot be pickled; pickle driver.state_dict()"
        )
