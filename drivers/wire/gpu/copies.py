"""Copies of values between a device and the host, or another device of the host, beside what the device computes.

    stream             does
    the thread's own   computes, and copies what leaves: the value may be changed or freed at once
    out                copies that copy to the host
    into               copies to the device: from the host, and from another device's memory when that has written it

The host waits for no copy. What is computed after a copy to the device waits for it; what was computed before does not.

`Accelerator` is what the runtime asks of such a device: torch's; a test may derive another one.

The host only starts what the device is to do, in streams, as torch has them. Nothing here waits for the device but the
``synchronize`` of an event. Workers on the CPU have no accelerator.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from pippy.drivers.wire.value_layout import is_plain_tensor, strides_of
from pippy.ir.base.trees import form_and_parts, from_parts, is_sparse, map_leaves, map_tensors

_DEVICE, _HANDLE, _COUNTER, _EVENT = 6, 7, slice(11, 13), slice(13, 15)  # of what rebuild_cuda_tensor takes


class NotShared(Exception):
    """Two processes cannot use one memory of a device; the text says why. Values go through the host's memory then."""


class Shared:
    """Stands for a tensor that another process may open: ``given`` is what torch.multiprocessing sends of it."""

    def __init__(self, given: Any) -> None:
        self.given = given


class Accelerator:
    """A device of one worker other than the CPU; ``device`` is torch's name of it. Raises if it does not work."""

    def __init__(self, device: torch.device) -> None:
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self.device, self.module = torch.device(device.type, index), cast(Any, torch.get_device_module(device))
        self._sleeps = {"blocking": True} if device.type == "cuda" else {}  # else a thread that waits is busy

    def set_current(self) -> None:
        """Make it the current device of this thread: where ``device="cuda"`` and Triton's kernels go."""
        self.module.set_device(self.device)

    def new_stream(self) -> Any:
        """A stream beside the one in which stages compute."""
        return self.module.Stream(self.device)

    def current_stream(self) -> Any:
        """The stream of this thread. Stages compute in it."""
        return self.module.current_stream(self.device)

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, the thread gives what it starts to this stream."""
        return cast(AbstractContextManager[Any], self.module.stream(stream))

    def event(self, timed: bool = False) -> Any:
        """A new event; ``timed``, if its time is to be read."""
        return self.module.Event(enable_timing=timed, **self._sleeps)

    def is_here(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on this device."""
        return tensor.device == self.device

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether the host may read a tensor without the device."""
        return tensor.device.type == "cpu"

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in memory of the host that the device copies from while the host goes on: itself, if it is there."""
        return tensor.cpu().pin_memory()

    def copy(self, tensor: torch.Tensor, to_host: bool = False) -> torch.Tensor:
        """Start to copy a tensor of the device, or of pinned memory, in the current stream. Returns the copy."""
        place: Any = {"pin_memory": True} if to_host else {"device": self.device}
        target = torch.empty_strided(tensor.shape, strides_of(tensor), dtype=tensor.dtype, **place)
        return target.copy_(tensor, non_blocking=True)

    def keep_for(self, tensor: torch.Tensor, stream: Any) -> None:
        """When this tensor is freed, use its memory again only after what ``stream`` has been given by then."""
        tensor.record_stream(stream)

    def free_cache(self) -> None:
        """Give back what was freed: another worker may compute on the same device."""
        if self.device.type == "cuda":
            self.module.ipc_collect()  # what other processes have let go
        self.module.empty_cache()

    def share(self, tensor: torch.Tensor) -> Shared:
        """Let another process open a tensor, which may be dropped here: torch keeps its memory until that lets go, or for ever.

        With it goes an event of the current stream: the tensor is written then. Raises NotShared if it cannot be.
        """
        if self.device.type != "cuda" or torch.version.hip:
            kind = "AMD" if torch.version.hip else repr(self.device.type)
            raise NotShared(f"two processes cannot yet use one memory of a device of type {kind}")
        return Shared(_tried(lambda: reduce_tensor(tensor)[1]))

    def open(self, shared: Shared) -> torch.Tensor:
        """A tensor of another process, for what the current stream does from now on. Raises NotShared if it cannot be used.

        To let go of it, drop it while a stream is current that has nothing to do: torch waits for that one.
        """
        given = list(shared.given)
        handle, must_wait = given[_EVENT]
        # opened on this device, also if it is another one's memory, which may not be visible here
        given[_DEVICE], given[_EVENT] = self.device.index, (handle, False)
        if must_wait:  # here, as torch would never close the event
            opened = _tried(lambda: self.module.Event.from_ipc_handle(self.device, handle))
            self.current_stream().wait_event(opened)
        return cast(torch.Tensor, _tried(lambda: rebuild_cuda_tensor(*given)))

    def let_go(self, shared: Shared) -> None:
        """Let go of a tensor that was not opened."""
        if shared.given[_HANDLE] is not None:
            torch.UntypedStorage._release_ipc_counter(*shared.given[_COUNTER])


def _tried(call: Any) -> Any:
    try:
        return call()
    except RuntimeError as error:  # of CUDA; what follows the first line is about other errors
        raise NotShared(str(error).partition("\n")[0]) from error


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
