"""Opens a cluster whose workers are processes of this host."""

import errno
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Literal

import torch

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.base.host_errors import host_error, in_words
from pippy.drivers.base.interrupts import uninterrupted
from pippy.drivers.engines.arguments import (
    check_choice,
    check_devices,
    check_seconds,
    check_threads,
    device_name,
    polling_time,
    worker_names,
)
from pippy.drivers.engines.cluster import Cluster
from pippy.drivers.engines.current_cluster import check_none_open, note_opened_cluster, opening
from pippy.drivers.engines.engine import start
from pippy.drivers.engines.lazy_cluster import note_local_cluster
from pippy.drivers.engines.local.launch_config import LaunchConfig
from pippy.drivers.engines.local.local_engine import LocalEngine
from pippy.drivers.wire.messages import rpc
from pippy.ir.base.logs import LOGGER
from pippy.ir.base.public_calls import placing_words
from pippy.ir.base.source import warn

WORKER = "pippy.drivers.worker.worker:Worker"
DEFAULT_DEVICE = "cpu"  # of workers; the tests' option --device names another
TRANSPORTS = ("shared_memory", "rpc", "none")  # none is for workers that pass no tensors, as in tests


@placing_words()
def local_cluster(
    n: int,
    *,
    threads: int | None = None,
    devices: Sequence[str | torch.device] | None = None,
    device: str | torch.device | None = None,
    pin: bool = False,
    names: Sequence[str] | None = None,
    timeout: float = 5.0,
    transport: Literal["shared_memory", "rpc", "none"] | None = None,
    start_timeout: float = 60.0,
    patience: float | None = None,
    _worker: str = WORKER,
) -> Cluster:
    """Start ``n`` workers on this host, in processes of their own.

    `cluster` does this too, and in a script that torchrun has started it joins the workers of torchrun; this function
    is refused there. No main guard is needed: the workers do not run your script. Nothing of the cluster can be reached
    from another host.

    Args:
        n: how many workers to start.
        threads: how many threads each worker computes with. Default: the cores, divided among the workers.
        devices: one device for each worker.
        device: one device for all workers. Default: the CPU.
        pin: gives each worker one core to itself; with a warning if there are more workers than cores.
        names: the names of the workers in messages.
        timeout: a worker that does not answer for so many seconds is lost. So is one whose stage holds Python's lock for
            so long, which only a C extension does.
        transport: how workers pass tensors to one another: through memory that both see, if this host can, or by RPC.
        start_timeout: how many seconds the workers may take to start.
        patience: how many seconds a worker that waits for a value polls for it before it sleeps; waking it takes longer
            than polling. Default: 1 ms if every worker has cores of its own, else 0.

    >>> with local_cluster(2) as workers:  # doctest: +SKIP
    ...     workers
    <Cluster of 2 workers, open: worker0, worker1>
    """
    _check_system()
    cores = sorted(os.sched_getaffinity(0))
    names = worker_names(n, names)
    check_devices(n, devices, device)
    device_names = tuple(map(device_name, devices if devices is not None else [device or DEFAULT_DEVICE] * n))
    threads = _threads(n, threads, pin, len(cores))
    check_choice("transport", transport, (None, *TRANSPORTS))
    check_seconds(timeout=timeout, start_timeout=start_timeout)
    _check_is_only_process(n)
    check_none_open()
    note_local_cluster()
    chosen = _chosen_transport(transport)
    with opening(by_rpc=chosen == "rpc"), in_words(f"{n} workers"):
        if pin:
            _warn_of_shared_cores(names, cores)
        config = LaunchConfig(
            worker=_worker,
            names=names,
            devices=device_names,
            threads=threads,
            cores=tuple(cores[i % len(cores)] for i in range(n)) if pin else None,
            transport=chosen,
            directory=tempfile.mkdtemp(prefix="pippy-") if chosen == "rpc" else "",
            controller=os.getpid(),
            timeout=timeout,
            patience=polling_time(patience, crowded=n * threads > len(cores)),
            log_level=LOGGER.getEffectiveLevel(),
        )
        return _started(config, timeout, start_timeout)


def _started(config: LaunchConfig, timeout: float, start_timeout: float) -> Cluster:
    engine = None
    try:
        with uninterrupted():  # or processes would run that nobody knows of
            engine = LocalEngine(config, start_timeout)
        session = start(engine, timeout, start_timeout)
        if config.uses_rpc:
            rpc.take_reports(session.report_lost)
        return note_opened_cluster(
            Cluster(config.names, session, engine, torch.device(config.devices[0]).type), config.uses_rpc
        )
    except BaseException:
        if engine is not None:
            engine.close()
        raise


def _check_system() -> None:
    """Raise where the system calls of a cluster do not exist."""
    if sys.platform != "linux":
        raise ClusterError(
            f"workers need Linux, and this system is {sys.platform!r}; graphs, schedules and drawings work here, and a Pipe "
            f"runs in this process: pipe(x)"
        )


def _check_is_only_process(n: int) -> None:
    """Raise in one of several processes that torchrun has started: each of them would train on a cluster of its own."""
    rank, ranks = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "1")
    if rank is not None and ranks != "1":
        raise ClusterError(
            f"this is rank {rank} of {ranks} processes that run this script, by torchrun or something like it (RANK and "
            f"WORLD_SIZE are set), and local_cluster({n}) would start {n} workers for each of them; write cluster() in its "
            "place, which makes workers of these processes, or start the script with python. If it was started as one process, "
            "unset RANK and WORLD_SIZE"
        )


def _chosen_transport(transport: str | None) -> str:
    """The transport of this name, or the best one for this host: where processes cannot share memory, warn of RPC."""
    if transport in ("rpc", "none"):
        return transport
    try:
        with uninterrupted():
            os.close(os.memfd_create("pippy"))
        return "shared_memory"
    except (OSError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise host_error(error, "memory that workers share") from error
        why = f"this host cannot share memory between processes ({error})"
    if transport == "shared_memory":
        raise ClusterError(
            f'transport="shared_memory" is not available: {why}; leave transport out, and the workers use TCP on '
            "the loopback interface"
        )
    warn(
        f"{why}; the workers use TCP on the loopback interface instead, which is slower, and which every account of this host "
        f"can reach while they start"
    )
    return "rpc"


def _threads(n: int, threads: int | None, pin: bool, cores: int) -> int:
    check_threads(threads)
    return threads or (1 if pin else max(1, cores // n))


def _warn_of_shared_cores(names: Sequence[str], cores: Sequence[int]) -> None:
    if len(names) <= len(cores):
        return
    shared = "; ".join(
        f"core {core}: {', '.join(on_it)}" for at, core in enumerate(cores) if len(on_it := names[at :: len(cores)]) > 1
    )
    warn(
        f"pin=True gives each worker a core, and this process may use {len(cores)} for {len(names)} workers, so some share one "
        f"and wait for each other ({shared}); start no more than {len(cores)}, or leave out pin, so that the system divides "
        "the cores"
    )
