"""Evaluation mode for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from pippy.ir.pipe import Pipe, follow_training_flags


@contextmanager
def evaluating(pipe: Pipe) -> Iterator[None]:
    """Put all stages in evaluation mode inside; afterwards each module has its mode of before."""
    follow_training_flags(pipe)
    flags = {module: module.training for module in pipe.modules()}
    pipe.eval()
    try:
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag
        follow_training_flags(pipe)
