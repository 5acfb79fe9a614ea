"""How many samples and tokens a step takes, and how many that makes per second."""

from dataclasses import dataclass

import torch
from torch import nn

from pippy.drivers.batch.division import Division
from pippy.ir.record.compiled import Compiled

DTYPES = (torch.int32, torch.int64)  # of tokens


@dataclass(frozen=True)
class BatchSize:
    """The rows of a mini-batch, and its tokens. None where there are none, or where they are not known.

    Tokens are the elements of the first input that has whole numbers in two dimensions, if the model has an `nn.Embedding`.

    >>> BatchSize(32, 512).per_second(0.5)
    '64 samples/s · 1,024 tokens/s'
    """

    samples: int | None = None
    tokens: int | None = None

    def per_second(self, seconds: float) -> str:
        """Both as text, if a step takes this long; empty if nothing is known."""
        counts = {"samples/s": self.samples, "tokens/s": self.tokens}
        return " · ".join(f"{_rounded(count / seconds)} {unit}" for unit, count in counts.items() if count and seconds)


UNKNOWN_SIZE = BatchSize()


def batch_size(division: Division, compiled: Compiled) -> BatchSize:
    """The size of a mini-batch that is divided into micro-batches."""
    samples = division.rows
    if not any(isinstance(module, nn.Embedding) for module in compiled.split_gm.modules()):
        return BatchSize(samples)
    inputs = [name for name in division.arguments if name != compiled.target_name]
    tensors = [tensor for name in inputs for tensor in division.whole(name)]
    tokens = (each.numel() for each in tensors if each.dtype in DTYPES and each.dim() == 2)
    return BatchSize(samples, next(tokens, None))


def _rounded(number: float) -> str:
    """
    >>> _rounded(0.1234), _rounded(12345.6)
    ('0.123', '12,346')
    """
    return f"{number:,.0f}" if number >= 99.95 else f"{number:.3g}"
