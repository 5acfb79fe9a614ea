"""Measures how long a forward and a backward take, from several calls.

A machine that does something else meanwhile makes calls longer, and never shorter. So a time is the lower quartile of its
calls. Operations that do the same work (`same_work.py`) have one time: equal blocks weigh the same, however busy the machine.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from pippy.ir.base.names import named_state

Clock = Callable[[], int]
Once = Callable[[], tuple[int, int]]

_FEWEST_CALLS = 3
_CALLS_AT_FIRST = 13
_MOST_CALLS = 25
_LONG_ENOUGH = 10_000_000  # nanoseconds: after these no more calls are made at first than the fewest
_LONG_IN_ALL = 5_000_000_000  # after these none is called more often than the fewest


@dataclass
class Timing:
    """The nanoseconds of forward and backward of each call of one kind of work."""

    forwards: list[int] = field(default_factory=list)
    backwards: list[int] = field(default_factory=list)

    @property
    def forward(self) -> int:
        return _lower_quartile(self.forwards)

    @property
    def backward(self) -> int:
        return _lower_quartile(self.backwards)

    @property
    def uncertain(self) -> int:
        """The uncertainty of the times: the difference between the shortest calls."""
        return sum(_lower_quartile(times) - min(times) for times in (self.forwards, self.backwards))


def _lower_quartile(times: Sequence[int]) -> int:
    return sorted(times)[len(times) // 4]


class Stopwatch:
    """Times calls. If modules are on an accelerator, it waits until that has computed."""

    def __init__(self, modules: Sequence[nn.Module], clock: Clock) -> None:
        devices = {tensor.device for module in modules for _, tensor in named_state(module)}
        self.devices = [device for device in devices if device.type not in ("cpu", "meta")]
        self.clock = clock
        self.timings: dict[Hashable, Timing] = {}
        self.begin = clock()
        self.own = (0, 0)
        timing = self.time(self._nearly_nothing)
        self.own = timing.forward, timing.backward

    def now(self) -> int:
        """The time in nanoseconds, when everything that was started is done."""
        for device in self.devices:
            torch.accelerator.synchronize(device)
        return self.clock()

    def knows(self, work: Hashable | None) -> bool:
        """Whether this work was timed already."""
        return work is not None and work in self.timings

    def time(self, once: Once, work: Hashable | None = None) -> Timing:
        """The times of ``work``, of which ``once`` times one forward and one backward.

        Short calls are repeated. The same work is timed again each time that it comes.
        The time that it takes to read the clock, and to start autograd, is subtracted.
        """
        if self.knows(work):
            timing = self.timings[work]
            if len(timing.forwards) < (_MOST_CALLS if self._is_early() else _FEWEST_CALLS):
                self._add(timing, once)
            return timing
        timing = Timing()
        if work is not None:
            self.timings[work] = timing
        begin, most = self.now(), _CALLS_AT_FIRST if work is not None else _MOST_CALLS
        while len(timing.forwards) < _FEWEST_CALLS or (
            len(timing.forwards) < most and self.now() - begin < _LONG_ENOUGH and self._is_early()
        ):
            self._add(timing, once)
        return timing

    def _is_early(self) -> bool:
        return self.clock() - self.begin < _LONG_IN_ALL

    def _add(self, timing: Timing, once: Once) -> None:
        forward, backward = once()
        timing.forwards.append(max(0, forward - self.own[0]))
        timing.backwards.append(max(0, backward - self.own[1]))

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
