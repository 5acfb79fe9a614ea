"""`DeferredBatchNorm`: it normalizes each micro-batch by itself, and notes what running statistics need of it.

    forward of micro-batch 1     ─▶ noted: mean, variance, number of values ─┐
    forward of micro-batch 0     ─▶ noted                                    ├─▶ one update of the running statistics,
    ... computed again for R     ─▶ an attribute, which is put back          │   when the step ends (step_statistics.py)
    forward of micro-batch 2     ─▶ noted ───────────────────────────────────┘

What is noted is an attribute of the module: so whoever runs a forward once more and leaves no trace of it, leaves none here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

_NARROW = (torch.float16, torch.bfloat16)
NoteStatistics = Callable[["DeferredBatchNorm", int, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, eq=False)
class Noted:
    """What a batch norm saw in one call: how many values in each channel, their mean and their (unbiased) variance.

    ``turn`` numbers the calls of a worker.
    """

    microbatch: int
    turn: int
    values: int
    mean: torch.Tensor
    variance: torch.Tensor


class DeferredBatchNorm(_BatchNorm):
    """A batch norm whose running statistics are those of the whole mini-batch, in a pipeline too.

    In training, each micro-batch is normalized by its own mean and variance. The running statistics change once, at the end of
    a step, by the mean and the variance of all micro-batches together: as those of `nn.BatchNorm1d`, `2d` and `3d` change
    that get the mini-batch as one batch. Without a pipeline, and in evaluation, it is such a module. Its arguments are theirs.

    `convert_deferred_batch_norm` makes them of a model's batch norms.

    >>> norm = DeferredBatchNorm(3)
    >>> norm(torch.ones(4, 3, 2, 2)).shape, norm.num_batches_tracked
    (torch.Size([4, 3, 2, 2]), tensor(1))
    """

    replaced: type[_BatchNorm] = nn.SyncBatchNorm  # whose dimensions an input must have: of that, two or more
    note: NoteStatistics | None = (
        None  # in a step of a driver: takes the number of values, their mean and their variance
    )
    noted: tuple[Noted, ...] = ()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize a batch, or a micro-batch of a step."""
        if self.note is None or not self.training or not self.track_running_stats or self.running_mean is None:
            return super().forward(input)
        self._check_input_dim(input)
        is_wide = self.running_mean.dtype not in _NARROW
        if is_wide:  # they are written by F.batch_norm
            mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_mean)
        else:
            others = [dim for dim in range(input.dim()) if dim != 1]
            with torch.no_grad():
                variance, mean = torch.var_mean(input.detach().float(), others, correction=1)
        # Noted before they are written: where torch.utils.checkpoint runs it again, autograd may leave in the midst of it.
        self.note(self, input.numel() // max(1, input.shape[1]), mean, variance)
        written = (mean, variance) if is_wide else (None, None)
        return F.batch_norm(input, written[0], written[1], self.weight, self.bias, True, 1.0, self.eps)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        self.replaced._check_input_dim(self, input)
