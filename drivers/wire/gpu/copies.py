"""Copies of values between a device and the host, beside what the device computes.

    stream             does
    out                copies to the host: what this worker sends, and outputs
    the thread's own   computes
    into               copies to the device: what this worker has received, and inputs

Neither the host nor the computing stream waits for a copy to the host: the stream only takes a copy on the device, so that the
value may be changed or freed at once. The copy on the device lives until the host has its own. What is computed after a copy
to the device waits for it; what was computed before does not hold it up.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pippy.drivers.wire.gpu.accelerator import Accelerator, Event
from pippy.drivers.wire.value_layout import is_plain_tensor, strides_of
from pippy.ir.base.sparse_tensors import form_and_parts, from_parts, is_sparse
from pippy.ir.base.trees import map_tensors


class HostCopy:
    """A value that is being copied to the host."""

    def __init__(self, value: Any, done: Event | None, kept: list[torch.Tensor]) -> None:
        self._value, self._done, self._kept = value, done, kept

    def wait(self) -> Any:
        """The value, when it is there. Any thread may wait."""
        done = self._done  # another thread may wait, too
        if done is not None:
            done.synchronize()
        self._done, self._kept = None, []  # the memory on the device is needed no more
        return self._value


class DeviceCopies:
    """The copies of one worker. All but `HostCopy.wait` is called by the thread that computes."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._out, self.into = accelerator.new_stream(), accelerator.new_stream()

    def to_host(self, value: Any) -> HostCopy:
        """Start to copy a value. It may be changed or freed afterwards."""
        accelerator = self.accelerator
        kept: list[torch.Tensor] = []
        leaving: list[tuple[torch.Tensor, torch.Tensor]] = []

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            if accelerator.is_on_host(tensor):
                return tensor.clone()
            layout = tensor.shape, strides_of(tensor), tensor.dtype
            own, host = accelerator.empty(*layout), accelerator.empty_pinned(*layout)
            accelerator.copy(own, tensor)
            kept.append(own)
            leaving.append((host, own))
            return host

        value = map_tensors(lambda tensor: _copied(tensor, copied, torch.device("cpu")), value)
        if not leaving:
            return HostCopy(value, None, [])
        made, done = accelerator.event(), accelerator.event()
        made.record(accelerator.current_stream())
        self._out.wait_event(made)
        with torch.no_grad(), accelerator.using(self._out):  # a copy may require a gradient already
            for host, own in leaving:
                accelerator.copy(host, own)
        done.record(self._out)
        return HostCopy(value, done, kept)

    def to_device(self, value: Any) -> Any:
        """Start to copy a value. What this thread computes with it comes after the copy."""
        accelerator = self.accelerator
        arriving: list[torch.Tensor] = []

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            layout = tensor.shape, strides_of(tensor), tensor.dtype
            pinned = tensor if accelerator.is_pinned(tensor) else accelerator.empty_pinned(*layout).copy_(tensor)
            with accelerator.using(self.into):
                here = accelerator.empty(*layout)
                accelerator.copy(here, pinned)
            arriving.append(here)
            return here

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if accelerator.is_here(tensor) else _copied(tensor, copied, accelerator.device)

        value = map_tensors(moved, value)
        if arriving:
            self.has_arrived(arriving)
        return value

    def has_arrived(self, arriving: Sequence[torch.Tensor]) -> None:
        """What this thread computes from now on comes after the copies to these tensors, in the stream "into"."""
        done, computing = self.accelerator.event(), self.accelerator.current_stream()
        done.record(self.into)
        computing.wait_event(done)
        for tensor in arriving:
            self.accelerator.keep_for(tensor, computing)

    def wait(self) -> None:
        """Wait until the device has computed all that it was given, and raise what it failed with."""
        done = self.accelerator.event()
        done.record(self.accelerator.current_stream())
        done.synchronize()


def _copied(tensor: torch.Tensor, copied: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> torch.Tensor:
    """A copy of a tensor, or of the parts of a sparse one. Of tensors that torch alone knows how to copy, torch's."""
    if is_plain_tensor(tensor):
        return copied(tensor.detach()).requires_grad_(tensor.requires_grad)
    if is_sparse(tensor):
        form, parts = form_and_parts(tensor)
        return from_parts(form, [copied(part) for part in parts])
    return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)
