"""The state of all random number generators that a model may draw from: Python's, torch's, numpy's."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def untouched_random_state() -> Iterator[Callable[[], list[str]]]:
    """Inside, random numbers may be drawn and seeds set; afterwards every generator has the state that it had before.

    It gives a function that names the generators whose state has changed since the beginning: Python's and torch's on CPU.

    >>> with untouched_random_state() as changed:
    ...     print(changed(), torch.rand(2).shape, changed())
    [] torch.Size([2]) ['torch']
    """
    numpy = sys.modules.get("numpy")
    pythons, torchs = random.getstate(), torch.get_rng_state()
    numpys = numpy.random.get_state() if numpy else None
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []

    def changed() -> list[str]:
        same = {"Python's random": random.getstate() == pythons, "torch": torch.equal(torch.get_rng_state(), torchs)}
        return [generator for generator, is_same in same.items() if not is_same]

    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.callback(random.setstate, pythons)
        if numpy:
            stack.callback(numpy.random.set_state, numpys)
        yield changed
