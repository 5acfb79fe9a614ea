"""Checks that hosts reach each other, before RPC connects: RPC would take long to fail, and would not say which host it was.

The first rank of each host opens a door, and writes its invitation. It goes to the doors of the others, and writes which it
could not reach. All ranks read that, and raise if a host cannot reach another, in one direction or both.
"""

import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.engines.torchrun.rank_board import RankBoard
from pippy.drivers.wire.messages.doors import Door, Invitation, come_in

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
