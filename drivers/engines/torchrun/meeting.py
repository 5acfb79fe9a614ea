"""How the ranks that torchrun has started meet: they tell each other where they are, before RPC connects them.

The ranks of one host find each other: a rank tries to share memory with the first of them. On the host of rank 0 the sockets of
that try carry its messages; elsewhere they are closed, and two workers meet at a door later, when the controller says so.

    each rank       writes its host on the board: ranks with the same host may be neighbours
    the first rank  opens a door (doors.py)
    the others      hand over one end of two sockets there, and memory that both must see, and write whether that is done
    the first rank  closes the door, and writes which ranks have not come, and why

A rank whose sockets have not come has no neighbours, and is reached by RPC. In the end no rank listens.

Hosts must reach each other: RPC would take long to fail, and would not say which host it was. The first rank of each host opens
a door, and writes its invitation. It goes to the doors of the others, and writes which it could not reach. All ranks read that,
and raise if a host cannot reach another, in one direction or both.
"""

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.base.sign_process import start_sign_process
from pippy.drivers.engines.routes import Routes
from pippy.drivers.engines.torchrun.interfaces import NetworkInterface, interface_from_environment, link_to
from pippy.drivers.engines.torchrun.ranks import RankBoard, RankInfo, check_terms, terms_of_rank, write_files
from pippy.drivers.session.calls import Address
from pippy.drivers.wire.messages.controller_messages import ControllerConnections
from pippy.drivers.wire.messages.doors import THIS_HOST, Door, Invitation, come_in
from pippy.drivers.wire.messages.handed_sockets import (
    SocketPair,
    close_all,
    hand_over_pairs,
    take_over,
    this_host,
    two_pairs,
)


@dataclass
class Neighbours:
    """The groups of ranks that share memory, and the sockets of this rank.

    The first rank of a group has the ``ends`` of sockets to the others, and these have the other ends as their ``own``. For a
    rank that is alone, ``reasons`` says why it could not join the others of its host.

    >>> Neighbours(((0, 1), (2,))).of(1)
    (0, 1)
    """

    groups: tuple[tuple[int, ...], ...]
    reasons: Mapping[int, str] = field(default_factory=dict)
    own: SocketPair | None = None
    ends: Mapping[int, SocketPair] = field(default_factory=dict)

    def of(self, rank: int) -> tuple[int, ...]:
        """The group of a rank."""
        return next(group for group in self.groups if rank in group)


def without_neighbours(ranks: int) -> Neighbours:
    """The result without neighbours: all ranks are reached by RPC.

    >>> without_neighbours(2).groups
    ((0,), (1,))
    """
    return Neighbours(tuple((rank,) for rank in range(ranks)))


def meet_neighbours(board: RankBoard, hosts: Sequence[str]) -> Neighbours:
    """Meet the ranks of this host. All ranks call this, with what `this_host` gave in each of them."""
    together = [[rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)]
    first, *others = next(group for group in together if board.rank in group)
    neighbours = Neighbours(())
    if board.rank != first:
        neighbours.own = _come_in(board, first)
    elif others:
        neighbours.ends = _welcome(board, others)
    refused = board.read("refused by", [group[0] for group in together if len(group) > 1])
    neighbours.reasons = {int(rank): why for each in refused for rank, why in each.items()}
    neighbours.groups = _without(together, neighbours.reasons)
    if neighbours.own is not None and board.rank in neighbours.reasons:
        close_all(neighbours.own)
        neighbours.own = None
    return neighbours


def _without(groups: Sequence[Sequence[int]], alone: Mapping[int, str]) -> tuple[tuple[int, ...], ...]:
    """The groups without some ranks, which are groups of their own."""
    left = [tuple(rank for rank in group if rank not in alone) for group in groups]
    return tuple(sorted([*left, *((rank,) for rank in alone)]))


# -- the first rank of a host


def _welcome(board: RankBoard, others: Sequence[int]) -> dict[int, SocketPair]:
    """Let the others in. Returns the sockets to those that have come."""
    came: dict[int, SocketPair] = {}
    with ExitStack() as opened:
        try:
            door = opened.enter_context(
                closing(Door(THIS_HOST, others, partial(_take, came, board.timeout), board.timeout))
            )
            board.write("door of", [door.invitation.line(), ""])
        except OSError as error:
            board.write("door of", ["", f"rank {board.rank} could not open a socket: {error}"])
        refused = {other: why for other, why in zip(others, board.read("has come in", others)) if why}
    for other in refused.keys() & came.keys():
        close_all(came.pop(other))
    board.write("refused by", refused)
    return came


def _take(came: dict[int, SocketPair], within: float, rank: int, end: socket.socket) -> None:
    """Take the sockets of a rank, and tell it whether that could be done."""
    with end, suppress(OSError):
        end.settimeout(within)
        messages, urgent = take_over(end, 2)
        came[rank] = messages, urgent


# -- the others


def _come_in(board: RankBoard, first: int) -> SocketPair | None:
    """Go to the first rank of this host. Returns the sockets to it, or None and writes why."""
    ((line, why),) = board.read("door of", [first])
    own = None
    if line:
        try:
            with come_in(Invitation.of_line(line), board.rank, board.timeout) as end:
                end.settimeout(board.timeout)
                own, why = hand_over_pairs(end)
            why = why and f"rank {first} could not let it in: {why}"
        except OSError as error:
            why = f"{type(error).__name__}: {error}"
    board.write("has come in", why)
    return own


WITHIN = 10.0  # seconds: TCP asks again after 1, 3 and 7
_LINES = 8  # that a message has of them


