"""Copies of values between a device and the host, or another device of the host, beside what the device computes.

    stream             does
    the thread's own   computes, and copies what leaves: the value may be changed or freed at once
    out                copies that copy to the host
    into               copies to the device: from the host, and from another device's memory when that has written it

The host waits for no copy. What is computed after a copy to the device waits for it; what was computed before does not.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from pippy.drivers.wire.gpu.accelerator import Accelerator, Shared
from pippy.drivers.wire.value_layout import is_plain_tensor
from pippy.ir.base.trees import form_and_parts, from_parts, is_sparse, map_leaves, map_tensors

HostCopy = Future[Any]  # a value, once it is on the host


class DeviceCopies:
    """The copies of one worker. All but `awaited` is called by the thread that computes."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.out, self.into, self._idle = (accelerator.new_stream() for _ in range(3))
        self._waits = ThreadPoolExecutor(1, "pippy copies", accelerator.set_current)
        self._opened: deque[tuple[Any, int, list[torch.Tensor]]] = deque()  # with the worker that has sent it

    def own(self, value: Any) -> Any:
        """A copy of a value, where the value is."""
        on_host, copy = self.accelerator.is_on_host, self.accelerator.copy
        return map_tensors(partial(_copied, lambda each: each.clone() if on_host(each) else copy(each)), value)

    def to_host(self, value: Any) -> HostCopy:
        """Start to copy a value. It may be changed or freed afterwards."""
        return self.own_to_host(self.own(value))

    def own_to_host(self, own: Any) -> HostCopy:
        """Start to copy a value that `own` has made. It is dropped when that is done."""
        accelerator, until_done = self.accelerator, [own]
        made, done = accelerator.event(), accelerator.event()
        made.record(accelerator.current_stream())
        self.out.wait_event(made)

        def leave(tensor: torch.Tensor) -> torch.Tensor:
            on_host = accelerator.is_on_host(tensor)
            return tensor if on_host else _copied(partial(accelerator.copy, to_host=True), tensor)

        with accelerator.using(self.out):
            value = map_tensors(leave, own)
        done.record(self.out)

        def when_done() -> Any:
            done.synchronize()
            until_done.clear()
            return value

        return self._waits.submit(when_done)

    def to_device(self, value: Any, source: int = -1) -> Any:
        """Start to copy a value, which worker ``source`` has sent. What this thread computes with it comes after the copy."""
        accelerator = self.accelerator
        arriving: list[torch.Tensor] = []
        opened: list[torch.Tensor] = []

        def arrive(tensor: torch.Tensor) -> torch.Tensor:
            with accelerator.using(self.into):
                arriving.append(accelerator.copy(tensor))
            return arriving[-1]

        def here(leaf: Any) -> Any:
            if type(leaf) is Shared:
                with accelerator.using(self.into):
                    opened.append(accelerator.open(leaf))
                return _copied(arrive, opened[-1])
            is_to_move = isinstance(leaf, torch.Tensor) and not accelerator.is_here(leaf)
            return _copied(lambda each: arrive(accelerator.pinned(each)), leaf) if is_to_move else leaf

        value = map_leaves(here, value)
        if arriving:
            done, computing = accelerator.event(), accelerator.current_stream()
            done.record(self.into)
            if opened:
                self._opened.append((done, source, opened))
            computing.wait_event(done)
            for tensor in arriving:
                accelerator.keep_for(tensor, computing)
        return value

    def awaited(self) -> Any:
        """The first copy that is not done, of what a worker has sent, and the worker; None if all are done. From any thread."""
        return next(((done, source) for done, source, _ in tuple(self._opened) if not done.query()), None)

    def let_go(self) -> None:
        """Let go of other devices' memory that was copied: the worker that has sent it may use it again."""
        with self.accelerator.using(self._idle):
            while self._opened and self._opened[0][0].query():
                self._opened.popleft()

    def wait(self) -> None:
        """Wait until the device has computed all that it was given, and raise what it failed with."""
        done = self.accelerator.event()
        done.record(self.accelerator.current_stream())
        done.synchronize()

    def close(self) -> None:
        """Wait for no copy any more."""
        self._waits.shutdown(wait=False, cancel_futures=True)


def _copied(copy: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, or of the parts of a sparse one. Others are copied by torch, to the host."""
    with torch.no_grad():
        if is_sparse(tensor):
            form, parts = form_and_parts(tensor)
            return from_parts(form, [copy(part) for part in parts])
        own = copy(tensor) if is_plain_tensor(tensor) else tensor.to("cpu", copy=True)
    return own.requires_grad_(tensor.requires_grad)
