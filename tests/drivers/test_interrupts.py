"""Ctrl-C is not lost, wherever it comes, and leaves no half of what changes parameters."""

import copy
import gc
import os
import signal
import socket
import threading
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import Pipe, PipelineDriver1F1B
from pippy.drivers.base.interrupts import first_waits, uninterrupted
from pippy.drivers.engines.cluster import Cluster
from pippy.drivers.engines.local.local_cluster import _check_shares_memory
from pippy.drivers.files.contents import NewCheckpoint
from pippy.drivers.files.manifest import INDEX, VALUES
from pippy.drivers.files.synced_files import read_file, write_file
from pippy.drivers.session.calls import Address, PendingCall
from pippy.drivers.session.session import Session
from pippy.drivers.wire.messages.controller_messages import ControllerConnections
from pippy.drivers.wire.messages.stderr_filter import StderrFilter
from pippy.drivers.wire.pickling import pickle_message
from pippy.drivers.wire.pollable_event import PollableEvent
from pippy.ir.base.interrupts import come_again
from tests.drivers.interrupted_everywhere import leaks, lost, places

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


class AsTorch:
    """A call that is answered. Its callback is called at once, while Ctrl-C comes, and torch drops what a callback raises."""

    def done(self):
        return True

    def value(self):
        return pickle_message("an answer")

    def add_done_callback(self, callback):
        try:
            ctrl_c()
            callback(self)
        except KeyboardInterrupt:
            pass


def test_ctrl_c_as_a_wait_begins_is_not_lost_and_the_answer_neither():
    session = Session([Address("worker0", "here", 1)], timeout=0.05)
    call = PendingCall(0, "Step", AsTorch())
    with pytest.raises(KeyboardInterrupt):
        session.answer(call)
    assert not session._waits


_started, _never = threading.Event(), threading.Event()
_done: list[torch.optim.Optimizer] = []


class Interrupted(torch.optim.SGD):
    """Its step on one worker comes with Ctrl-C; the other's goes on for long after that."""

    def step(self, closure=None):
        if threading.current_thread() is not threading.main_thread():  # there it is tried out
            if len(self.param_groups[0]["params"]) == 1:
                ctrl_c()
                _started.set()
            else:
                _started.wait(30)
                _never.wait(0.5)
        super().step()
        _done.append(self)


@pytest.mark.parametrize("how", ["step", "clip", "clamp", "load"])
def test_after_ctrl_c_all_workers_have_changed_their_parameters_or_none(threads, how):
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1, bias=False))
    driver = PipelineDriver1F1B(Pipe.from_sequential(copy.deepcopy(plain), nn.MSELoss()), threads)
    optimizer = driver.instantiate_optimizer(Interrupted if how == "step" else torch.optim.SGD, lr=0.1)
    x, target = torch.randn(8, 4), torch.randn(8, 1)
    F.mse_loss(plain(x), target).backward()
    driver.run(4, x, target)
    _done.clear()
    _started.clear()
    wait = driver.session.wait
    other = {name: value + 1 for name, value in plain.state_dict().items()}

    def interrupted(posted):
        ctrl_c()
        return wait(posted)

    if how != "step":
        driver.commands.wait()
        driver.session.wait = interrupted if how != "clip" else second(wait, interrupted)
    with pytest.raises(KeyboardInterrupt):
        {
            "step": optimizer.step,
            "clip": lambda: driver.clip_grad_norm_(0.1),
            "clamp": lambda: driver.clip_grad_value_(0.01),
            "load": lambda: driver.load_state_dict(other),
        }[how]()
    driver.session.wait = wait
    if how == "step":
        assert len(_done) == 2
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
    if how == "clip":
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    if how == "clamp":
        nn.utils.clip_grad_value_(plain.parameters(), 0.01)
    torch.testing.assert_close(driver.state_dict(), other if how == "load" else dict(plain.state_dict()))
    torch.testing.assert_close(driver.gradients(), {name: each.grad for name, each in plain.named_parameters()})


def second(first, then):
    """The first call of a function, and those after it."""
    calls = iter([first])
    return lambda *args: next(calls, then)(*args)


def test_who_presses_ctrl_c_twice_is_not_kept_waiting():
    seen = []
    with pytest.raises(KeyboardInterrupt), first_waits():
        ctrl_c()
        seen.append("goes on")
        ctrl_c()
        seen.append("never")
    assert seen == ["goes on"]
    with pytest.raises(KeyboardInterrupt), first_waits():
        ctrl_c()
        seen.append("to the end")
    assert seen == ["goes on", "to the end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Stop(Exception):
    """What a handler of the script raises, as for a time limit, or as torch's when a process of a DataLoader has died."""


@pytest.fixture
def stopping():
    """SIGALRM and SIGCHLD have such a handler."""

    def stop(number, frame):
        raise Stop

    before = {number: signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGCHLD)}
    yield stop
    found = [signal.signal(number, handler) for number, handler in before.items()]
    assert found == [stop] * len(before)


