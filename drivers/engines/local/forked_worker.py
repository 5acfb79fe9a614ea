"""A worker of a local cluster, from its fork to its end."""

import os
import signal
import socket
import sys
import threading
import traceback
from typing import Any, NoReturn

from pippy.drivers.base.host_errors import HostError, in_words
from pippy.drivers.engines.local.launch_config import CONTROLLER, LaunchConfig
from pippy.drivers.engines.local.launch_reports import Failed, Ready, report
from pippy.drivers.engines.local.parent_death import die_with_controller, die_with_parent
from pippy.drivers.engines.standard_streams import exit_at_once


def start_worker(index: int, worker: type, config: LaunchConfig, controller: socket.socket) -> NoReturn:
    """Run a worker in this process, then exit."""
    status = 1
    try:
        with in_words(f"worker {config.names[index]!r}"):
            become_worker(index, config, controller)
            run_worker(index, worker, config, controller)
        status = 0
    except BaseException as error:
        text = str(error) if isinstance(error, HostError) else traceback.format_exc()
        report(controller, Failed(index, text, config.start))
        traceback.print_exc()
    finally:
        exit_at_once(status)


def become_worker(index: int, config: LaunchConfig, controller: socket.socket) -> None:
    """Set up this process: signals, its end with the controller's, its core, its output."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with_parent(os.getppid())
    threading.Thread(target=die_with_controller, args=(controller, config), daemon=True).start()
    if config.cores:
        os.sched_setaffinity(0, {config.cores[index]})
    for stream in (sys.stdout, sys.stderr):  # so that all is written when a worker is killed
        if stream is not None:
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def run_worker(index: int, worker: type, config: LaunchConfig, controller: socket.socket) -> None:
    """Make a worker, let it be reached, and run it."""
    import torch

    from pippy.drivers.wire.gpu.device_transport import for_device
    from pippy.drivers.wire.messages.message_queue import MessageQueue
    from pippy.drivers.worker.worker_context import WorkerContext

    torch.set_num_threads(config.threads)
    device, messages = config.devices[index], MessageQueue()
    transport, copies = for_device(device, make_transport(config, index, messages), config.near(index))
    place = index, config.names, messages, transport, device, config.threads
    running = worker(WorkerContext(*place, copies=copies, log_level=config.log_level))
    if config.uses_rpc:
        from pippy.drivers.wire.messages import rpc

        rpc.serve(rpc.Served(messages, running.urgent, transport.deliver))
        report(controller, Ready(index, os.getpid(), config.start))
        rpc.join(config.rpc_name(index), index + 1, len(config.names) + 1, config.meeting, "uv", "lo")
    else:
        from pippy.drivers.wire.messages.urgent import UrgentConnection

        UrgentConnection(socket.socket(fileno=config.sockets[1]), running.urgent).start()
        report(controller, Ready(index, os.getpid(), config.start))
    running.run()


def make_transport(config: LaunchConfig, index: int, messages: Any) -> Any:
    """The transport of this worker to the others and, but for RPC, to the controller, from host to host."""
    if config.uses_rpc:
        from pippy.drivers.wire.messages.rpc_values import transport_by_rpc

        everybody = range(len(config.names))
        return transport_by_rpc(index, config.rpc_name, CONTROLLER, config.timeout, far=everybody)[0]
    from pippy.drivers.wire.messages.message_connection import WorkerMessageConnection
    from pippy.drivers.wire.worker_transport import WorkerTransport

    controller = WorkerMessageConnection(socket.socket(fileno=config.sockets[0]), messages).connection
    pinned = config.devices[index] != "cpu"
    return WorkerTransport(index, pinned=pinned, controller=controller, patience=config.patience)
