"""Clusters whose processes torchrun has started, on one host or several: rank 0 is the controller, the others are workers.

    torchrun ─▶ rank 0: the script; by default, worker 0 on a thread of its own
             ─▶ rank 1, 2, …: a worker, from the call of `cluster` to the controller's end; then the script ends there

All ranks meet at the store that torchrun gives them, and say there who they are; then RPC connects them.
"""

import json
import os
import signal
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from fcntl import ioctl
from typing import Any, NoReturn

import torch
from torch.distributed import DistStoreError, PrefixStore
from torch.distributed.rendezvous import rendezvous

from pippy.drivers.clusters import cluster as clusters
from pippy.drivers.clusters.cluster import Cluster, local_cluster
from pippy.drivers.clusters.nursery import CONTROLLER
from pippy.drivers.clusters.resident import Leave, Resident
from pippy.drivers.clusters.standby import standing_by
from pippy.drivers.control.control import Address, Control
from pippy.drivers.errors import ClusterError
from pippy.drivers.transport import rpc

_was_open = False
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Place:
    """This process among those that torchrun has started. Workers are numbered by rank, without the rank that hosts none.

    >>> place = Place(rank=2, processes=3, local_rank=2, local_processes=3, hosting=False)
    >>> place.index, place.workers, place.rpc_name(place.index)
    (1, 2, 'worker1')
    """

    rank: int
    processes: int
    local_rank: int
    local_processes: int
    hosting: bool

    @staticmethod
    def here(hosting: bool) -> "Place":
        """As the environment says."""
        said = os.environ
        local = int(said.get("LOCAL_RANK", "0")), int(said.get("LOCAL_WORLD_SIZE", "1"))
        return Place(int(said["RANK"]), int(said["WORLD_SIZE"]), *local, hosting)

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return self.processes - (not self.hosting)

    @property
    def index(self) -> int:
        """The number of the worker in this process; -1 if there is none."""
        return self.rank - (not self.hosting)

    def rank_of(self, worker: int) -> int:
        """The rank that hosts a worker."""
        return worker + (not self.hosting)

    def rpc_name(self, worker: int) -> str:
        """The name for RPC of the process that hosts a worker."""
        return f"worker{worker}" if self.rank_of(worker) else CONTROLLER


def cluster(
    n: int | None = None,
    *,
    threads: int | None = None,
    devices: Sequence[str | torch.device] | None = None,
    device: str | torch.device | None = None,
    names: Sequence[str] | None = None,
    timeout: float = 5.0,
    start_timeout: float = 60.0,
    controller_hosts: bool = True,
) -> Cluster:
    """The workers that torchrun has started, or else ``n`` new ones on this host: one script for both.

    Under torchrun all ranks call this. Rank 0 gets the cluster; it hosts a worker too, unless ``controller_hosts`` is
    False. On all other ranks the call serves as a worker until rank 0 closes the cluster, and then leaves the script by
    SystemExit, so that what follows the call runs on rank 0 alone. The default device is the GPU of the local rank, if
    there are GPUs.

    Without torchrun this is `local_cluster`, with as many workers as ``n``, or else the environment's PIPPY_WORKERS, says.
    In a script that `pippy run` has started it is the cluster that was asked for there.

    >>> with cluster() as workers:  # doctest: +SKIP
    ...     driver = PipelineDriver1F1B(pipe, workers)
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        options: dict[str, Any] = {"threads": threads, "devices": devices, "device": device, "names": names}
        given = {name: value for name, value in options.items() if value is not None}
        if (standby := standing_by()) is not None:
            return standby.asked(n, given, timeout=timeout, start_timeout=start_timeout)
        return local_cluster(_number(n), timeout=timeout, start_timeout=start_timeout, **given)
    place = Place.here(controller_hosts)
    names = _checked(place, n, names)
    clusters.check_seconds(timeout=timeout, start_timeout=start_timeout)
    clusters.check_threads(threads)
    own_device = _device(place, devices, device)
    _check_first()
    addresses = _meet(place, names, start_timeout)
    worker = None
    if place.index >= 0:
        worker = Resident(place.index, names, own_device, place.rpc_name, threads)
    if place.rank:
        assert worker is not None
        _work(worker, place, timeout, start_timeout)
    return _control(worker, place, addresses, timeout, start_timeout)


def _number(n: int | None) -> int:
    if n is not None:
        return n
    given = os.environ.get("PIPPY_WORKERS", "")
    if not given.isdecimal():
        raise ClusterError(
            f"cluster() does not know how many workers to start{f': PIPPY_WORKERS is {given!r}' if given else ''}; start the "
            f"script with pippy run -n 2 or torchrun --nproc-per-node 2, set PIPPY_WORKERS=2 in the environment, or write "
            f"cluster(2)"
        )
    return int(given)


def _checked(place: Place, n: int | None, names: Sequence[str] | None) -> tuple[str, ...]:
    """The workers' names, and no doubt about their number."""
    if place.workers < 1:
        raise ClusterError(
            "controller_hosts=False, and torchrun started no process beside the controller; start 2 or more"
        )
    if n is not None and n != place.workers:
        raise ClusterError(
            f"n={n}, and torchrun started {place.processes} processes, for {place.workers} workers; leave out n, or start "
            f"{n + place.processes - place.workers} processes"
        )
    return clusters.named(place.workers, names)


