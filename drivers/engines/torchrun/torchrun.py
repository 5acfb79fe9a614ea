"""Clusters whose processes torchrun has started, on one host or several: rank 0 is the controller, the others are workers.

    torchrun ─▶ rank 0: the script; by default, worker 0 on a thread of its own
             ─▶ rank 1, 2, …: a worker, from the call of `cluster` to the controller's end; then the script ends there

The others are members of a hub (hub_engine.py): torchrun's store carries the invitation to the door of rank 0 (ranks.py), which
closes behind the last of them. The processes run already: the engine tells them which workers they are, and when to leave.
With ``transport="rpc"`` they join RPC besides, and commands and values go by that.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.base.process import keep_freed_memory
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
from pippy.drivers.engines.connected_worker import ConnectedWorker, RunSettings
from pippy.drivers.engines.hub.hub_engine import HubEngine, HubLaunch, next_of
from pippy.drivers.engines.hub.hub_worker import place_of_this_process
from pippy.drivers.engines.hub.interfaces import interface_from_environment, link_to
from pippy.drivers.engines.hub.members import Member, await_any
from pippy.drivers.engines.local.local_cluster import WORKER
from pippy.drivers.engines.routes import Routes, on_devices
from pippy.drivers.engines.torchrun.rank_worker import carry_by_rpc, join_by_rpc, work
from pippy.drivers.engines.torchrun.ranks import (
    RankBoard,
    RankInfo,
    board_of,
    check_terms,
    link_of_rank,
    write_terms,
)
from pippy.drivers.session.calls import Address
from pippy.drivers.wire.messages import rpc
from pippy.drivers.wire.messages.controller_messages import OwnMessages
from pippy.drivers.wire.messages.doors import THIS_HOST
from pippy.drivers.wire.worker_transport import WorkerTransport

_LEAVE_WITHIN = 1.0  # seconds that rank 0 waits for the others to leave
_JOINS_WITHIN = 1.0  # and for the thread of its own worker


@dataclass(frozen=True, kw_only=True)
class RanksLaunch(HubLaunch):
    """``transport`` is that of `cluster`. There are no spares."""

    transport: str | None


class TorchrunEngine(HubEngine[Member]):
    """The workers of the ranks: of this process, if it hosts one, and of the others. ``close()`` tells them to leave."""

    over = (
        "torchrun started the workers, and it starts all of them again, each with the script: torchrun --max-restarts 3; there "
        "driver.load(folder) goes on from the newest checkpoint"
    )
    fixed = over
    recovery_advice = f"; {over}"

    def __init__(self, launch: RanksLaunch, rank_info: RankInfo, board: RankBoard) -> None:
        super().__init__(launch)
        self.rank_info, self.board, self.by_rpc = rank_info, board, launch.transport == "rpc"
        self.own: ConnectedWorker | None = None
        self._thread: threading.Thread | None = None
        self._ranks: dict[int, Member] = {}  # by worker

    @property
    def routes(self) -> Routes:
        """How values go between the workers."""
        return replace(self.places.routes, devices=self._devices(), only_rpc=self.by_rpc)

    def start(self, timeout: float) -> Sequence[Address]:
        """Have the ranks come in, and be workers; start that of this process."""
        self.timeout = timeout
        ranks = self._checked_ranks()
        first = len(ranks) - len(self.names)
        for worker in range(len(self.names)):
            self.places.of[worker] = ranks[worker + first]["place"] | ({"memory": f"{worker}"} if self.by_rpc else {})
        if self.launch.transport == "shared_memory" and len(self.routes.groups) > 1:
            raise self._refused(
                'transport="shared_memory" is not available for all workers; leave transport out, and workers that '
                f"cannot share memory use TCP:\n{self.routes}"
            )
        self.far_address = self._address(ranks)
        self._let_in(ranks, first)
        own = {} if first else {0: self._own_messages()}
        self.messages.own |= own
        if self.by_rpc:
            self.messages = rpc.RpcMessages([rpc.name_of_rank(rank) for rank in range(first, len(ranks))], own)
        self._fill(self._ranks, 0.0)
        if self.by_rpc:
            join_by_rpc(self.rank_info, self.board, self.far_address, self.launch.timeout, self.own)
        if self.own is not None:
            self._thread = threading.Thread(target=self.own.run, name=f"pippy {self.names[0]}", daemon=True)
            self._thread.start()
        return [self.places.address(worker) for worker in range(len(self.names))]

    def kill(self, members: Sequence[Member], why: str) -> None:
        """Nothing: `fixed` says why no worker is replaced."""

    def check_left(self, workers: Sequence[int], present: Sequence[Member], left: float) -> None:
        """Nothing: all ranks are there."""

    def refuse(self, worker: int, member: Member, why: str) -> None:
        """Raise: no other rank can be this worker."""
        raise ClusterError(f"worker {self.names[worker]!r} on {member.place['host']}: {why}")

    def device_and_threads(self, worker: int) -> tuple[str, Mapping[int, int]]:
        """What the ranks have said."""
        return self.places.of[worker]["device"], {at: place["threads"] for at, place in self.places.of.items()}

    def end_all(self, lost: str | None) -> None:
        """Have all workers leave their scripts. They are told which worker is lost, so that each host's log says it."""
        members = list(self._ranks.values())
        for each in members:
            each.tell_to_end(lost)
        if self.own is not None:
            self.own.end()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOINS_WITHIN)
        self.messages.close()
        until = time.monotonic() + _LEAVE_WITHIN
        for each in members:
            while each.gone() is None and (left := until - time.monotonic()) > 0:
                await_any([each], left)
            each.close()

    # How the ranks come in

    def _checked_ranks(self) -> Sequence[Mapping[str, Any]]:
        """What all ranks have written. Raises, as all of them do, if they cannot work together."""
        try:
            ranks: Sequence[Mapping[str, Any]] = self.board.read("terms", range(self.rank_info.world_size))
            check_terms(ranks)
        except ClusterError as error:
            raise self._refused(str(error)) from error
        return ranks

    def _refused(self, why: str) -> ClusterError:
        """Tell the others why they are not let in, which they raise, too."""
        self.board.write("door", ["", why])
        return ClusterError(why)

    def _address(self, ranks: Sequence[Mapping[str, Any]]) -> str:
        """That of this host by which others reach it.

        A host whose name leads to its own loopback interface takes the one that leads to another host's address.
        """
        link, _ = link_of_rank(self.rank_info)
        others = [each["address"] for each in ranks if each["place"]["machine"] != self.places.machine]
        if not link.leaves and any(others) and not interface_from_environment():
            link = link_to(next(filter(None, others)), 1)
        return link.address or "127.0.0.1"

    def _let_in(self, ranks: Sequence[Mapping[str, Any]], first: int) -> None:
        """Open a door until all other ranks have come. ``first`` is the rank of the first worker."""
        if len(ranks) == 1:
            return
        here = all(each["place"]["machine"] == self.places.machine for each in ranks)
        address, hosts = THIS_HOST if here else self.far_address, [each["place"]["host"] for each in ranks]
        numbers = [next(self._numbers) for _ in ranks[1:]]  # which are their ranks
        try:
            with self.expected(address, numbers) as (invitation, coming):
                assert invitation is not None, "there is a door"
                self.board.write("door", [invitation.line(), ""])
                came = zip(numbers, self.board.read("came", numbers))
                if wrong := [f"\n  rank {rank} on {hosts[rank]}: {why}" for rank, why in came if why]:
                    raise ClusterError(_out_of_reach(f"{hosts[0]} ({invitation.address})", wrong))
                for rank, each in zip(numbers, coming):
                    worker, end = rank - first, next_of(each, self.launch.timeout, lambda: None)
                    self._ranks[worker] = member = Member(rank, end)
                    member.place = self.places.of[worker]
        except OSError as error:
            raise self._refused(
                f"rank 0 on {hosts[0]} cannot let the others in at {address or 'this host'}: {error}"
            ) from error

    # How workers begin

    def _own_messages(self) -> OwnMessages:
        """Make the worker of this process, and what carries messages to it."""
        settings = self._settings(0)
        carry = carry_by_rpc(self.rank_info, settings) if self.by_rpc else WorkerTransport
        self.own = ConnectedWorker(0, str(self.far_address), settings, carry=carry)
        self.own.start(shares_process=True)
        return OwnMessages(self.own.queue, self.own.urgent)

    def _chosen(self, workers: Sequence[int], deadline: float, spares: int) -> dict[int, Member]:
        """The rank for each worker."""
        return {worker: self._ranks[worker] for worker in workers}

    def _takes_its_place(self, worker: int, member: Member) -> bool:
        """Have a rank be a worker."""
        if not self.by_rpc:
            return super()._takes_its_place(worker, member)
        member.tell(self.launch.timeout, run={"index": worker, "settings": asdict(self._settings(worker))})
        self._at[worker] = member
        return True

    def _settings(self, worker: int) -> RunSettings:
        """What a worker computes with. One that shares its process with the script has no core of its own."""
        settings, memory = super()._settings(worker), self.places.of[worker]["memory"]
        near = [at for at in on_devices(self._devices()) if at != worker and self.places.of[at]["memory"] == memory]
        is_own = self.rank_info.controller_hosts and worker == 0
        patience = polling_time(self.launch.patience, crowded=True) if is_own else settings.patience
        return replace(settings, near=tuple(near), patience=patience)

    def _devices(self) -> tuple[str, ...]:
        return tuple(self.places.of[worker]["device"] for worker in range(len(self.names)))


