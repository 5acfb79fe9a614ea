"""The limits that a user gives for the choice: `memory=`, `memory_limit=` and `max_live=`; and the best choice within them.

Before a step is measured, fake tensors say what one micro-batch takes in a stage: its bytes, and a guess of its time.

The guess is for the steps before any is measured. If the Pipe was cut by measured times, they are multiplied by the FLOPs of
the micro-batch over those of the example. Otherwise the guess is made from the FLOPs alone. Only proportions matter: between
stages, and between a computation and the time to begin one.

`DividedCall` is one call of a driver that is to fit: how it is cut into micro-batches, and the numbers of micro-batches to try.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any

import torch

from pippy.drivers.base.errors import DriverError
from pippy.drivers.batch.divide_call import divide_call
from pippy.drivers.batch.division import Division
from pippy.drivers.count.fake_errors import UncountedError
from pippy.drivers.count.optimizer_bytes import CountedOptimizer
from pippy.drivers.count.pipe_bytes import count_pipe
from pippy.drivers.lowering.flow import loss_stage
from pippy.drivers.plan.choice.choice import Choice
from pippy.drivers.plan.choice.problem import Limit, LiveLimit, MemoryLimit, MicroBatch, Problem, limits_of
from pippy.drivers.plan.choice.search import choose, search, unfit
from pippy.drivers.plan.cost.held_bytes import PipeBytes
from pippy.drivers.plan.cost.simulate import Costs
from pippy.drivers.plan.language.errors import ScheduleError
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.search import live_limits
from pippy.drivers.protocol.compile_options import CompileOptions
from pippy.ir.base.errors import GuardError, PippyError
from pippy.ir.base.names import stage_index
from pippy.ir.base.public_calls import is_whole
from pippy.ir.base.readable import brief
from pippy.ir.base.trees import map_tensors, tensors
from pippy.ir.pipe import Pipe, compiled_of, example_of
from pippy.ir.record.compiled import Compiled
from pippy.ir.show.shapes import propagate_inputs

CallShapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class DividedCall:
    """The arguments of one call of a driver. ``divided`` cuts them into micro-batches; ``estimate`` says what one takes.

    ``optimizers`` is the number of the driver's optimizers, whose states are counted too.
    """

    arguments: tuple[Any, ...]
    optimizers: int
    divided: Callable[[int], Division]
    estimate: Callable[[int], MicroBatch]

    @cached_property
    def rows(self) -> int | None:
        """The number of rows of the mini-batch; None if nothing in it has rows."""
        sizes = self.divided(1).sizes
        return None if sizes is None else sum(sizes)

    @property
    def rows_to_cut(self) -> int:
        """The number of rows, of a call that gives no number of micro-batches. Raises if it has none."""
        if self.rows is None:
            raise DriverError(
                "chunks=None: no argument has rows to cut; give the number of micro-batches, as in driver.run(1, x, target)"
            )
        return self.rows

    def counts_above(self, chunks: int) -> list[int]:
        """The numbers of micro-batches to try that are higher than this one."""
        return [count for count in counts_of_chunks(self.rows or 1) if count > chunks and self.runs(count)]

    @property
    def counts(self) -> list[int]:
        """The numbers of micro-batches to try. If the Pipe's graph runs none of them, all, so that an estimate says why."""
        counts = counts_of_chunks(self.rows_to_cut)
        return [count for count in counts if self.runs(count)] or counts

    def runs(self, chunks: int) -> bool:
        """Whether the Pipe's graph runs so many micro-batches: for the sizes of others, forward may go on in another way."""
        try:
            self.estimate(chunks)
        except PippyError as error:
            return not fails_guard(error)
        return True

    @cached_property
    def shapes(self) -> CallShapes:
        """All that the bytes depend on: the number of optimizers, whether autocast is in force, the shapes of the tensors."""
        casts = (1,) * torch._C._is_any_autocast_enabled()
        return ((self.optimizers,), casts, *(tuple(tensor.shape) for tensor in tensors(self.arguments)))


def fails_guard(error: BaseException | None) -> bool:
    """Whether an error comes from a guard that failed.

    >>> fails_guard(GuardError("x is None")), fails_guard(DriverError("why"))
    (True, False)
    """
    while error is not None and not isinstance(error, GuardError):
        error = error.__cause__
    return error is not None


