"""What a trial holds on each worker, in bytes, counted before it runs."""

from collections.abc import Sequence

import torch

from pippy.drivers.batch.division import Division
from pippy.drivers.compare.digest import KEPT, bytes_of_digest
from pippy.drivers.count.optimizer_bytes import CountedOptimizer
from pippy.drivers.count.pipe_bytes import count_pipe
from pippy.drivers.lowering.lower import lower
from pippy.drivers.plan import make_schedule
from pippy.drivers.plan.cost.held_bytes import peak_bytes
from pippy.drivers.plan.language.placement import Placement
from pippy.ir.pipe import Pipe, compiled_of

_DIGESTS = 2  # of the reference, and of what is compared with it
_COMPARING = 3  # numbers of float64 for each of a digest, while two are compared


def trial_bytes(
    pipe: Pipe,
    rows: Division,
    placement: Placement,
    device: torch.device,
    optimizers: Sequence[CountedOptimizer] = (),
) -> tuple[int, ...]:
    """The most that each worker of a pipeline holds in a trial with these rows as one micro-batch: as two they hold no more.

    >>> from pippy.drivers.batch.divide import divide
    >>> pipe = Pipe.from_sequential(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), torch.nn.MSELoss())
    >>> rows = divide({"input_1": torch.zeros(5, 4), "target": torch.zeros(5, 4)}, chunks=1)
    >>> trial_bytes(pipe, rows, Placement((0, 1)), torch.device("cpu"))[0] > 4 * 80
    True
    """
    sizes = count_pipe(pipe, rows, device, True, optimizers, halves=False)
    order = make_schedule("fill_drain", workers=placement.workers, chunks=1, placement=placement)
    program = lower(pipe, order).program
    compiled = compiled_of(pipe)
    stages = [[each for each in stage.parameters() if each.requires_grad] for _, stage in compiled.stages()]
    digests = [
        _DIGESTS * sum(map(bytes_of_digest, own))
        + _COMPARING * 8 * max((min(each.numel(), KEPT) for each in own), default=0)
        for own in stages
    ]
    return tuple(
        peak + sum(digests[stage] for stage in placement.stages_of(worker))
        for worker, peak in enumerate(peak_bytes(program, sizes))
    )
