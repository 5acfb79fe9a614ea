"""The state of all random number generators that a model may draw from: Python's, torch's, numpy's."""

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class RandomState:
    """The state of Python's generator, of torch's on the CPU on ``devices`` (GPUs), and of numpy's.

    >>> before = RandomState.current()
    >>> one = torch.rand(2)
    >>> before.restore()
    >>> torch.equal(torch.rand(2), one)
    True
    """

    pythons: tuple[Any, ...] | None
    cpu: torch.Tensor
    devices: Mapping[Any, torch.Tensor]
    numpys: Any

    @classmethod
    def current(cls, devices: Sequence[Any] | None = None, only_torch: bool = False) -> "RandomState":
        """The state now; without ``devices``, that of all GPUs, if torch uses them. That of numpy takes most of the time."""
        if devices is None:
            devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        numpy = None if only_torch else sys.modules.get("numpy")
        return cls(
            None if only_torch else random.getstate(),
            torch.get_rng_state(),
            {device: torch.cuda.get_rng_state(device) for device in devices},
            numpy.random.get_state() if numpy else None,
        )

    def is_current(self) -> bool:
        """Whether the generators have this state."""
        now = RandomState.current(list(self.devices), only_torch=self.pythons is None)
        same = all(torch.equal(state, now.devices[device]) for device, state in self.devices.items())
        same = same and torch.equal(self.cpu, now.cpu) and self.pythons == now.pythons
        if self.numpys is None:  # numpy was not imported, so nothing has drawn from it
            return same
        return same and self.numpys[2:] == now.numpys[2:] and bool((self.numpys[1] == now.numpys[1]).all())

    def restore(self) -> None:
        """Give the generators this state."""
        if self.pythons is not None:
            random.setstate(self.pythons)
        torch.set_rng_state(self.cpu)
        for device, state in self.devices.items():
            torch.cuda.set_rng_state(state, device)
        if self.numpys is not None:
            sys.modules["numpy"].random.set_state(self.numpys)


def seed_all(seed: int) -> None:
    """Seed all generators, but those of GPUs that torch has not used yet.

    >>> with untouched_random_state():
    ...     seed_all(7)
    ...     one = torch.rand(2), random.random()
    ...     seed_all(7)
    ...     torch.equal(torch.rand(2), one[0]), random.random() == one[1]
    (True, True)
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@contextmanager
def untouched_random_state() -> Iterator[Callable[[], list[str]]]:
    """Inside, random numbers may be drawn and seeds set; afterwards every generator has the state that it had before.

    It gives a function that names the generators whose state has changed since the beginning: Python's and torch's on CPU.

    >>> with untouched_random_state() as changed:
    ...     print(changed(), torch.rand(2).shape, changed())
    [] torch.Size([2]) ['torch']
    """
    before = RandomState.current()

    def changed() -> list[str]:
        same = {
            "Python's random": random.getstate() == before.pythons,
            "torch": torch.equal(torch.get_rng_state(), before.cpu),
        }
        return [generator for generator, is_same in same.items() if not is_same]

    try:
        yield changed
    finally:
        before.restore()
