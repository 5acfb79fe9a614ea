"""Ctrl-C while fake tensors are at work interrupts, and is not dropped, and does not end the process."""

import gc
import os
import signal
import sys
import time
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from pippy.drivers.worker.measure import live_storages
from pippy.ir.base import interrupts
from pippy.ir.base.interrupts import come_again, heard


def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


class Ends:
    """Ctrl-C comes while it ends."""

    def __del__(self):
        ctrl_c()


class Dropped:
    """Ctrl-C comes while Python calls what was to be called at its end."""


def test_ctrl_c_at_the_end_of_an_object_comes_again():
    with pytest.raises(KeyboardInterrupt), heard():
        Ends()
        while True:
            pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_that_comes_again_ends_a_wait():
    """It was heard when the wait was over: of a script that sleeps, or waits for a socket, after an hour or never."""
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        come_again()
        time.sleep(30)
    assert time.monotonic() - start < 20


def test_ctrl_c_that_comes_again_is_sent_until_it_is_heard(monkeypatch):
    """Where the first comes just before the main thread sleeps, nothing wakes it. It is heard once, nevertheless."""
    send, sent = signal.pthread_kill, []

    def unheard_twice(*args):
        sent.append(args)
        if len(sent) > 2:
            send(*args)

    monkeypatch.setattr(signal, "pthread_kill", unheard_twice)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        come_again()
        time.sleep(30)
    assert time.monotonic() - start < 20
    time.sleep(0.2)  # a second one would raise here
    assert len(sent) == 3


def test_ctrl_c_that_python_drops_comes_again(monkeypatch):
    """Any library's callback may be called at an end."""
    given, dropped = Dropped(), []
    monkeypatch.setattr("sys.unraisablehook", hook := dropped.append)
    with pytest.raises(KeyboardInterrupt), heard():
        reference = weakref.ref(given, lambda _: ctrl_c())
        del given
        assert reference() is None
        time.sleep(30)
    assert sys.unraisablehook is hook and not dropped


@pytest.mark.parametrize("collected", [False, True])
def test_ctrl_c_that_comes_again_and_is_dropped_comes_once_more(monkeypatch, collected):
    """Also where a garbage collection calls it. What else is dropped is told as before."""
    given, dropped, called = Dropped(), [], []
    monkeypatch.setattr("sys.unraisablehook", dropped.append)

    def called_at_its_end(_):
        called.append(_)
        come_again()
        time.sleep(0.2)

    reference = weakref.ref(given, called_at_its_end)
    if collected:
        given.itself = given
    with pytest.raises(KeyboardInterrupt):
        del given
        gc.collect()
        assert reference() is None
        time.sleep(30)
    assert len(called) == 1 and not dropped
    failing = weakref.ref(Dropped(), lambda _: 1 / 0)
    assert failing() is None
    assert [each.exc_type for each in dropped] == [ZeroDivisionError]


def test_ctrl_c_that_other_code_drops_comes_at_the_end():
    done = []
    with pytest.raises(KeyboardInterrupt), heard():
        try:
            ctrl_c()
        except BaseException:
            done.append("dropped")
        done.append("went on")
    assert done == ["dropped", "went on"]


def test_ctrl_c_that_would_come_again_too_late_comes_at_the_end(monkeypatch):
    """A busy machine may send it when the block is over, where an object's end drops it for good. It comes once."""
    started, send = [], []
    monkeypatch.setattr(interrupts._thread, "start_new_thread", lambda *args: started.append(args))
    monkeypatch.setattr(signal, "pthread_kill", lambda *args: send.append(args))
    with pytest.raises(KeyboardInterrupt), heard():
        Ends()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ((function, arguments),) = started
    function(*arguments)
    assert not send
    with heard():
        pass  # nothing is owed


class Interrupted(TorchDispatchMode):
    """Ctrl-C comes while a fake tensor is asked for its device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            ctrl_c()
        return func(*args, **(kwargs or {}))


def test_ctrl_c_while_a_fake_tensor_is_asked_for_its_device():
    """In a process of its own: torch used to end it."""
    layer = torch.nn.Linear(2, 2)
    child = os.fork()
    if child == 0:
        try:
            with heard(), FakeTensorMode(allow_non_fake_inputs=True), Interrupted():
                while True:
                    layer(torch.zeros(2, 2))
        except KeyboardInterrupt:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_ctrl_c_leaves_no_mode_in_force(monkeypatch):
    """It comes while a mode ends, and then again, when that has ended."""
    pop = _python_dispatch._pop_mode

    def interrupted(*args):
        ctrl_c()
        return pop(*args)

    monkeypatch.setattr(_python_dispatch, "_pop_mode", interrupted)
    with pytest.raises(KeyboardInterrupt), heard():
        with FakeTensorMode():
            pass
        while True:
            pass
    assert torch._C._len_torch_dispatch_stack() == 0


def test_the_functions_are_called_so():
    """The names of these functions are those of this Python and this torch."""
    owners = [weakref.WeakKeyDictionary(), weakref.WeakValueDictionary(), weakref.WeakSet()]
    owners.append(torch.utils.weak.WeakIdKeyDictionary())
    found = [owner._remove.__qualname__ for owner in owners]
    counted = live_storages.LiveStorages()
    kept = torch.zeros(2)
    counted.add([kept])
    found += [reference.__callback__.__qualname__ for reference in counted._alive.values()]
    found.append(weakref.finalize.__call__.__qualname__)
    assert sorted(found) == sorted(interrupts._CALLED_AT_AN_END)
