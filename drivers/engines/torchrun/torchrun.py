"""Clusters whose processes torchrun has started, on one host or several: rank 0 is the controller, the others are workers.

    torchrun ─▶ rank 0: the script; by default, worker 0 on a thread of its own
             ─▶ rank 1, 2, …: a worker, from the call of `cluster` to the controller's end; then the script ends there

All ranks write their host and process into torchrun's store, and wait there for each other. Those of one host get sockets to
one another (meeting.py); values between them go through shared memory. Then RPC connects all.

The processes run already: the engine joins them, and tells them to leave.
"""

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch.futures import Future

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.base.process import keep_freed_memory
from pippy.drivers.base.sign_process import FarSigns
from pippy.drivers.engines.arguments import (
    check_choice,
    check_devices,
    check_seconds,
    check_threads,
    device_name,
    polling_time,
    worker_names,
)
from pippy.drivers.engines.cluster import Cluster, check_none_open, opened
from pippy.drivers.engines.routes import on_devices
from pippy.drivers.engines.torchrun.interfaces import link_of_rank
from pippy.drivers.engines.torchrun.meeting import Meeting, meet
from pippy.drivers.engines.torchrun.ranks import CONTROLLER, RankInfo
from pippy.drivers.engines.torchrun.torchrun_worker import Leave, TorchrunWorker
from pippy.drivers.session.calls import Address
from pippy.drivers.wire.messages import rpc
from pippy.drivers.wire.messages.controller_messages import ControllerConnections, OwnMessages
from pippy.drivers.wire.pickling import Pickled, pickle_message
from pippy.drivers.wire.pollable_event import PollableEvent
from pippy.ir.base.readable import brief
from pippy.ir.base.source import warn


class ControllerMessages:
    """Messages to the workers ``near`` over ``connections``, and to the others by their ``names`` for RPC.

    With ``far`` those get connections, too. ``own`` has the workers of this process.

    >>> ControllerMessages(["a", "b", "c"], near=[0], far=True).connect(1, 2), ControllerMessages(["a", "b"]).connect(0, 1)
    (1, None)
    """

    def __init__(
        self,
        names: Sequence[str] = (),
        near: Collection[int] = (),
        connections: ControllerConnections | None = None,
        far: bool = False,
        own: Mapping[int, OwnMessages] = {},
    ) -> None:
        self.names, self.near, self.connections = names, frozenset(near), connections or ControllerConnections()
        self.far, self.own = far, own

    @property
    def signs(self) -> FarSigns:
        """What is said of the processes of other hosts."""
        return self.connections.signs

    def post(self, worker: int, number: int, pickled: Pickled) -> "Future[Pickled]":
        """Put a message into a worker's queue; the future has its answer."""
        if worker in self.own:
            return self.own[worker].post(number, pickled)
        if worker in self.near:
            return self.connections.post(worker, number, pickled)
        return rpc.post(self.names[worker], number, pickled)

    def urgent(self, worker: int, pickled: Pickled) -> "Future[Pickled]":
        """Send a message that is answered even while the worker computes."""
        if worker in self.own:
            return self.own[worker].urgent(pickled)
        if worker in self.near:
            return self.connections.urgent(worker, pickled)
        return rpc.urgent(self.names[worker], pickled)

    def connect(self, one: int, other: int) -> int | None:
        """Give two workers of this host a socket to each other. If a worker is to let the other one in, return it."""
        if one in self.near and other in self.near:
            return self.connections.connect(one, other)
        return one if self.far else None

    def wait(self, wakeup: PollableEvent, timeout: float) -> None:
        """Sleep until an answer comes over a connection, or the event is set, or the time is up."""
        self.connections.wait(wakeup, timeout)