def no_larger(shapes: CallShapes, counted: CallShapes) -> bool:
    """Whether no tensor of ``shapes`` is larger than the one of ``counted`` in its place.

    >>> no_larger(((8, 3), ()), ((8, 4), ())), no_larger(((9, 3),), ((8, 4),)), no_larger(((8,),), ((8, 4),))
    (True, False, False)
    """
    return len(shapes) == len(counted) and all(
        len(one) == len(other) and all(map(int.__le__, one, other)) for one, other in zip(shapes, counted)
    )


def counts_of_chunks(rows: int) -> list[int]:
    """The numbers of micro-batches to try for so many rows. Most divide the rows, and each is clearly more than the last.

    >>> counts_of_chunks(8), counts_of_chunks(60), counts_of_chunks(17)
    ([1, 2, 4, 8], [1, 2, 3, 5, 10, 15, 30, 60], [1, 2, 4, 8, 16, 17])
    """
    counts = [1]
    for count in range(2, rows + 1):
        if count >= counts[-1] * (1.4 if rows % count == 0 else 2) and -(-rows // count) < -(-rows // counts[-1]):
            counts.append(count)
    return counts if counts[-1] == rows else [*counts, rows]


class GivenLimits:
    """The limits that were given, as limits of a problem.

    ``bytes`` are those of ``memory``, for all that a worker holds, or of ``memory_limit``, for activations alone; None without
    either. ``option`` is how errors name it.

    >>> limits = GivenLimits(memory="1KiB", max_live=2)
    >>> limits.on(Placement((0, 1)))
    (LiveLimit(most=(2, 2)), MemoryLimit(most=(1024, 1024)))
    """

    def __init__(self, memory: Any = None, memory_limit: Any = None, max_live: Any = None, option: str = "") -> None:
        self.of_all, self.bytes = memory_limit is None, memory if memory_limit is None else memory_limit
        self.option = option or ("memory=" if self.of_all else "memory_limit=")
        several = isinstance(max_live, Sequence) and not isinstance(max_live, str)
        self.live: Any = list(max_live) if several else max_live
        numbers = self.live if several else [] if max_live is None else [max_live]
        if (several and not numbers) or not all(map(is_whole, numbers)):
            raise DriverError(
                f"max_live={brief(max_live)}: give how many stage-micro-batches each worker may hold, one number or one for "
                "each worker"
            )

    def of_bytes(self, placement: Placement) -> tuple[int, ...]:
        """The most bytes of each worker."""
        return limits_of(self.bytes, placement.workers, self.option)

    def of_live(self, placement: Placement) -> tuple[int, ...]:
        """The most stage-micro-batches of each worker. Raises unless there is room for one in each stage."""
        try:
            return tuple(live_limits(placement, 1, self.live, "max_live="))
        except ScheduleError as error:
            raise DriverError(str(error)) from error

    def on(self, placement: Placement) -> tuple[Limit, ...]:
        """The limits of the workers of a placement. Raises if they are for others, or leave no room for a micro-batch."""
        limits: list[Limit] = []
        if self.live is not None:
            limits.append(LiveLimit(self.of_live(placement)))
        if self.bytes is not None:
            limits.append(MemoryLimit(self.of_bytes(placement)))
        return tuple(limits)

    def limited(self, sizes: PipeBytes) -> PipeBytes:
        """Of the bytes that were counted, those that are limited."""
        return sizes if self.of_all else sizes.activations

    def counted(self, estimate: Callable[[int], MicroBatch], chunks: int) -> MicroBatch:
        """What one of so many micro-batches takes, with the bytes that are limited. Raises if they cannot be counted."""
        try:
            counted = estimate(chunks)
        except UncountedError as error:
            raise UncountedError(
                error.reason,
                f"leave {self.option} out and give the number of micro-batches: then schedule='auto' chooses by time alone. "
                "max_live= limits the micro-batches that a worker holds, and driver.record(memory=True) measures their bytes",
            ) from error.__cause__
        return replace(counted, sizes=None if counted.sizes is None else self.limited(counted.sizes))

    def best(self, problem: Problem, more_chunks: Sequence[int] = (), measured: bool = True) -> Choice:
        """The best choice. If nothing keeps the limits, the error says what would, also of ``more_chunks`` micro-batches."""
        if self.bytes is None:
            try:
                return choose(problem)
            except ScheduleError as error:
                raise DriverError(f"{error}\nraise max_live") from error
        choice = search(problem, thorough=measured, measured=measured)
        if not choice.candidates:
            raise DriverError(unfit(choice, repr(self.bytes), more_chunks, self.option))
        return choice


FLOPS_PER_SECOND = {"cpu": 5e10}
OF_A_DEVICE = 3e13
BEGIN = 2e-4  # seconds to begin a computation, and to send a value


def guessed_costs(flops: Sequence[int], device: str = "cpu") -> Costs:
    """Costs as if all stages computed at the usual speed of a device, and each half of a backward took as long as a forward.

    >>> guessed_costs([10**9, 0]).forward
    [0.0202, 0.0002]
    """
    speed = FLOPS_PER_SECOND.get(device, OF_A_DEVICE)
    seconds = [round(each / speed + BEGIN, 9) for each in flops]
    return Costs(seconds, seconds, seconds, latency=BEGIN)


def call_to_fit(
    pipe: Pipe,
    arguments: tuple[Any, ...],
    divided: Callable[[int], Division],
    device: torch.device,
    optimizers: Sequence[CountedOptimizer],
    compile: CompileOptions | None = None,
) -> DividedCall:
    """A call. The bytes of its micro-batches are counted when they are needed, once for each number of micro-batches."""

    @cache
    def estimate(chunks: int) -> MicroBatch:
        division = divided(chunks)
        sizes = count_pipe(pipe, division, device, optimizers=optimizers, compile=compile)
        flops = _flops(compiled_of(pipe), division)
        return MicroBatch(_balanced_costs(pipe, flops, device.type) or guessed_costs(flops, device.type), sizes)

    return DividedCall(arguments, len(optimizers), divided, estimate)


def _balanced_costs(pipe: Pipe, flops: Sequence[int], device: str) -> Costs | None:
    """Costs from the times that the balancer measured for its example; None if it measured none on such a device."""
    compiled = compiled_of(pipe)
    seconds = None if compiled.balance is None else compiled.balance.seconds()
    if seconds is None or any(each.device.type != device for each in pipe.parameters()):
        return None
    args, kwargs = map_tensors(lambda tensor: _without_memory(tensor, device), example_of(pipe))
    of_example = sum(_flops(compiled, divide_call(compiled, 1, args, kwargs)))
    scale = sum(flops) / of_example if of_example else 1.0
    forward = [round(each * scale + BEGIN, 9) for each, _ in seconds]
    half = [round(each * scale / 2 + BEGIN, 9) for _, each in seconds]
    return Costs(forward, half, half, latency=BEGIN)


def _without_memory(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A tensor of this shape and dtype on a device, whose elements share the memory of one number."""
    return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)


def _flops(compiled: Compiled, division: Division) -> list[int]:
    """The FLOPs of one forward of each stage. Those of the loss count for the stage that it runs with."""
    flops, last = [0] * compiled.num_stages, loss_stage(compiled)
    shapes = propagate_inputs(compiled, {name: division.take(name, 0) for name in division.arguments})
    for call, amount in shapes.flops.items():
        index = stage_index(call)
        flops[last if index is None else index] += amount.count
    return flops


def costs_by_rows(rows: int, known: Mapping[int, Costs], chunks: int) -> Costs:
    """Costs of a micro-batch if ``rows`` are cut into ``chunks``, from the costs for one or two other numbers of micro-batches.

    Two numbers show which part of a cost does not depend on the rows. One number does not show it, so it is taken to be 0.

    >>> known = {2: Costs([5.0], [4.0], [4.0], [8.0]), 4: Costs([3.0], [2.0], [2.0], [4.0])}
    >>> costs_by_rows(8, known, 8).forward, costs_by_rows(8, known, 8).backward
    ([2.0], [2.0])
    """
    if chunks in known:
        return known[chunks]
    here = -(-rows // chunks)
    sizes = [(-(-rows // count), costs) for count, costs in known.items()]
    (large, most), (small, least) = (max(sizes, key=lambda each: each[0]), min(sizes, key=lambda each: each[0]))

    def at(more: float, less: float) -> float:
        if large == small:
            return more * here / large
        row = max(0.0, (more - less) / (large - small))
        return max(0.0, less + row * (here - small)) if row else min(more, less)

    def of_both(one: Any, other: Any) -> Any:
        if one is None:
            return None
        if isinstance(one, Mapping):
            return {key: at(one[key], other[key]) for key in one}
        return [at(*pair) for pair in zip(one, other)] if isinstance(one, Sequence) else at(one, other)

    names = [field.name for field in fields(Costs) if field.name != "bandwidth"]
    return Costs(**{name: of_both(getattr(most, name), getattr(least, name)) for name in names})
