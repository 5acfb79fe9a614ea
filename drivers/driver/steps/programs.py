"""The programs of one driver: made by its schedule, lowered, sent to the workers once, and kept."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pippy.drivers.base.errors import DriverError
from pippy.drivers.batch.refusals import check_changed_parameters, check_whole_batch_gradients
from pippy.drivers.choice.auto import UNMEASURED, Auto, StepPurpose, auto_placement
from pippy.drivers.choice.given_limits import DividedCall
from pippy.drivers.lowering.lower import Lowered, lower
from pippy.drivers.placement.placed_pipe import PlacedPipe
from pippy.drivers.plan import Program, add_recompute, make_schedule
from pippy.drivers.plan.language.errors import require
from pippy.drivers.plan.language.instructions import Op
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.orders.registry import REGISTRY
from pippy.drivers.plan.passes.rewrites import Checkpoint
from pippy.drivers.session.driver_commands import DriverCommands
from pippy.ir.base.readable import count_with_noun
from pippy.ir.pipe import Pipe

HostsOf = Callable[[Sequence[int]], tuple[int, ...] | None]  # of workers of the cluster; None if all are on one

_FORWARD = "forward only"
_OF_A_GRAPH = 1 << 20  # numbers of programs

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RequestedSchedule:
    """The schedule that the user gave: a name with its options, or a program. ``stages`` is the number of stages of the Pipe.

    >>> RequestedSchedule("1f1b", {}, stages=4).make(chunks=2, workers=2).placement.worker_of
    (0, 0, 1, 1)
    """

    schedule: str | Program
    options: Mapping[str, Any]
    stages: int
    auto: Auto | None = None  # chooses the schedule
    checkpoint: Checkpoint = "never"
    replicas: int = 1
    slices: int = 1

    def make(self, chunks: int, workers: int) -> Program:
        """The program for so many micro-batches, and so many workers of each replica. It is not lowered."""
        if isinstance(self.schedule, Program):
            return add_recompute(self._given(self.schedule, chunks, workers), self.checkpoint)
        require("schedule", self.schedule, str, f"give one of auto, {', '.join(REGISTRY)}, or a Program")
        if workers > self.stages:
            raise DriverError(
                f"{workers} workers for {self.stages} stages; name {self.stages} workers, or cut the model into more stages"
            )
        per_worker = [self.stages // workers + (worker < self.stages % workers) for worker in range(workers)]
        if self.auto is not None:
            placed = auto_placement(self.options, per_worker)
            return make_schedule("1f1b", workers=workers, chunks=chunks, checkpoint=self.checkpoint, **placed)
        self._check_v(self.schedule, workers, per_worker)
        by_hand = isinstance(self.options.get("placement"), Mapping | Placement)
        options = {**({} if by_hand else {"stages_per_worker": per_worker}), **self.options}
        options |= {"replicas": self.replicas, "slices": self.slices}
        return make_schedule(self.schedule, workers=workers, chunks=chunks, checkpoint=self.checkpoint, **options)

    def example(self, chunks: int, workers: int) -> Program:
        """A program for ``chunks`` micro-batches of each replica, or the user's own program, whatever number it is for."""
        return self.make(self.schedule.rows if isinstance(self.schedule, Program) else chunks * self.replicas, workers)

    def _check_v(self, name: str, workers: int, per_worker: Sequence[int]) -> None:
        """Refuse a V-shaped schedule without two stages for each worker, unless the options place the stages."""
        if name not in REGISTRY or REGISTRY[name].placement != "v" or set(per_worker) == {2} or self.options:
            return
        if self.stages % 2 == 0 and self.stages // 2 < workers:
            count, remedy = self.stages // 2, "give it"
        else:
            count, remedy = workers, f"cut the model into {2 * workers} stages, for"
        raise DriverError(
            f"schedule={name!r} needs two stages on each worker, and the Pipe has {self.stages} for {workers}; {remedy} "
            f"{count_with_noun(count, 'worker')} (world_size={count}, or as many all_ranks=), or take interleaved_1f1b, which "
            "works on any"
        )

    def _given(self, program: Program, chunks: int, workers: int) -> Program:
        if program.replicas != self.replicas:
            raise DriverError(
                f"the program is for {_pipelines(program.replicas)}, and the driver for {_pipelines(self.replicas)}; give the "
                f"driver replicas={program.replicas}, or make_schedule replicas={self.replicas}"
            )
        if program.slices != self.slices:
            raise DriverError(
                f"the program is for slices={program.slices}, and the driver for slices={self.slices}; give the driver "
                f"slices={program.slices}, or make_schedule slices={self.slices}"
            )
        if program.placement.workers > workers:
            raise DriverError(
                f"the program needs {program.workers} workers, but there are {workers * self.replicas}; start a "
                "larger cluster"
            )
        if chunks != program.rows:
            raise DriverError(
                f"chunks={chunks}, but the program was made for {program.rows} micro-batches; run it with "
                f"chunks={program.rows}, or make another program"
            )
        return program