class TorchrunEngine:
    """The worker of this process, if it hosts one, and the others by their names for RPC. ``close`` tells them to leave.

    ``join`` has this process join the group of RPC, within so many seconds. Without ``connects_hosts`` workers of different
    hosts have no connections but RPC's. A worker is given ``timeout`` seconds to hear that it is to leave. The first worker
    computes on a device of ``device_type``.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        worker: TorchrunWorker | None,
        met: Meeting,
        timeout: float,
        join: Callable[[float], None],
        connects_hosts: bool = True,
        device_type: str = "cpu",
    ) -> None:
        self.worker, self.met, self.timeout, self._join = worker, met, timeout, join
        self.routes, self.names, self.device_type = met.routes, met.routes.names, device_type
        self.owner, self.joined = os.getpid(), False
        names = [rank_info.rpc_name(index) for index in range(rank_info.workers)]
        self.others = [name for name in names if name != CONTROLLER]
        own_messages = {} if worker is None else {rank_info.index: OwnMessages(worker.messages, worker.urgent)}
        self.messages = ControllerMessages(names, met.near, met.connections, connects_hosts, own_messages)

    fixed = (
        "torchrun started the workers, and it starts all of them again, each with the script: torchrun --max-restarts 3; there "
        "driver.load(folder) goes on from the newest checkpoint"
    )
    recovery_advice = f"; {fixed}"

    def start(self, timeout: float) -> Sequence[Address]:
        """Join the workers, and start that of this process."""
        if self.worker is None:
            rpc.serve_nothing()
        self._join(timeout)
        self.joined = True
        if self.worker is not None:
            self.worker.start()
        return self.met.addresses

    def deaths(self, wait: float = 0.0) -> Mapping[int, str]:
        """Nothing: torchrun does not tell which processes have died."""
        return {}

    def replace(self, workers: Iterable[int]) -> Mapping[int, Address]:
        """Raises."""
        raise ClusterError(self.fixed)

    def end(self, workers: Iterable[int]) -> None:
        """Raises."""
        raise ClusterError(self.fixed)

    def close(self, lost: str | None = None) -> None:
        """Let all workers leave their scripts, and leave the group; a second call does nothing.

        They are told which worker is lost, so that each host's log says why the job ended.
        """
        if not self.joined or os.getpid() != self.owner:
            return
        self.joined = False
        rpc.stderr_filter.start()
        for last in (False, True):  # first all workers are told that connections will break, then they leave
            told = []
            for name in self.others:
                with suppress(ConnectionError):
                    told.append(rpc.urgent(name, pickle_message(Leave(last, lost))))
            rpc.wait_all(told, min(1.0, self.timeout))
            if not last and self.worker is not None:
                self.worker.end()  # which breaks its connections with others
        rpc.leave()
        self.met.connections.close()


# The timeout where there are several hosts, in seconds: after a cut of 30 s TCP sends again within 61 s what was lost.
BETWEEN_HOSTS = 65.0
_was_open = False


def torchrun_cluster(
    n: int | None = None,
    *,
    threads: int | None = None,
    devices: Sequence[str | torch.device] | None = None,
    device: str | torch.device | None = None,
    pin: bool | None = None,
    names: Sequence[str] | None = None,
    timeout: float | None = None,
    transport: str | None = None,
    start_timeout: float = 60.0,
    patience: float | None = None,
    controller_hosts: bool = True,
) -> Cluster:
    """The workers that torchrun has started. `cluster` says what the arguments are."""
    rank_info = RankInfo.from_environment(controller_hosts)
    names = _checked(rank_info, n, names)
    _check_not_given("pin", pin)
    if timeout is None:
        timeout = 5.0 if rank_info.one_host else BETWEEN_HOSTS
    check_seconds(timeout=timeout, start_timeout=start_timeout)
    check_threads(threads)
    check_choice("transport", transport, (None, "shared_memory", "rpc"))
    patience = polling_time(patience, crowded=_is_crowded(rank_info, threads))
    own_device = _device(rank_info, devices, device)
    _check_first()
    keep_freed_memory()
    met = meet(rank_info, names, start_timeout, transport, *link_of_rank(rank_info), own_device)
    address = None if transport == "rpc" else met.link.address
    met.routes = replace(met.routes, only_rpc=address is None)
    worker = _worker(rank_info, met, own_device, threads, timeout, patience, address)
    join = partial(_join, rank_info, met, timeout)
    if rank_info.rank:
        assert worker is not None
        _work(worker, lambda: join(start_timeout), timeout)
    given = rank_info, worker, met, timeout, join, transport != "rpc", torch.device(own_device).type
    cluster = opened(partial(TorchrunEngine, *given), timeout, start_timeout)
    global _was_open
    _was_open = True
    rpc.take_reports(cluster.session.report_lost)
    for at, why in met.routes.reasons.items():
        warn(
            f"worker {names[at]!r} shares no memory with the others of its host, and passes values as to another "
            f"host, which is slower ({met.routes.far}): {why}"
        )
    return cluster


def _checked(rank_info: RankInfo, n: int | None, names: Sequence[str] | None) -> tuple[str, ...]:
    """The workers' names. Raises if their number is not what torchrun started."""
    if rank_info.workers < 1:
        raise ClusterError(
            "controller_hosts=False leaves no process for a worker, because torchrun started only the controller; "
            "start 2 or more"
        )
    if n is not None and n != rank_info.workers:
        raise ClusterError(
            f"n={n}, and torchrun started {rank_info.world_size} processes, for {rank_info.workers} workers; leave out n, or "
            f"start {n + rank_info.world_size - rank_info.workers} processes"
            + (f"; local_cluster({n}) starts {n} workers beside this process" if rank_info.world_size == 1 else "")
        )
    return worker_names(rank_info.workers, names)


