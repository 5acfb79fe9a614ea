"""How the ranks that torchrun has started meet: they tell each other where they are, before RPC connects them."""

import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.engines.routes import Routes
from pippy.drivers.engines.torchrun.interfaces import NetworkInterface, interface_from_environment, link_to
from pippy.drivers.engines.torchrun.neighbours import (
    Neighbours,
    meet_neighbours,
    without_neighbours,
)
from pippy.drivers.engines.torchrun.rank_board import RankBoard
from pippy.drivers.engines.torchrun.rank_info import RankInfo
from pippy.drivers.engines.torchrun.rank_terms import check_terms, terms_of_rank, write_files
from pippy.drivers.engines.torchrun.reach import check_reach
from pippy.drivers.session.calls import Address
from pippy.drivers.wire.messages.controller_connections import ControllerConnections
from pippy.drivers.wire.messages.handed_sockets import SocketPair, close_all, this_host, two_pairs

# Without torchrun's agent, whose store this is, rank 0 serves it: until the last of the others has read it, and RPC met there.
_open_stores: list[Store] = []


@dataclass
class Meeting:
    """What a rank knows after all ranks have met.

    Attributes:
        addresses: where each worker is.
        routes: how values go between each two.
        sockets: this rank's sockets to the first rank of its host, if they share memory: one for messages, and one for urgent
            messages.
        connections: if this is the first rank of its host, its connections to the workers there.
        near: the workers that these connections reach.
        link: the network interface of this host on which this rank listens.
        number: how many meetings there were at this store before: torchrun may use one store for several starts of the ranks.
        store: the store.
    """

    addresses: list[Address]
    routes: Routes
    store: Store
    sockets: SocketPair | None = None
    connections: ControllerConnections = field(default_factory=ControllerConnections)
    near: frozenset[int] = frozenset()
    link: NetworkInterface = field(default_factory=NetworkInterface)
    number: int = 0


def meet(
    rank_info: RankInfo,
    names: Sequence[str],
    timeout: float,
    transport: str | None,
    link: NetworkInterface,
    trouble: str = "",
    device: str = "cpu",
) -> Meeting:
    """Meet the other ranks at torchrun's store, and get sockets to those of this host, unless ``transport`` is RPC.

    ``link`` is the interface that leads to MASTER_ADDR. ``trouble`` says why this rank cannot join; then all ranks raise it.
    The worker of this rank computes on ``device``.
    """
    try:
        root_store = next(
            rendezvous("env://", rank_info.rank, rank_info.world_size, timeout=timedelta(seconds=timeout))
        )[0]
        _open_stores.append(root_store)
        meeting_number = _number_of_meeting(root_store, rank_info)
        store = PrefixStore(f"pippy {meeting_number}", root_store)
    except (RuntimeError, OSError) as error:
        raise ClusterError(_no_store(rank_info, error)) from error
    board = RankBoard(store, rank_info.rank, timeout)
    write_files(board)
    own_terms = {"names": names, "transport": transport, "controller_hosts": rank_info.controller_hosts}
    board.write("terms of", [trouble, link.address if link.leaves else "", terms_of_rank(own_terms)])
    board.write("host of", [socket.gethostname(), os.getpid(), this_host(), device])
    of_ranks = board.read("host of", range(rank_info.world_size))
    link = _agree(board, [each[0] for each in of_ranks], [each[2] for each in of_ranks], link)
    if transport == "rpc":
        neighbours = without_neighbours(rank_info.world_size)
    else:
        neighbours = meet_neighbours(board, [host for _, _, host, _ in of_ranks])
    at = [of_ranks[rank_info.rank_of(worker)] for worker in range(len(names))]
    routes = Routes(
        tuple(names),
        tuple(host for host, *_ in at),
        tuple(filter(None, (_workers(rank_info, group) for group in neighbours.groups))),
        {rank_info.worker_of(rank): why for rank, why in neighbours.reasons.items()},
        devices=tuple(device for *_, device in at),
        machines=tuple(machine for _, _, machine, _ in at),
    )
    if transport == "shared_memory" and len(routes.groups) > 1:
        raise ClusterError(
            'transport="shared_memory" is not available for all workers; leave transport out, and workers that '
            "cannot share memory use RPC:\n"
            f"{routes}"
        )
    addresses = [Address(name, *at[i][:2]) for i, name in enumerate(names)]
    meeting = Meeting(addresses, routes, root_store, link=link, number=meeting_number)
    if transport != "rpc":
        _connect(meeting, rank_info, neighbours)
    return meeting


