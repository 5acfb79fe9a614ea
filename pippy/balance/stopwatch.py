"""Measures how long a forward and a backward take, from several calls, and restores the model after they have run.

A machine that does something else meanwhile makes calls longer, and never shorter. So a time is the lower quartile of its
calls. Operations that do the same work (`work_of`) have one time: equal blocks weigh the same, however busy the machine.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from pippy.ir.base.names import named_state
from pippy.ir.base.trees import equal
from pippy.ir.run.random_state import untouched_random_state
from pippy.ir.trace.left_as_it_was import restoring_attributes

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


# Restores a model after its parts have run to be measured.


class ChangedTensors:
    """The tensors that changed while they were watched, with copies of their numbers of before.

    Only a tensor that changes is copied, and one part is watched at a time, so a large model is never copied as a whole.
    """

    def __init__(self) -> None:
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def changed(self) -> set[int]:
        """The ids of the tensors that have changed."""
        return set(self._before)

    @contextmanager
    def watching(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Inside, these tensors may be changed; the first change of each is remembered."""
        fresh = [tensor for tensor in tensors if id(tensor) not in self._before]
        copies, versions = [tensor.detach().clone() for tensor in fresh], [tensor._version for tensor in fresh]
        try:
            yield
        finally:
            for tensor, copy, version in zip(fresh, copies, versions):
                # A NaN differs from itself: kept, and put back, for nothing.
                if tensor._version != version if tensor.is_meta else not equal(tensor.detach(), copy):
                    self._before[id(tensor)] = (tensor, copy)

    def restore(self) -> None:
        """Copy the old numbers back."""
        for tensor, copy in self._before.values():
            tensor.data.copy_(copy)


@contextmanager
def restoring_model(*modules: nn.Module) -> Iterator[ChangedTensors]:
    """Inside, parts of ``modules`` may be run; afterwards parameters, buffers, gradients, attributes and random states are
    what they were.

    >>> norm = nn.BatchNorm1d(2)
    >>> with restoring_model(norm) as state, state.watching(norm.buffers()):
    ...     _ = norm(torch.randn(8, 2))
    >>> norm.running_mean, norm.num_batches_tracked
    (tensor([0., 0.]), tensor(0))
    """
    tensors = {id(tensor): tensor for module in modules for _, tensor in named_state(module)}
    flags = [(part, part.training) for module in modules for part in module.modules()]
    gradients = [(tensor, tensor.grad) for tensor in tensors.values() if tensor.is_leaf]
    state = ChangedTensors()
    with ExitStack() as stack:
        stack.enter_context(untouched_random_state())
        for module in modules:
            stack.enter_context(restoring_attributes(module, silent=True))
        stack.callback(state.restore)
        try:
            for tensor, _ in gradients:
                tensor.grad = None  # a part that runs a backward of its own adds to no gradient of the user's
            yield state
        finally:
            for tensor, gradient in gradients:
                tensor.grad = gradient
            for part, training in flags:
                part.training = training