def _check_not_given(name: str, value: Any) -> None:
    """Raise if an option is given that says how this process is to start workers: torchrun has started them."""
    if value is not None and value is not False:
        raise ClusterError(
            f"{name}={brief(value)} is for workers that cluster() starts, and torchrun has started these; leave out {name}, or "
            f"start the script without torchrun"
        )


def _is_crowded(rank_info: RankInfo, threads: int | None) -> bool:
    """Whether the worker of this process has no core of its own. One that shares its process with the script has none."""
    wanted = rank_info.local_world_size * (threads or torch.get_num_threads())
    return rank_info.rank == 0 or wanted > len(os.sched_getaffinity(0))


def _check_first() -> None:
    """Raise unless this is the first cluster, because torchrun's processes can join a group of RPC only once."""
    if _was_open:
        raise ClusterError(
            "cluster() was called a second time in a process of torchrun, but the workers leave the script when "
            "the first cluster closes; open one cluster, and use it for the whole script"
        )
    check_none_open()


def _device(
    rank_info: RankInfo, devices: Sequence[str | torch.device] | None, device: str | torch.device | None
) -> str:
    """The device of the worker in this process. The others may be on other hosts, and are not checked here."""
    check_devices(rank_info.workers, devices, device)
    if devices is not None and rank_info.index >= 0:
        device = devices[rank_info.index]
    if device is None:
        device = f"cuda:{rank_info.local_rank}" if torch.cuda.is_available() else "cpu"
    return device_name(device)


def _worker(
    rank_info: RankInfo,
    met: Meeting,
    device: str,
    threads: int | None,
    timeout: float,
    patience: float,
    address: str | None,
) -> TorchrunWorker | None:
    """The worker of this process, if it hosts one."""
    if rank_info.index < 0:
        return None
    near = next(group for group in met.routes.groups if rank_info.index in group)
    return TorchrunWorker(
        rank_info.index,
        met.routes.names,
        device,
        rank_info.rpc_name,
        threads,
        rank_info.rank == 0,
        timeout,
        met.sockets,
        set(range(rank_info.workers)) - set(near),
        patience,
        address,
        [each for each in on_devices(met.routes.devices) if each in near and each != rank_info.index],
    )


def _join(rank_info: RankInfo, met: Meeting, quiet: float, timeout: float) -> None:
    """Join the group of RPC, and connect with all others. In the end no rank listens any more."""
    names = [CONTROLLER, *(rank_info.rpc_name(rank_info.worker_of(rank)) for rank in range(1, rank_info.world_size))]
    place = rank_info.rank, rank_info.world_size, "env://", "uv", met.link.interface
    try:
        rpc.join(names[rank_info.rank], *place, timeout, met.number)
        if rank_info.rank == 0:
            rpc.close_ports(CONTROLLER, names[1:], met.store, timeout, quiet, met.number)
    except (RuntimeError, OSError) as error:
        raise ClusterError(
            f"rank {rank_info.rank} has met the others at torchrun's store, and not all ranks got a connection with each other,"
            f" though they tried for start_timeout ({timeout:g} s), up to five times. Until it has these, every rank listens on"
            f" ports that its system chooses, here at {met.link.address} of the interface {met.link.interface}: a firewall must"
            f" let the others through to these; TP_SOCKET_IFNAME names another interface. If a stranger, as a port scan,"
            f" connects there meanwhile, RPC lets in nobody else: start the job again, which torchrun --max-restarts 3 does by"
            f" itself. The first line of RPC's error: {str(error).strip().splitlines()[0]}"
        ) from error


def _work(worker: TorchrunWorker, join: Callable[[], None], timeout: float) -> NoReturn:
    """Run a worker until the controller closes the cluster, then leave the script."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's
    join()
    worker.see_to_leaving()
    worker.watch(CONTROLLER, timeout)
    worker.run()
    rpc.leave()
    worker.has_left()
    raise SystemExit(0)