def _agree(board: RankBoard, hosts: Sequence[str], where: Sequence[str], link: NetworkInterface) -> NetworkInterface:
    """Raise if one of the ranks cannot join. Returns the interface on which this rank listens.

    A host whose name leads to its own loopback interface takes the one that leads to another host's address.
    """
    terms = board.read("terms of", range(len(hosts)))
    try:
        _check(board, terms, hosts)
        others = [address for host, (_, address, _) in zip(where, terms) if address and host != where[board.rank]]
        if not link.leaves and others and not interface_from_environment():
            link = link_to(others[0], 1)
        check_reach(board, where, hosts, link.address)
        return link
    except ClusterError:
        board.write("has read terms", True)
        with suppress(ClusterError):  # the store is gone once the torchrun of the first host has seen its rank fail
            RankBoard(board.store, board.rank, min(board.timeout, 5.0)).read("has read terms", range(len(hosts)))
        raise


def _check(board: RankBoard, found: Sequence[Any], hosts: Sequence[str]) -> None:
    if troubles := [f"rank {rank} on {hosts[rank]}: {why}" for rank, (why, _, _) in enumerate(found) if why]:
        raise ClusterError("the ranks cannot connect with each other:\n  " + "\n  ".join(troubles))
    check_terms(board, [each for _, _, each in found], hosts)


def _no_store(rank_info: RankInfo, error: Exception) -> str:
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    try:
        addresses = ", ".join(dict.fromkeys(str(each[4][0]) for each in socket.getaddrinfo(address, None)))
        means = "" if addresses == address else f", which is {addresses} here"
    except OSError as unknown:
        means = f", and this host does not know that name: {unknown}"
    return (
        f"rank {rank_info.rank} on {socket.gethostname()} cannot reach torchrun's store at port {port} of {address}{means}; "
        f"give torchrun an address by which every host reaches the first: --master-addr ADDRESS, or, with --rdzv-backend c10d, "
        f"--local-addr ADDRESS on that host. The first line of the error: {str(error).strip().splitlines()[0]}"
    )


def _number_of_meeting(store: Store, rank_info: RankInfo) -> int:
    """The number of earlier meetings at a store. What they have written there must not be read again."""
    if os.environ.get("LOCAL_WORLD_SIZE") == str(rank_info.world_size):  # one agent of torchrun, which counts restarts
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return int(store.add(f"pippy meetings of rank {rank_info.rank}", 1)) - 1


def _workers(rank_info: RankInfo, ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(worker for rank in ranks if (worker := rank_info.worker_of(rank)) >= 0)


def _connect(meeting: Meeting, rank_info: RankInfo, neighbours: Neighbours) -> None:
    """Make connections of the sockets. The first rank of a host gets a pair to itself, too, if it hosts a worker."""
    meeting.sockets = neighbours.own
    ends = {rank_info.worker_of(rank): pair for rank, pair in neighbours.ends.items()}
    if rank_info.index >= 0 and (ends or rank_info.rank == 0):
        meeting.sockets, ends[rank_info.index] = two_pairs()
    meeting.near = frozenset(ends)
    messages, urgent = ({worker: pair[which] for worker, pair in ends.items()} for which in (0, 1))
    if rank_info.rank == 0:
        meeting.connections = ControllerConnections(messages, urgent)
    else:  # messages come from the controller, by RPC; this rank only hands out further sockets
        close_all(urgent.values())
        meeting.connections = ControllerConnections(messages)
