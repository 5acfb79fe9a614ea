"""A device that does each thing as late as a device may, so that what is read too early, or freed, is wrong numbers.

Its tensors are tensors of the CPU, and its computing stream does everything at once. The other streams do nothing before
somebody waits for an event in them. Memory that nothing has been copied to has no numbers: it is not a number, or -77. A copy
has none either if its source was freed before it was made, or if its stream did not wait for what made its source.
What cannot show in the numbers of a run on the CPU is noted in ``faults``.

Memory that two devices use is a file in memory, and so is an event that two processes know, so the devices may be in two
processes. What a device copies to such memory, and that it has reached such an event, it does when somebody waits for it: the
other device, if both are in this process, or the host.
"""

import itertools
import os
import threading
import time
import weakref
from collections import deque
from contextlib import contextmanager

import torch

from pippy.drivers.wire.gpu.accelerator import Accelerator, NotShared
from pippy.drivers.wire.memory import create_shared, map_shared


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

    def synchronize(self):
        self.device.note_wait()
        self.device.host_waits += 1
        if threading.current_thread().name == "pippy copies":
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
        if type(event) is SharedEvent:
            self.do(event.reaching())
        elif self.computes:
            event.reach()
        else:
            self.seen = max(self.seen, event.moment)


class SimulatedDevice(Accelerator):
    device = torch.device("cpu")
    lock = threading.RLock()  # one for all devices, as each may have to do what another one waits for
    recording: dict = {}  # by the handle of an event: the streams that will reach it, in order

    def __init__(self, late=True, shares=True):
        self.late, self.shares, self.own = late, shares, threading.local()
        self.copied = self.host_waits = 0
        self.let_go = False  # in place of the end of its process, which ends what it waits for
        self._blocks = {}
        self.computing = SimulatedStream(self, computes=True)
        self.faults, self.waits, self.freed_caches = [], [], 0
        self.fails, self.arrived, self.waited_until = False, 0, 0
        self.copies_may_end = threading.Event()  # as the thread that waits for copies sees it
        self.copies_may_end.set()
        self.has_failed = threading.Event()
        self._moment = 0
        self._threads = set()  # those that have it as their current device
        self._here, self._pinned, self._made, self._stream_of, self._kept = {}, {}, {}, {}, set()

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
        yield
        self.own.stream = before

    def event(self, timed=False):
        return SimulatedEvent(self, timed)

    def is_here(self, tensor):
        return _is_in(self._here, tensor)

    def is_on_host(self, tensor):
        return _is_in(self._pinned, tensor)

    is_pinned = is_on_host

    def empty(self, shape, stride, dtype):
        self.check_current()
        made = _put_in(self._here, spoil(torch.empty_strided(shape, stride, dtype=dtype)))
        self._stream_of[id(made)] = self.current_stream()
        weakref.finalize(made, self._freed, id(made), self.current_stream())
        return made

    def empty_pinned(self, shape, stride, dtype):
        return _put_in(self._pinned, spoil(torch.empty_strided(shape, stride, dtype=dtype)))

    def copy(self, target, source):
        stream, waits_for = self.current_stream(), self._made.get(id(source), 0)
        self.copied += 1
        if self._block_of(source) or self._block_of(target):
            self._copy_shared(target, source, stream)
            return
        if stream.computes:
            if id(source) in self._pinned or id(target) in self._pinned:
                self.faults.append("the stream that computes is held up by a copy from or to the host")
            target.copy_(source)
            self._made[id(target)] = self.now()
            return
        self._check_copy(target, source, stream)
        comes_after, plain = stream.seen, target.detach()
        # torch keeps pinned memory until the copies from it are made; memory of the device is used again at once
        found = (lambda: source) if id(source) in self._pinned else weakref.ref(source)

        def copy():
            alive = found()
            if alive is None or waits_for > comes_after:
                spoil(plain)
            else:
                plain.copy_(alive)

        stream.waiting.append(copy)

    def keep_for(self, tensor, stream):
        assert stream is self.computing
        self._kept.add(id(tensor))

    def free_cache(self):
        self.freed_caches += 1

    def share(self, size):
        if not self.shares:
            raise NotShared("it shares no memory")
        memory, fd, handle = shared_file(size)
        tensor = self._known(memory)
        weakref.finalize(tensor, os.close, fd)
        return tensor, handle

    def open(self, handle):
        if not self.shares:
            raise NotShared("it opens no memory")
        return self._known(opened_file(handle))

    def shared_event(self):
        memory, fd, handle = shared_file(4096)
        event = SharedEvent(self, memory, handle)
        weakref.finalize(event, os.close, fd)
        return event, handle

    def open_event(self, handle):
        return SharedEvent(self, opened_file(handle), handle)

    # -- what tests ask for

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

    def _known(self, memory):
        """Shared memory as a tensor of this device. It is there until the tensor is freed."""
        tensor = torch.frombuffer(memory.bytes, dtype=torch.uint8)
        block = self._blocks[tensor.data_ptr()] = SharedBlock()
        weakref.finalize(tensor, self._free_block, tensor.data_ptr(), block)
        return tensor

    def _free_block(self, address, block):
        block.freed = True
        del self._blocks[address]

    def _block_of(self, tensor):
        return self._blocks.get(tensor.untyped_storage().data_ptr())

    def _copy_shared(self, target, source, stream):
        block, plain = self._block_of(source) or self._block_of(target), target.detach()
        if self._block_of(target):
            assert stream.computes, "a copy to shared memory is the value's own"
            source = source.clone()
        elif self._stream_of.get(id(target)) is not stream:
            self.faults.append("a copy into memory of another stream, which may still be in use there")

        def copy():
            if block.freed:
                self.faults.append("shared memory is used that is not there any more")
            plain.copy_(source)

        stream.do(copy)

    def _check_copy(self, target, source, stream):
        to_host = id(source) in self._here
        self.arrived += not to_host
        if id(source if not to_host else target) not in self._pinned:
            self.faults.append("a copy from or to memory that is not pinned keeps the thread waiting")
        if not to_host and self._stream_of.get(id(target)) is not stream:
            self.faults.append("a copy into memory of another stream, which may still be in use there")

    def _freed(self, number, stream):
        if stream is not self.computing and number not in self._kept:
            self.faults.append("memory of a copying stream is used again while the computing stream may still need it")
        self._kept.discard(number)
        self._made.pop(number, None)
        self._stream_of.pop(number, None)


