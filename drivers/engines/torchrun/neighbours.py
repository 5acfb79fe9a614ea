"""The ranks of one host find each other: each gets two sockets to the first of them, which can make more.

    each rank       writes its host on the board: ranks with the same host may be neighbours
    the first rank  opens a door (doors.py)
    the others      hand over one end of two sockets there, and memory that both must see, and write whether that is done
    the first rank  closes the door, and writes which ranks have not come, and why

A rank whose sockets have not come has no neighbours, and is reached by RPC. In the end no rank listens.
"""

import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial

from pippy.drivers.engines.torchrun.rank_board import RankBoard
from pippy.drivers.wire.messages.doors import THIS_HOST, Door, Invitation, come_in
from pippy.drivers.wire.messages.handed_sockets import SocketPair, close_all, hand_over_pairs, take_over


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
