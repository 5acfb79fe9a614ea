"""A device that does each thing as late as a device may, so that what is read too early, or freed, is wrong numbers.

Its tensors are tensors of the CPU, and its computing stream does everything at once. The other streams do nothing before
somebody waits for an event in them. Memory that nothing has been copied to has no numbers: it is not a number, or -77. A copy
has none either if its source was freed before it was made, or if its stream did not wait for what made its source.
What cannot show in the numbers of a run on the CPU is noted in ``faults``.

A tensor that two devices use is a file in memory, which has also whether the sender's device has written it, and how many
processes have it open, as torch counts them. So the devices may be in two processes. What a device shares it writes when
somebody waits for it: the other device, if both are in this process, or the host. When nobody has it open, it is used again.
"""

import itertools
import os
import threading
import time
import weakref
from collections import deque
from contextlib import contextmanager

import torch

from pippy.drivers.wire.gpu.copies import Accelerator, NotShared, Shared
from pippy.drivers.wire.memory import create_shared, map_shared
from pippy.drivers.wire.value_layout import strides_of
from pippy.ir.base.trees import form_and_parts, is_sparse


class DeviceFailed(Exception):
    """The simulated device has failed, as after an assertion in a kernel."""


def spoil(tensor):
    return tensor.fill_(
        float("nan") if tensor.is_floating_point() or tensor.is_complex() else tensor.dtype != torch.bool and -77
    )


class SimulatedEvent:
    def __init__(self, device, timed):
        self.device, self.timed, self.stream, self.moment, self.reached = device, timed, None, 0, True

    def record(self, stream):
        self.device.check_current()
        self.stream, self.moment, self.time = stream, self.device.now(), time.monotonic()
        self.reached = stream.computes
        if not stream.computes:
            stream.waiting.append(self._reach)

    def query(self):
        self.device.check_current()
        return self.reached

    def synchronize(self):
        self.device.note_wait()
        self.device.host_waits += 1
        if threading.current_thread().name.startswith("pippy copies"):
            assert self.device.copies_may_end.wait(10)
        self.reach()
        self.device.computing.do_all()
        self.device.waited_until = max(self.device.waited_until, self.moment)
        if self.device.fails:
            self.device.has_failed.set()
            raise DeviceFailed("an assertion in a kernel")

    def reach(self):
        with self.device.lock:
            while not self.reached:
                self.stream.do_next()

    def elapsed_time(self, end):
        assert self.timed and end.timed and max(self.moment, end.moment) <= self.device.waited_until
        return (end.time - self.time) * 1e3

    def _reach(self):
        self.reached = True


class SimulatedStream:
    def __init__(self, device, computes=False):
        self.device, self.computes = device, computes
        self.waiting = deque()
        self.seen = 0  # what was computed up to this moment, it comes after
        self.busy = False

    def do_next(self):
        assert not self.busy, "a stream waits for what it is to do later"
        self.busy = True
        try:
            self.waiting.popleft()()
        finally:
            self.busy = False

    def do_all(self):
        with self.device.lock:
            while self.waiting:
                self.do_next()

    def do(self, what):
        """Do something when somebody waits for it."""
        self.waiting.append(what)
        if not self.device.late:
            self.do_all()

    def wait_event(self, event):
        if self.computes:
            event.reach()
        else:
            self.seen = max(self.seen, event.moment)