class SharedBlock:
    freed = False


class SharedEvent:
    """An event that two processes know: a page has how often it was recorded, and which of these were reached.

    To wait for it is to wait for the last one that was recorded by then.
    """

    def __init__(self, device, memory, handle):
        self.device, self.handle = device, handle
        self.words = memory.bytes.cast("I")

    def record(self, stream):
        self.device.check_current()
        coming = self.device.recording.setdefault(self.handle, deque())
        number = self.words[0] + 1

        def reach():
            self.words[1] = number
            coming.remove(stream)

        with self.device.lock:
            self.words[0] = number
            coming.append(stream)
            stream.do(reach)

    def query(self):
        self.device.check_current()
        return self.words[1] >= self.words[0]

    def reaching(self):
        """What a stream does that waits for it."""
        number = self.words[0]

        def wait():
            coming, end = self.device.recording.get(self.handle), time.monotonic() + 20
            while self.words[1] < number and not self.device.let_go:
                if coming:
                    coming[0].do_next()
                    continue
                assert time.monotonic() < end, "a device waits for ever"
                self.device.lock.release()
                time.sleep(1e-3)  # another process's device
                self.device.lock.acquire()

        return wait


def shared_file(size):
    """Memory that another process can open while this descriptor is open, and how."""
    fd, memory = create_shared(size)
    return memory, fd, f"/proc/{os.getpid()}/fd/{fd}#{next(_numbers)}".encode()


def opened_file(handle):
    fd = os.open(handle.partition(b"#")[0], os.O_RDWR)
    try:
        return map_shared(fd)
    finally:
        os.close(fd)


_numbers = itertools.count()


def _put_in(known, tensor):
    number = id(tensor)
    known[number] = weakref.ref(tensor, lambda _: known.pop(number, None))
    return tensor


def _is_in(known, tensor):
    return id(tensor) in known
