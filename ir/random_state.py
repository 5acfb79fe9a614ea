"""The state of all random number generators that a model may draw from: Python's, torch's, numpy's."""

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def untouched_random_state() -> Iterator[None]:
    """Inside, random numbers may be drawn and seeds set; afterwards it is as if that had not been."""
    numpy = sys.modules.get("numpy")
    pythons, numpys = random.getstate(), numpy.random.get_state() if numpy else None
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.callback(random.setstate, pythons)
        if numpy:
            stack.callback(numpy.random.set_state, numpys)
        yield