@dataclass(frozen=True)
class SentProgram:
    """A program that the workers have, and its number there. It was ``made`` by a schedule, and then lowered."""

    number: int
    lowered: Lowered
    made: Program
    single_loss: bool = False
    out_of_order: bool | int = False


class DriverPrograms:
    """Makes, lowers, sends and keeps the programs of one driver, one for each number of micro-batches of rows.

    ``out_of_order`` and ``single_loss`` are what the driver was given. ``hosts_of`` says on which hosts workers are now.
    """

    def __init__(
        self,
        pipe: Pipe,
        schedule: RequestedSchedule,
        placed: PlacedPipe,
        commands: DriverCommands,
        hosts_of: HostsOf,
        workers: int,
        single_loss: bool,
        out_of_order: bool | int,
    ) -> None:
        self.pipe, self.schedule, self.placed, self.commands = pipe, schedule, placed, commands
        self.hosts_of, self.workers, self.single_loss, self.out_of_order = hosts_of, workers, single_loss, out_of_order
        self.sent: dict[tuple[int, str], SentProgram] = {}  # by the number of micro-batches, and what it is for

    def of_graph(self, pipe: Pipe, placed: PlacedPipe) -> "DriverPrograms":
        """The programs of another graph of the model, by the same schedule."""
        given = self.commands, self.hosts_of, self.workers, self.single_loss, self.out_of_order
        return DriverPrograms(pipe, self.schedule, placed, *given)

    def send_again(self, workers: Collection[int]) -> None:
        """Send these workers their parts of all programs, as they have none. If they are on other hosts than those that were
        in their places, all workers get other programs."""
        for key, sent in self.sent.items():
            on_hosts, to = self._on_hosts(sent.made), workers
            if on_hosts.hosts != sent.lowered.program.hosts:
                sent, to = replace(sent, lowered=lower(self.pipe, on_hosts)), self.placed.workers
            parts = self.placed.programs(sent.number, sent.lowered, sent.single_loss, sent.out_of_order)
            self.commands.call({worker: parts[worker] for worker in to if worker in parts})
            self.sent[key] = sent

    def next(self, chunks: int, trains: bool) -> SentProgram:
        """The program of the next step with ``chunks`` micro-batches, as far as it is known now."""
        auto = self.schedule.auto
        if auto is None or not trains:
            return self.plain(chunks, trains)
        purpose, program = auto.peek(chunks, self._made)
        return self._send(chunks, purpose.program, program)

    def for_step(self, chunks: int, trains: bool, call: DividedCall | None = None) -> tuple[StepPurpose, SentProgram]:
        """The program of the step that runs now, and what is measured in it."""
        auto = self.schedule.auto
        if auto is None or not trains:
            return UNMEASURED, self.plain(chunks, trains)
        purpose, program = auto.next(chunks, self._made, call)
        return purpose, self._send(chunks, purpose.program, program)

    def count_of_chunks(self, call: DividedCall, trains: bool) -> int:
        """The number of micro-batches for a call that gives none."""
        assert self.schedule.auto is not None
        return self.schedule.auto.count_of_chunks(self._made, call, trains)

    def _made(self, chunks: int) -> Program:
        """The program that the automatic schedule begins with. If bytes are counted, it has the edges of the Pipe."""
        made = self.schedule.make(chunks, self.workers)
        counted = self.schedule.auto is not None and self.schedule.auto.counts_bytes
        return lower(self.pipe, made).program if counted else made

    def plain(self, chunks: int, trains: bool) -> SentProgram:
        """The program of the schedule, or that of 1F1B where it is chosen by measuring."""
        name = "training" if trains else _FORWARD
        if (chunks, name) in self.sent:
            return self.sent[chunks, name]
        return self._send(chunks, name, self._scheduled(chunks, trains), trains)

    def made(self, chunks: int, trains: bool) -> Program:
        """That program, lowered, and not sent."""
        return lower(self.pipe, self._scheduled(chunks, trains)).program

    def _scheduled(self, chunks: int, trains: bool) -> Program:
        program = self.schedule.make(chunks, self.workers)
        if not trains:
            forward_only = make_schedule(
                "forward_only",
                workers=program.placement.workers,
                chunks=chunks,
                placement=program.placement,
                replicas=program.replicas,
                slices=program.slices,
            )
            program = replace(forward_only, hosts=program.hosts)
        return program

    def for_trial(self, chunks: int, single_loss: bool = False, slices: int = 1) -> SentProgram:
        """The program of a trial: all forwards, then all backwards, on the workers of the first replica."""
        name = "trial" + ", single loss" * single_loss + f", {slices} slices" * (slices > 1)
        if (chunks, name) in self.sent:
            return self.sent[chunks, name]
        placement = self.schedule.example(chunks=1, workers=self.workers).placement
        program = make_schedule(
            "fill_drain", workers=placement.workers, chunks=chunks, placement=placement, slices=slices
        )
        return self._sent(chunks, name, program, single_loss, False)

    def _send(self, chunks: int, name: str, program: Program, trains: bool = True) -> SentProgram:
        """Lower a program and send it to the workers, unless they have it."""
        if (chunks, name) in self.sent:
            return self.sent[chunks, name]
        check_changed_parameters(self.placed.compiled, program.chunks)
        if trains:
            check_whole_batch_gradients(self.placed.compiled, program.chunks)
        return self._sent(chunks, name, program, self.single_loss, self.out_of_order if trains else False)

    def _sent(
        self, chunks: int, name: str, program: Program, single_loss: bool, out_of_order: bool | int
    ) -> SentProgram:
        lowered, number = lower(self.pipe, self._on_hosts(program)), self.placed.graph * _OF_A_GRAPH + len(self.sent)
        _check_limit(out_of_order, lowered.program)
        self.commands.call(self.placed.programs(number, lowered, single_loss, out_of_order))
        self.sent[chunks, name] = SentProgram(number, lowered, program, single_loss, out_of_order)
        _log.debug("program for %s sent: %r", name, lowered.program)
        return self.sent[chunks, name]

    def _on_hosts(self, program: Program) -> Program:
        """A program that knows the hosts of its workers. One that says them itself, or what is sent, stays as it is."""
        if program.lowered or program.hosts is not None:
            return program
        return replace(program, hosts=self.hosts_of(self.placed.ranks_of(program)))


def _pipelines(count: int) -> str:
    return "one pipeline" if count == 1 else f"{count} replicas of the pipeline"


def _check_limit(out_of_order: bool | int, program: Program) -> None:
    peak = max(program.peak_live)
    if not isinstance(out_of_order, bool) and out_of_order < peak:
        raise DriverError(
            f"out_of_order={out_of_order}: worker {program.peak_live.index(peak)} holds up to {peak} micro-batches of a stage "
            f"in {program.schedule} with {program.chunks} micro-batches, in order; give at least {peak}, or True"
        )


def check_single_loss(example: Program, loss_stage: int) -> None:
    """Raise unless all forwards come before the loss in an example of the driver's programs, and there is a loss."""
    if loss_stage < 0:
        raise DriverError(
            "single_loss=True needs a loss function, which the Pipe does not have; give one: pipeline(model, loss_fn)"
        )
    computations = example.computations[example.placement.worker_of[loss_stage]]
    ops = [each.op for each in computations if each.stage == loss_stage]
    if sorted(ops, key=lambda op: op != Op.FORWARD) != ops:
        raise DriverError(
            f"single_loss=True needs all forwards before the loss, but {example.schedule} begins backwards earlier; "
            "use PipelineDriverFillDrain"
        )
