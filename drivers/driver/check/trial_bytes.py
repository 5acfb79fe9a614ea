"""The bytes that a trial takes on each worker, counted before it runs."""

from collections.abc import Sequence
from contextlib import suppress

import torch

from pippy.drivers.batch.division import Division
from pippy.drivers.compare.tolerance import bytes_of_digest
from pippy.drivers.count.optimizer_bytes import CountedOptimizer
from pippy.drivers.count.pipe_bytes import count_pipe
from pippy.drivers.driver.check.rows import NoRows, TriedRows, WholeRows
from pippy.drivers.lowering.lower import lower
from pippy.drivers.plan import make_schedule
from pippy.drivers.plan.cost.held_bytes import peak_bytes
from pippy.drivers.plan.language.placement import Placement
from pippy.ir.base.names import named_state
from pippy.ir.pipe import Pipe, compiled_of


class TrialBytes:
    """Counts the bytes that each worker of a pipeline holds in a trial.

    >>> from pippy.drivers.batch.divide import divide
    >>> pipe = Pipe.from_sequential(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), torch.nn.MSELoss())
    >>> rows = divide({"input_1": torch.zeros(5, 4), "target": torch.zeros(5, 4)}, chunks=1)
    >>> counted = TrialBytes(pipe, Placement((0, 1)), torch.device("cpu"))
    >>> counted.of(rows)[0] > 4 * 80, counted.fit(rows, (300, 1 << 20))
    (True, False)
    """

    def __init__(self, pipe: Pipe, placement: Placement, device: torch.device) -> None:
        self.pipe, self.placement, self.device = pipe, placement, device

    def of(self, rows: Division, optimizers: Sequence[CountedOptimizer] = ()) -> tuple[int, ...]:
        """The most bytes that each worker holds for these rows as one micro-batch. As two micro-batches they take no more."""
        sizes = count_pipe(self.pipe, rows, self.device, True, optimizers, halves=False)
        order = make_schedule("fill_drain", workers=self.placement.workers, chunks=1, placement=self.placement)
        return self._with_digests(peak_bytes(lower(self.pipe, order).program, sizes))

    def _with_digests(self, peaks: Sequence[int]) -> tuple[int, ...]:
        """The most bytes that workers hold, with digests of all gradients."""
        stages = [each for _, each in compiled_of(self.pipe).stages()]
        digests = [sum(bytes_of_digest(each) for each in stage.parameters() if each.requires_grad) for stage in stages]
        workers = self.placement.workers
        return tuple(
            peak + sum(digests[stage] for stage in self.placement.stages_of(worker % workers))
            for worker, peak in enumerate(peaks)
        )

    def of_witness(self, division: Division, room: float) -> int:
        """The most bytes that the plain model takes for a mini-batch in the script's process: its numbers thrice (those of the
        workers, and two copies that are put back), gradients, and what a forward keeps; if ``room`` is less, for a few rows."""
        state = sum(each.nbytes for _, each in named_state(self.pipe))
        whole = 2 * state + sum(self.of(WholeRows(division).divided(1)))
        with suppress(NoRows):
            return whole if whole <= room else 2 * state + sum(self.of(TriedRows(division).divided(1)))
        return whole

    def fit(self, rows: Division, limits: Sequence[int], optimizers: Sequence[CountedOptimizer] = ()) -> bool:
        """Whether no worker holds more than its limit."""
        return all(map(int.__le__, self.of(rows, optimizers), limits))

    def of_first_step(
        self, division: Division, optimizers: Sequence[CountedOptimizer], peaks: Sequence[int]
    ) -> tuple[int, ...]:
        """The most bytes that each worker holds in the check before a first step, in which it holds at most these ``peaks``: of
        a few rows, and of the step itself."""
        whole = self._with_digests(peaks)
        with suppress(NoRows):
            few = self.of(TriedRows(division).divided(1), optimizers) if division.is_cut else ()
            return tuple(map(max, whole, [*few, *[0] * len(whole)]))
        return whole
