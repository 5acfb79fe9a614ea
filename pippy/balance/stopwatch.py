"""How long a forward and a backward take: the median of several calls."""

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import nn

from pippy.ir.names import named_state

Clock = Callable[[], int]

_FEWEST_CALLS = 3
_MOST_CALLS = 25
_LONG_ENOUGH = 20_000_000  # nanoseconds: after these no more calls are made than the fewest


class Stopwatch:
    """Times calls. Where parts of the modules are on an accelerator, it waits until that is done."""

    def __init__(self, modules: Sequence[nn.Module], clock: Clock) -> None:
        devices = {tensor.device for module in modules for _, tensor in named_state(module)}
        self.devices = [device for device in devices if device.type not in ("cpu", "meta")]
        self.clock = clock
        self.own = (0, 0)
        self.own = self.medians(self._nearly_nothing)

    def now(self) -> int:
        """The time in nanoseconds, when everything that was started is done."""
        for device in self.devices:
            torch.accelerator.synchronize(device)
        return self.clock()

    def medians(self, once: Callable[[], tuple[int, int]]) -> tuple[int, int]:
        """The median times of ``once``, which times one forward and one backward. Short calls are repeated more often.

        The time that it takes to read the clock, and to start autograd, is subtracted.
        """
        found: list[tuple[int, int]] = []
        begin = self.now()
        while len(found) < _FEWEST_CALLS or (len(found) < _MOST_CALLS and self.now() - begin < _LONG_ENOUGH):
            found.append(once())
        forward, backward = (round(median(times)) for times in zip(*found))
        return max(0, forward - self.own[0]), max(0, backward - self.own[1])

    @torch.enable_grad()
    def _nearly_nothing(self) -> tuple[int, int]:
        """The time to read the clock, and to start autograd: for a small operation that is more than the operation."""
        begin = self.now()
        forward = self.now() - begin
        leaf = torch.zeros(1, device=self.devices[0] if self.devices else None, requires_grad=True)
        value, gradient = leaf.view(1), torch.ones_like(leaf)
        begin = self.now()
        torch.autograd.grad([value], [leaf], [gradient])
        return forward, self.now() - begin
