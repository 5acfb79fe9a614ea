"""How a worker's process under torchrun ends: the script's own end counts, and what hangs is named."""

import os
import sys
import threading
import time
import traceback
from contextlib import suppress

import pytest
from torch.futures import Future

from pippy.drivers.engines.torchrun import torchrun_worker
from pippy.drivers.engines.torchrun.torchrun_worker import Leave, TorchrunWorker
from pippy.drivers.protocol.commands import Command
from pippy.drivers.wire.messages import rpc
from tests.drivers.processes import within


@pytest.fixture
def ended(monkeypatch):
    """Runs a function with a worker in a process of its own; gives the exit status and what it wrote to stderr."""
    monkeypatch.setattr(torchrun_worker, "LEAVES_WITHIN", 0.1)

    def run(function):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.dup2(writing, 2)
                os.close(writing)
                sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
                worker = TorchrunWorker(0, ["only"], "cpu", str)
                worker.see_to_leaving()
                function(worker)
            except SystemExit as end:
                os._exit(end.code)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(99)
        os.close(writing)
        with within(10), open(reading) as said:
            text = said.read()
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text

    return run


def test_what_the_script_does_after_its_cluster_takes_as_long_as_it_takes(ended, monkeypatch):
    write, written, has_left = torchrun_worker.write_error_line, threading.Event(), threading.Event()

    def note(text):
        write(text)
        written.set()

    def script(worker):
        monkeypatch.setattr(torchrun_worker, "write_error_line", note)
        still_here = worker._still_here
        worker._still_here = lambda: (
            has_left.wait(30) and still_here()
        )  # on a busy machine the worker may take 0.1 s to leave
        worker.urgent(Leave(now=True))
        worker.run()
        worker.has_left()
        has_left.set()
        thread = threading.Thread(target=written.wait, args=(30,), name="uploads")
        thread.start()
        thread.join()
        raise SystemExit(7)

    status, text = ended(script)
    assert status == 7
    assert "worker 'only'" in text and "goes on 0.1 s after it has left its cluster" in text and "'uploads'" in text


def test_a_stage_that_hangs_is_named_and_the_process_has_not_succeeded(ended):
    def script(worker):
        worker.worker.command = Command(3, 2, 0, None)
        worker.urgent(Leave(now=True))
        time.sleep(30)

    status, text = ended(script)
    assert status == 1
    assert "worker 'only'" in text and "0.1 s after its cluster was closed it was still at command 3" in text


def test_a_worker_that_has_no_memory_for_a_thread_when_it_is_told_to_leave_ends(ended, monkeypatch):
    """It was told, and waited for RPC for ever: nothing could be started that would have ended it."""

    def script(worker):
        monkeypatch.setattr(threading.Thread, "start", no_memory)
        with suppress(MemoryError):
            worker.urgent(Leave(now=True))
        time.sleep(30)

    status, text = ended(script)
    assert status == 1 and "after its cluster was closed it was still at" in text


def failed():
    """A call of RPC that has failed."""
    future = Future()
    future.set_exception(MemoryError())
    return future


def no_memory(*args):
    raise MemoryError


@pytest.mark.parametrize("told", [False, True])
def test_a_worker_that_had_no_memory_when_its_controller_went_ends(ended, monkeypatch, told):
    """It was not told, as the call of its callback failed; or it was told, and could not write why it ends."""
    monkeypatch.setattr(torchrun_worker, "ASKS_AFTER", 0.05)

    def watch(to, seconds, broken):
        if told:
            monkeypatch.setattr(torchrun_worker, "write_error_line", no_memory)
            broken()
        return failed()

    def script(worker):
        monkeypatch.setattr(rpc, "watch", watch)
        worker.watch("controller", 0.05)
        time.sleep(30)

    status, text = ended(script)
    assert status == 1
    assert told or ("worker 'only'" in text and "ends itself: the connection to the controller broke" in text)


@pytest.mark.parametrize("pings", [[], [failed()], [failed(), Future()], [failed(), failed(), "an answer"]])
def test_a_ping_that_fails_is_no_answer(monkeypatch, pings):
    """It was taken for one: the connection had broken, and the worker waited for ever."""
    left = list(pings)

    def urgent(to, pickled):
        ping = left.pop(0) if left else failed()
        if isinstance(ping, str):
            answered = Future()
            answered.set_result(ping)
            return answered
        return ping

    monkeypatch.setattr(rpc, "urgent", urgent)
    monkeypatch.setattr(torchrun_worker, "_AGAIN", 0.01)
    start, answered = time.monotonic(), "an answer" in pings
    assert torchrun_worker.answers_ping("controller", 10.0 if answered else 0.2) == answered
    assert time.monotonic() - start < 9