def check_reach(board: RankBoard, where: Sequence[str], hosts: Sequence[str], address: str | None) -> None:
    """Raise, on all ranks, unless the hosts reach each other. All ranks call this.

    ``where`` has for each rank what is equal in those of one host, and ``hosts`` its host's name; ``address`` is that of this
    rank, on which it listens.
    """
    firsts = [where.index(host) for host in dict.fromkeys(where)]
    if len(firsts) == 1:
        return
    if board.rank in firsts:
        with ExitStack() as opened:
            this_host = f"{hosts[board.rank]} ({address})"
            line, wrong, guests = "", [], [rank for rank in firsts if rank != board.rank]
            try:
                if address is not None:
                    door = opened.enter_context(closing(Door(address, guests, _only_tried, board.timeout)))
                    line = door.invitation.line()
            except OSError as error:
                wrong.append(f"{this_host} cannot listen there: {error.strerror}")
            board.write("door for hosts", line)
            doors = zip(guests, board.read("door for hosts", guests))
            others = {rank: Invitation.of_line(line) for rank, line in doors if line}
            for rank, why in out_of_reach(board.rank, others, min(board.timeout, WITHIN)).items():
                wrong.append(f"{this_host} gets no connection with {hosts[rank]} ({others[rank].address}): {why}")
            board.write("out of reach", wrong)
            board.read("out of reach", firsts)  # until then the others may come
    if lines := [line for each in board.read("out of reach", firsts) for line in each]:
        more = f"\n  and {len(lines) - _LINES} more" if len(lines) > _LINES else ""
        raise ClusterError(
            "the hosts cannot connect with each other:\n  "
            + "\n  ".join(lines[:_LINES])
            + more
            + "\nEvery rank listens on "
            "ports that its system chooses: a firewall must let the other hosts connect to these, in both directions "
            "(net.ipv4.ip_local_port_range says which they can be). TP_SOCKET_IFNAME=eth1 on each host names another interface"
        )


def out_of_reach(guest: int, invitations: Mapping[int, Invitation], seconds: float) -> dict[int, str]:
    """Go to all of these doors at once, for a moment. Returns those that cannot be reached, with the reasons.

    >>> door = Door("127.0.0.1", [1], _only_tried, 5.0)
    >>> out_of_reach(1, {3: door.invitation}, 5.0)
    {}
    >>> door.close()
    >>> out_of_reach(1, {3: door.invitation}, 5.0)
    {3: 'Connection refused'}
    """

    def why_not(invitation: Invitation) -> str | None:
        try:
            come_in(invitation, guest, seconds).close()
        except OSError as error:
            return error.strerror or str(error)
        return None

    with ThreadPoolExecutor(max(1, len(invitations))) as threads:
        reasons = dict(zip(invitations, threads.map(why_not, invitations.values())))
    return {rank: why for rank, why in reasons.items() if why is not None}


def _only_tried(_: int, end: socket.socket) -> None:
    end.close()


# Without torchrun's agent, whose store this is, rank 0 serves it: until the last of the others has read it, and RPC met there.
_open_stores: list[Store] = []


@dataclass
class Meeting:
    """What a rank knows after all ranks have met.

    Attributes:
        addresses: where each worker is.
        routes: how values go between each two.
        sockets: this rank's sockets to rank 0, if they share memory: one for messages, and one for urgent messages.
        connections: those of rank 0 to the workers of its host.
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
    own = of_ranks[rank_info.rank][2]
    memory = {worker: str(group) for group in routes.groups for worker in group}
    addresses = [
        Address(name, host, pid, memory[worker], where == own)
        for worker, (name, (host, pid, where, _)) in enumerate(zip(names, at))
    ]
    meeting = Meeting(addresses, routes, root_store, link=link, number=meeting_number)
    if transport != "rpc":
        _connect(meeting, rank_info, neighbours)
        _give_signs(board, meeting, rank_info, [where for _, _, where, _ in of_ranks])
    return meeting


def _give_signs(board: RankBoard, meeting: Meeting, rank_info: RankInfo, where: Sequence[str]) -> None:
    """Connect the sign processes of ranks that are not on the host of rank 0 with rank 0. Without them a rank that is silent
    is lost."""
    far = [rank for rank in range(rank_info.world_size) if where[rank] != where[0]]
    if rank_info.rank == 0 and far:
        line, address = "", meeting.link.address

        def take(rank: int, end: socket.socket) -> None:
            meeting.connections.signs.take(rank_info.worker_of(rank), end)

        with suppress(OSError):
            line = "" if address is None else Door(address, far, take, board.timeout).invitation.line()
        board.write("signs", line)
    elif rank_info.rank in far and (line := board.read("signs", [0])[0]):
        with suppress(OSError):
            start_sign_process(come_in(Invitation.of_line(line), rank_info.rank, board.timeout))


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
    """Make connections of the sockets to rank 0. It gets a pair to itself, too, if it hosts a worker.

    On other hosts the sockets have shown that memory is shared, and messages come from the controller, by RPC.
    """
    if rank_info.rank not in neighbours.of(0):
        for pair in filter(None, [neighbours.own, *neighbours.ends.values()]):
            close_all(pair)
        return
    meeting.sockets = neighbours.own
    if rank_info.rank == 0:
        ends = {rank_info.worker_of(rank): pair for rank, pair in neighbours.ends.items()}
        if rank_info.index >= 0:
            meeting.sockets, ends[rank_info.index] = two_pairs()
        meeting.near = frozenset(ends)
        meeting.connections = ControllerConnections(
            *({at: pair[which] for at, pair in ends.items()} for which in (0, 1))
        )
