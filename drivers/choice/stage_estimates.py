"""What one micro-batch takes in each stage, by fake tensors: its bytes, and a guess of its time.

The guess is for the steps before any is measured. If the Pipe was cut by measured times, they are multiplied by the FLOPs of
the micro-batch over those of the example. Otherwise the guess is made from the FLOPs alone. Only proportions matter: between
stages, and between a computation and the time to begin one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

import torch

from pippy.drivers.batch.divide_call import divide_call
from pippy.drivers.batch.division import Division
from pippy.drivers.choice.divided_call import DividedCall
from pippy.drivers.count.optimizer_bytes import CountedOptimizer
from pippy.drivers.count.pipe_bytes import count_pipe
from pippy.drivers.lowering.flow import loss_stage
from pippy.drivers.plan.choice.candidate import MicroBatch
from pippy.drivers.plan.cost.costs import Costs
from pippy.drivers.protocol.compile_options import CompileOptions
from pippy.ir.base.names import stage_index
from pippy.ir.base.trees import map_tensors
from pippy.ir.pipe import Pipe, compiled_of, example_of
from pippy.ir.record.compiled import Compiled
from pippy.ir.show.shapes import propagate_inputs

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

    def each(name: str) -> Any:
        one, other = getattr(most, name), getattr(least, name)
        if isinstance(one, Mapping):
            return {key: at(one[key], other[key]) for key in one}
        return (
            None
            if one is None
            else [at(*pair) for pair in zip(one, other)]
            if isinstance(one, Sequence)
            else at(one, other)
        )

    return Costs(**{field.name: each(field.name) for field in fields(Costs) if field.name != "bandwidth"})
