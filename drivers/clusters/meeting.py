"""How the ranks that torchrun has started meet: what each is to know of the others, before RPC connects them."""

import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pippy.drivers.clusters.neighbours import (
    Neighbours,
    Pair,
    apart,
    close_all,
    meet_neighbours,
    this_host,
    two_pairs,
)
from pippy.drivers.clusters.rank_board import RankBoard
from pippy.drivers.clusters.rank_info import RankInfo
from pippy.drivers.clusters.routes import Routes
from pippy.drivers.control.control import Address
from pippy.drivers.errors import ClusterError
from pippy.drivers.transport.messages.controller_connections import ControllerConnections

# Without torchrun's agent, whose store this is, rank 0 serves it: until the last of the others has read it, and RPC met there.
_kept: list[Store] = []


@dataclass
class Meeting:
    """What a rank knows once all have met.

    Attributes:
        addresses: where each worker is.
        routes: how values go between each two.
        sockets: this rank's sockets to the first rank of its host, if values go through shared memory anywhere near: for
            messages, and for urgent ones.
        connections: if this is the first rank of its host, its connections to the workers there.
        near: the workers that these connections reach.
        number: how many meetings there were at this store before: torchrun may keep it when it starts the ranks again.
    """

    addresses: list[Address]
    routes: Routes
    sockets: Pair | None = None
    connections: ControllerConnections = field(default_factory=ControllerConnections)
    near: frozenset[int] = frozenset()
    number: int = 0


def meet(rank_info: RankInfo, names: Sequence[str], timeout: float, transport: str | None) -> Meeting:
    """Meet the other ranks at torchrun's store, and get sockets to those of this host, unless all is to go by RPC."""
    try:
        given = next(rendezvous("env://", rank_info.rank, rank_info.world_size, timeout=timedelta(seconds=timeout)))[0]
        _kept.append(given)
        meeting_number = _number_of_meeting(given, rank_info)
        store = PrefixStore(f"pippy {meeting_number}", given)
    except (RuntimeError, OSError) as error:
        raise ClusterError(f"rank {rank_info.rank} cannot reach torchrun's store: {error}") from error
    board = RankBoard(store, rank_info.rank, timeout)
    board.write("host of", [socket.gethostname(), os.getpid(), this_host()])
    found = board.read("host of", range(rank_info.world_size))
    if transport == "rpc":
        neighbours = apart(rank_info.world_size)
    else:
        neighbours = meet_neighbours(board, [host for _, _, host in found])
    at = [found[rank_info.rank_of(worker)] for worker in range(len(names))]
    routes = Routes(
        tuple(names),
        tuple(host for host, _, _ in at),
        tuple(filter(None, (_workers(rank_info, group) for group in neighbours.groups))),
        {rank_info.worker_of(rank): why for rank, why in neighbours.reasons.items()},
    )
    if transport == "shared_memory" and len(routes.groups) > 1:
        raise ClusterError(
            f'transport="shared_memory" cannot be had for all workers; leave out transport, and they use RPC where they must:\n'
            f"{routes}"
        )
    addresses = [Address(name, rank_info.rpc_name(i), *at[i][:2]) for i, name in enumerate(names)]
    meeting = Meeting(addresses, routes, number=meeting_number)
    if transport != "rpc":
        _connect(meeting, rank_info, neighbours)
    return meeting


def _number_of_meeting(store: Store, rank_info: RankInfo) -> int:
    """How many meetings of these ranks there were at a store: what is left of them there must not be read again."""
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