def test_a_handler_that_raises_breaks_nothing_wherever_its_signal_comes(cluster, stopping):
    """Of a message, a part was sent: a worker that lived was said to be lost. An answer counted as a failed call."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    driver = PipelineDriver1F1B(Pipe.from_sequential(copy.deepcopy(plain), nn.MSELoss()), cluster)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.0)
    x, target = torch.randn(2, 4), torch.randn(2, 1)

    def train():
        driver.run(1, x, target)
        optimizer.step()
        driver.zero_grad()

    train()
    loss, files = (
        F.mse_loss(plain(x), target).detach(),
        ("drivers/session/session.py", "session/call_wait.py", "session/command_log.py", "_connections.py"),
    )
    found = places(train, files)
    assert len(found) > 50
    for place in found:
        assert not lost(train, files, place, signal.SIGALRM, Stop)
        driver.zero_grad()
        torch.testing.assert_close(driver.run(1, x, target), loss)
    F.mse_loss(plain(x), target).backward()
    torch.testing.assert_close(driver.gradients(), {name: each.grad for name, each in plain.named_parameters()})


def test_a_handler_that_raises_between_a_step_and_its_result_gives_up_the_step(threads, monkeypatch):
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    driver = PipelineDriver1F1B(Pipe.from_sequential(copy.deepcopy(plain), nn.MSELoss()), threads)
    x, target = torch.randn(2, 4), torch.randn(2, 1)
    F.mse_loss(plain(x), target).backward()
    driver.run(1, x, target)
    before = driver.gradients()

    class Interrupting:
        def result(self):
            raise Stop

    run_async = driver.run_async
    with monkeypatch.context() as patched, pytest.raises(Stop):
        patched.setattr(driver, "run_async", lambda *args, **options: (run_async(*args, **options), Interrupting())[1])
        driver.run(1, x, target)
    assert not driver.session.log.outstanding
    torch.testing.assert_close(driver.gradients(), before)
    torch.testing.assert_close(before, {name: each.grad for name, each in plain.named_parameters()})


def test_signals_of_several_kinds_wait_for_the_end_of_a_block_and_each_is_handled(stopping):
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append("handled"))
    try:
        with pytest.raises(Stop), uninterrupted():
            for number in (signal.SIGALRM, signal.SIGUSR1, signal.SIGCHLD):
                signal.raise_signal(number)
            seen.append("to the end")
        assert seen == ["to the end", "handled"]
        with pytest.raises(Stop), first_waits():
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGALRM)
            seen.append("never")
        assert seen == ["to the end", "handled", "handled"]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_ctrl_c_leaves_no_descriptor_open_wherever_it_comes():
    def pass_an_event():
        event = PollableEvent()
        event.set()
        event.clear()
        event.close()

    assert leaks(pass_an_event, "pollable_event.py", "drivers/base/interrupts.py", "contextlib.py") == []


def test_ctrl_c_leaves_no_descriptor_open_while_the_controller_waits():
    """After six Ctrl-C a controller had one more: a wait that began to end stayed in the list of waits, with its event."""
    call, session = PendingCall(0, "Ping", torch.futures.Future()), Session([Address("worker0", "here", 1)])
    call.future.set_result(pickle_message("an answer"))
    assert (
        leaks(lambda: session.answer(call), "drivers/session/session.py", "session/call_wait.py", "pollable_event.py")
        == []
    )
    session.answer(call)
    assert not session._waits


def test_ctrl_c_leaves_no_descriptor_open_while_two_workers_are_connected():
    ends = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    connections = ControllerConnections({worker: ours for worker, (ours, _) in enumerate(ends)})
    for _, theirs in ends:
        theirs.close()  # so what is sent is dropped at once
    assert leaks(lambda: connections.connect(0, 1), "controller_messages.py", "/socket.py") == []
    connections.close()


def test_ctrl_c_leaves_no_descriptor_open_while_memory_that_is_shared_is_tried():
    assert leaks(_check_shares_memory, "local_cluster.py") == []


def test_ctrl_c_leaves_no_descriptor_open_while_standard_error_is_filtered():
    stderr_filter = StderrFilter(b"nothing of note")

    def filter_nothing():
        stderr_filter.start()
        stderr_filter.stop()

    assert leaks(filter_nothing, "stderr_filter.py", "tempfile.py", after=stderr_filter.stop) == []


def test_ctrl_c_leaves_no_lock_and_no_file_open_while_a_checkpoint_is_written(tmp_path):
    """Or the next save would be told that something else saves there."""

    def save():
        with NewCheckpoint(str(tmp_path), step=1) as new:
            written = write_file(new.path, "values", [("all", b"abc")])
            assert read_file(os.path.join(new.path, written.name)) == b"abc"
            files = {name: {"bytes": 0, "hashes": {}} for name in (INDEX, VALUES)}
            new.put_in_place({"model": [], "tied": {}, "optimizers": {}, "files": files})

    assert leaks(save, "contents.py", "synced_files.py") == []
    save()


class Interrupting:
    """Processes of a cluster. Ctrl-C comes while they are ended."""

    fixed = None

    def __init__(self):
        self.ended = []

    def close(self, lost=None):
        self.ended.append("begun")
        ctrl_c()
        self.ended.append("over")


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_while_a_cluster_ends_that_nobody_closed_is_not_dropped_and_all_of_it_ends():
    processes = Interrupting()
    cluster = Cluster(["worker0"], Session([Address("worker0", "here", 1)]), processes)
    with pytest.raises(KeyboardInterrupt):
        del cluster
        gc.collect()
        time.sleep(30)
    assert processes.ended == ["begun", "over"]


def test_ctrl_c_that_comes_again_is_not_lost_in_what_a_collection_calls():
    """Python drops what a function of gc.callbacks raises."""
    called = []

    def collected(phase, info):
        if not called:
            called.append(phase)
            come_again()
            time.sleep(0.1)

    gc.callbacks.append(collected)
    try:
        with pytest.raises(KeyboardInterrupt):
            gc.collect()
            time.sleep(30)
    finally:
        gc.callbacks.remove(collected)
    assert called == ["start"]