def _out_of_reach(host: str, wrong: Sequence[str]) -> str:
    return (
        f"these ranks get no connection with rank 0 on {host}:{''.join(wrong)}\nRank 0 listens at a port that its system "
        "chooses, until the others have come (net.ipv4.ip_local_port_range says which it can be): a firewall must let them "
        "connect. TP_SOCKET_IFNAME=eth1 on each host names another interface"
    )


# The timeout where there are several hosts, in seconds: after a cut of 30 s TCP sends again within 61 s what was lost.
BETWEEN_HOSTS = 65.0
_was_open = False


def torchrun_cluster(
    n: int | None = None,
    *,
    threads: int | None = None,
    devices: Sequence[str | torch.device] | None = None,
    device: str | torch.device | None = None,
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
    if timeout is None:
        timeout = 5.0 if rank_info.one_host else BETWEEN_HOSTS
    check_seconds(timeout=timeout, start_timeout=start_timeout)
    check_threads(threads)
    check_choice("transport", transport, (None, "shared_memory", "rpc"))
    polling_time(patience, crowded=False)
    own_device = _device(rank_info, devices, device)
    _check_first()
    keep_freed_memory()
    board = board_of(rank_info, start_timeout)
    place = place_of_this_process() | {"device": own_device, "threads": threads or torch.get_num_threads()}
    write_terms(board, rank_info, place, names=names, transport=transport, controller_hosts=controller_hosts)
    if rank_info.rank:
        work(rank_info, board, transport == "rpc")
    launch = RanksLaunch(worker=WORKER, names=names, transport=transport, timeout=timeout, patience=patience)
    cluster = opened(partial(TorchrunEngine, launch, rank_info, board), timeout, start_timeout)
    global _was_open
    _was_open = True
    rpc.take_reports(cluster.session.report_lost)
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


def _check_first() -> None:
    """Raise unless this is the first cluster, because the other ranks leave the script with the first."""
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