class SimulatedDevice(Accelerator):
    device = torch.device("cpu")
    lock = threading.RLock()  # one for all devices, as each may have to do what another one waits for
    writing: dict = {}  # the streams that will write what is shared, by its handle

    def __init__(self, late=True, shares=True):
        self.late, self.shares, self.own = late, shares, threading.local()
        self.copied = self.host_waits = 0
        self.let_go_of = False  # in place of the end of its process, which ends what it waits for
        self.computing = SimulatedStream(self, computes=True)
        self.faults, self.waits, self.freed_caches = [], [], 0
        self.fails, self.arrived, self.waited_until = False, 0, 0
        self.copies_may_end = threading.Event()  # as the thread that waits for copies sees it
        self.copies_may_end.set()
        self.has_failed = threading.Event()
        self._moment = 0
        self._threads = set()  # those that have it as their current device
        self._here, self._pinned, self._made, self._stream_of, self._kept = {}, {}, {}, {}, set()
        self._lent, self._opened = [], {}

    # -- what the runtime asks for

    def set_current(self):
        self._threads.add(threading.get_ident())

    def new_stream(self):
        return SimulatedStream(self)

    def current_stream(self):
        return getattr(self.own, "stream", self.computing)

    @contextmanager
    def using(self, stream):
        before, self.own.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self.own.stream = before

    def event(self, timed=False):
        return SimulatedEvent(self, timed)

    def is_here(self, tensor):
        return _is_in(self._here, tensor)

    def is_on_host(self, tensor):
        return _is_in(self._pinned, tensor)

    def pinned(self, tensor):
        if self.is_on_host(tensor):
            return tensor
        own = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return _put_in(self._pinned, own).copy_(tensor)

    def copy(self, tensor, to_host=False):
        self.copied += 1
        stream = self.current_stream()
        target = spoil(torch.empty_strided(tensor.shape, strides_of(tensor), dtype=tensor.dtype))
        if to_host:
            _put_in(self._pinned, target)
        else:
            self.check_current()
            _put_in(self._here, target)
            self._stream_of[_key(target)] = stream
            weakref.finalize(target.untyped_storage(), self._freed, _key(target), stream)
        if stream.computes:
            if self.is_on_host(tensor) or to_host:
                self.faults.append("the stream that computes is held up by a copy from or to the host")
            target.copy_(tensor)
            self._made[_key(target)] = self.now()
        else:
            stream.do(self._copying(target.detach(), tensor, stream, to_host))
        return target

    def _copying(self, target, source, stream, to_host):
        """What a stream does to copy, later."""
        is_from_host, is_opened = self.is_on_host(source), _key(source) in self._opened
        if not is_opened and not to_host:
            self.arrived += 1
            if not is_from_host:
                self.faults.append("a copy from memory that is not pinned keeps the thread waiting")
        comes_after, waits_for = stream.seen, self._made.get(_key(source), 0)
        # torch keeps pinned memory until the copies from it are made; memory of the device is used again at once
        storage, kept = weakref.ref(source.untyped_storage()), source if is_from_host else None
        form = source.storage_offset(), source.shape, source.stride()

        def copy():
            alive = storage()
            if alive is None or waits_for > comes_after:
                if is_opened:
                    self.faults.append("shared memory is used that is not there any more")
                spoil(target)
            else:
                target.copy_(torch.empty(0, dtype=target.dtype).set_(alive, *form) if kept is None else kept)

        return copy

    def keep_for(self, tensor, stream):
        assert stream is self.computing
        self._kept.add(_key(tensor))

    def free_cache(self):
        self.freed_caches += 1
        self.lent()

    def share(self, tensor):
        if not self.shares:
            raise NotShared("it shares no memory")
        assert self.is_here(tensor) and self.current_stream() is self.computing
        self.lent()
        lent = SharedTensor(*create_shared(_HEAD + tensor.nbytes)[::-1])
        lent.words[_COUNT] = 1
        handle = f"/proc/{os.getpid()}/fd/{lent.fd}#{next(_numbers)}"
        self._lent.append(lent)
        bound = self.writing[handle] = self.computing

        def write():
            lent.elements(tensor.dtype).copy_(tensor.detach().as_strided((tensor.numel(),), (1,)))
            lent.words[_WRITTEN] = 1
            del self.writing[handle]

        with self.lock:
            bound.do(write)
        return Shared((handle, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad))

    def open(self, shared):
        if not self.shares:
            raise NotShared("it opens no memory")
        handle, shape, stride, dtype, requires_grad = shared.given
        borrowed, stream = opened_file(handle), self.current_stream()
        assert not stream.computes, "the stream that computes would wait for another device"
        stream.do(self.waiting(handle, borrowed))
        tensor = borrowed.elements(dtype)
        self._opened[_key(tensor)] = handle
        weakref.finalize(tensor.untyped_storage(), self._closed, _key(tensor), borrowed.words)
        return tensor.as_strided(shape, stride).requires_grad_(requires_grad)

    def waiting(self, handle, borrowed):
        """What a stream does that waits for another device."""

        def wait():
            end = time.monotonic() + 20
            while not borrowed.words[_WRITTEN] and not self.let_go_of:
                if handle in self.writing:
                    self.writing[handle].do_next()
                    continue
                assert time.monotonic() < end, "a device waits for ever"
                self.lock.release()
                time.sleep(1e-3)  # another process's device
                self.lock.acquire()

        return wait

    def let_go(self, shared):
        opened_file(shared.given[0]).words[_COUNT] -= 1

    def _closed(self, key, words):
        del self._opened[key]
        stream = self.current_stream()
        if stream.computes or stream.waiting:
            self.faults.append("the host waits for a stream to let go of shared memory")
        words[_COUNT] -= 1

    # -- what tests ask for

    def lent(self):
        """How many tensors others have not let go of. The memory of the others is used again."""
        for lent in [lent for lent in self._lent if lent.words[_COUNT] == 0]:
            self._lent.remove(lent)
            lent.memory.bytes[_HEAD:] = b"\xff" * (len(lent.memory.bytes) - _HEAD)
            os.close(lent.fd)
        return len(self._lent)

    def now(self):
        with self.lock:
            self._moment += 1
            return self._moment

    @contextmanager
    def forbidding_waits(self):
        """Inside, this thread must not wait for the device."""
        self.own.forbidden = True
        try:
            yield
        finally:
            self.own.forbidden = False

    def note_wait(self):
        self.check_current()
        if getattr(self.own, "forbidden", False):
            self.faults.append("the thread that computes waits for the device")

    def check_current(self):
        if threading.get_ident() not in self._threads:
            self.faults.append(f"it is not the current device of thread {threading.current_thread().name!r}")

    def _freed(self, number, stream):
        if stream is not self.computing and number not in self._kept:
            self.faults.append("memory of a copying stream is used again while the computing stream may still need it")
        self._kept.discard(number)
        self._made.pop(number, None)
        self._stream_of.pop(number, None)


_HEAD, _WRITTEN, _COUNT = 64, 0, 1  # bytes, and words in them


class SharedTensor:
    """A file in memory: a head, and the elements of a tensor."""

    def __init__(self, memory, fd=None):
        self.memory, self.fd, self.words = memory, fd, memory.bytes[:_HEAD].cast("q")

    def elements(self, dtype):
        data = self.memory.bytes[_HEAD:]
        return torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)


def opened_file(handle):
    fd = os.open(handle.partition("#")[0], os.O_RDWR)
    try:
        return SharedTensor(map_shared(fd))
    finally:
        os.close(fd)


_numbers = itertools.count()


def _key(tensor):
    return id(tensor.untyped_storage())


def _put_in(known, tensor):
    key = _key(tensor)
    known[key] = weakref.ref(tensor.untyped_storage(), lambda _: known.pop(key, None))
    return tensor


def _is_in(known, tensor):
    return _key(form_and_parts(tensor)[1][0] if is_sparse(tensor) else tensor) in known