def _check_first() -> None:
    """RPC joins one group at a time, and torchrun's processes join one in all."""
    if _was_open:
        raise ClusterError(
            "this process joined torchrun's cluster before, whose workers leave the script with it; open one cluster, and use "
            "it for all of the script"
        )
    clusters.check_none_open()


def _device(place: Place, devices: Sequence[str | torch.device] | None, device: str | torch.device | None) -> str:
    """The device of the worker in this process. Those of others may be of other hosts, and are not looked for here."""
    if devices is not None and device is not None:
        raise ClusterError("devices names one device for each worker, device one for all; give one of the two")
    if devices is not None and (isinstance(devices, str) or len(devices) != place.workers):
        raise ClusterError(f"devices must name one device for each of the {place.workers} workers; this is {devices!r}")
    if devices is not None and place.index >= 0:
        device = devices[place.index]
    if device is None:
        device = f"cuda:{place.local_rank}" if torch.cuda.is_available() else "cpu"
    return clusters.known(device)


def _meet(place: Place, names: Sequence[str], timeout: float) -> list[Address]:
    """Wait for all ranks at torchrun's store, then join them; gives where each worker is."""
    try:
        store = PrefixStore("pippy", next(rendezvous("env://", place.rank, place.processes))[0])
        store.set(str(place.rank), json.dumps([socket.gethostname(), os.getpid()]))
        ranks = [str(rank) for rank in range(place.processes)]
        try:
            store.wait(ranks, timedelta(seconds=timeout))
        except DistStoreError as error:
            missing = ", ".join(rank for rank in ranks if not store.check([rank]))
            raise ClusterError(
                f"rank {place.rank} waited {timeout:g} s, and these ranks did not call cluster(): {missing}; all must, with "
                f"the same arguments, and start_timeout says how long to wait for them"
            ) from error
        found = [json.loads(store.get(rank)) for rank in ranks]
    except (RuntimeError, OSError) as error:
        if isinstance(error, ClusterError):
            raise
        raise ClusterError(f"rank {place.rank} cannot reach torchrun's store: {error}") from error
    return [Address(name, place.rpc_name(i), *found[place.rank_of(i)]) for i, name in enumerate(names)]


def _join(place: Place, timeout: float) -> None:
    name = place.rpc_name(place.index) if place.rank else CONTROLLER
    rpc.join(name, place.rank, place.processes, "env://", "uv", interface(place), timeout)


def interface(place: Place) -> str | None:
    """Where this process is to listen: the interface that leads to rank 0, and loopback if all are on one host.

    The name of a host often stands for an address that other hosts cannot reach, so torch's own choice would not do.
    """
    if place.local_processes == place.processes:
        return "lo"
    for name in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if name in os.environ:
            return os.environ[name]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))  # sends nothing
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == probe.getsockname()[0]:
                    return name
    return None


def _work(worker: Resident, place: Place, timeout: float, start_timeout: float) -> NoReturn:
    """Be a worker until the controller is done with it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's
    _join(place, start_timeout)
    worker.watch(CONTROLLER, timeout)
    worker.run()
    rpc.leave()
    raise SystemExit(0)


def _control(
    worker: Resident | None, place: Place, addresses: list[Address], timeout: float, start_timeout: float
) -> Cluster:
    if worker is None:
        rpc.serve_answers()
    _join(place, start_timeout)
    global _was_open
    _was_open = True
    joined = Joined(worker, [address.rpc_name for address in addresses if address.rpc_name != CONTROLLER], timeout)
    if worker is not None:
        worker.start()
    return clusters.opened(Cluster([address.name for address in addresses], Control(addresses, timeout), joined))


class Joined:
    """The processes that torchrun started, as the controller sees them: they are told to leave, not ended."""

    def __init__(self, worker: Resident | None, others: Sequence[str], timeout: float) -> None:
        self.worker, self.others, self.timeout = worker, others, timeout
        self.owner, self.left = os.getpid(), False

    def close(self) -> None:
        """Let all workers leave their scripts, and leave the group; a second call does nothing."""
        if self.left or os.getpid() != self.owner:
            return
        self.left = True
        rpc.hush.start()
        if self.worker is not None:
            self.worker.end()
        for last in (False, True):  # first all learn that connections will break, and then they break
            told = []
            for name in self.others:
                with suppress(ConnectionError):
                    told.append(rpc.urgent(name, Leave(last)))
            rpc.wait_all(told, min(1.0, self.timeout))
        rpc.leave()
