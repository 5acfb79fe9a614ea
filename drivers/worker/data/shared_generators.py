"""The generators of a process that is a script's, with workers in it that seed them."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from pippy.ir.run.may_draw import Draws
from pippy.ir.run.random_state import RandomState


class SharedGenerators:
    """The generators of a process that is a script's, with workers in it: when none of these draws, they are the script's.

    >>> shared = SharedGenerators()
    >>> one = torch.get_rng_state()
    >>> with shared.borrowed([], Draws.TORCHS):
    ...     _ = torch.rand(2)
    >>> torch.equal(torch.get_rng_state(), one)
    True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: dict[Draws, RandomState] = {}

    @contextmanager
    def borrowed(self, gpus: Sequence[torch.device], draws: Draws) -> Iterator[None]:
        """Inside, the generators may be seeded. The last one to leave gives them the state that the first one found."""
        with self._lock:
            self._users += 1
            if not self._before or (draws is Draws.PYTHONS_TOO and draws not in self._before):
                self._before[draws] = RandomState.current(gpus, only_torch=draws is not Draws.PYTHONS_TOO)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    for state in reversed(self._before.values()):  # that of torch is right in the first one
                        state.restore()
                    self._before.clear()


shared_generators = SharedGenerators()
