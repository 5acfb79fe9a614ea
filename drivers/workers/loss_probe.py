"""Checks, in a first step, that the losses of parts of a batch add up to the loss of the whole.

The inputs of the loss are those of one micro-batch, or of several where one has few rows: loss_sample.py. They are cut in two
unequal parts, and their losses compared: loss_judge.py. Nothing of a check remains: leave_unchanged.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from pippy.drivers.batches.division import Division
from pippy.drivers.batches.loss_check import LossCheck, LossReport
from pippy.drivers.workers.leave_unchanged import left_unchanged
from pippy.drivers.workers.loss_judge import Call, Judge
from pippy.drivers.workers.loss_sample import Sample, sample_of
from pippy.ir.names import LOSS
from pippy.ir.trees import map_leaves

_ENOUGH = 3  # rows, for two parts that differ


class LossProbe:
    """One check, in one step. It sees the inputs of the loss of each micro-batch before the loss is computed."""

    def __init__(self, check: LossCheck, division: Division) -> None:
        self.check, self.division = check, division
        self.sample: Sample | None = None
        self.seen = 0
        self.report: LossReport | None = None

    def see(
        self, call: Call, names: Sequence[str], gives: Sequence[str | None], inputs: Sequence[Any], microbatch: int
    ) -> None:
        """Take the inputs of a micro-batch, and check when there are enough."""
        self.seen += 1
        if self.report is not None or self.division.sizes is None:
            return
        detached = tuple(
            map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, v) for v in inputs
        )
        found = sample_of(
            detached, names, self.check.inputs, microbatch, self.division, call.name == LOSS, self.check.row_sizes
        )
        last = self.seen == len(self.division.held)
        if self.sample is not None:
            joined = self.sample.joined(found)
            last, found = last or joined is None, joined or self.sample
        self.sample = found
        if found.rows >= _ENOUGH or last:
            with torch.no_grad(), left_unchanged(call.module):
                index = None if len(gives) == 1 else list(gives).index(self.check.value)
                computed = [number for number, name in enumerate(names) if name not in self.check.inputs]
                judge = Judge(self.check, call, index, names, computed, self.division)
                report = judge.judge(found, last)
                self.report = report and replace(report, held=self.check.held)
