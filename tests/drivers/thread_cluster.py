"""A cluster whose workers are threads of this process: for tests that need workers, and no processes."""

import gc
import threading
from contextlib import contextmanager, suppress

import torch

from pippy.drivers.engines.cluster import Cluster
from pippy.drivers.engines.routes import Routes
from pippy.drivers.session.control import Address, Control, PendingCall
from pippy.drivers.wire.gpu.copies import DeviceCopies
from pippy.drivers.wire.gpu.device_transport import DeviceTransport
from pippy.drivers.wire.in_process import in_process
from pippy.drivers.wire.messages.message_queue import MessageQueue
from pippy.drivers.wire.pickling import pickle_message, unpickle
from pippy.drivers.worker.worker import Worker
from pippy.drivers.worker.worker_context import WorkerContext


class Stop(Exception):
    """Ends a worker's thread."""


class ThreadControl(Control):
    """Control of workers in this process. What it sends is pickled, as it would be on its way to another."""

    def __init__(self, workers, addresses):
        super().__init__(addresses)
        self.threads = workers

    def post(self, worker, message):
        future = torch.futures.Future()
        self.threads[worker].context.messages.put(
            self.counts[worker], travelled(message), lambda answer: future.set_result(pickle_message(travelled(answer)))
        )
        self.counts[worker] += 1
        return PendingCall(worker, type(message).__name__, future)

    def urgent(self, worker, message):
        future = torch.futures.Future()
        future.set_result(pickle_message(self.threads[worker].urgent(message)))
        return PendingCall(worker, type(message).__name__, future)

    def ping(self, worker):
        return self.urgent(worker, None)


def travelled(message):
    """A message as it arrives in another process: nothing of it is shared."""
    data, tensors = pickle_message(message)
    return unpickle((data, [tensor.clone() for tensor in tensors]))


class NoProcesses:
    fixed = "the workers are threads of this process"

    def deaths(self):
        return {}

    def close(self):
        pass


@contextmanager
def thread_cluster(n, accelerators=None):
    """A cluster of ``n`` workers; each computes on its accelerator, if some are given."""
    names = tuple(f"worker{index}" for index in range(n))
    transports, copies = in_process(n), [each and DeviceCopies(each) for each in accelerators or [None] * n]
    near = {index for index, each in enumerate(copies) if each}
    transports = [
        carrier if own is None else DeviceTransport(carrier, own, near - {index})
        for index, (carrier, own) in enumerate(zip(transports, copies))
    ]
    workers = [
        Worker(WorkerContext(index, names, MessageQueue(), transports[index], "cpu", 1, True, copies[index]))
        for index in range(n)
    ]
    for worker in workers:
        inner = worker.answer
        worker.answer = lambda command, inner=inner: _stop() if command is None else inner(command)
    threads = [threading.Thread(target=_run, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    gc.freeze()  # a worker collects garbage when a driver is closed: as in a process, without what was imported before
    control = ThreadControl(workers, [Address(name, name, "here", 0) for name in names])
    devices = tuple("simulated" if each else "cpu" for each in copies)
    cluster = Cluster(names, control, NoProcesses(), routes=Routes.of_host(names, "here", True, devices))
    try:
        with cluster:
            yield cluster
    finally:
        gc.unfreeze()
        for worker, count in zip(workers, control.counts):
            worker.context.messages.put(count, None, lambda _: None)
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        for worker in workers:
            worker.context.transport.close()
            worker.context.messages.close()


def _stop():
    raise Stop


def _run(worker):
    with suppress(Stop):
        worker.run()
