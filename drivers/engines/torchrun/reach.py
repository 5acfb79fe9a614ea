"""Checks that hosts reach each other, before RPC connects: RPC would take long to fail, and would not say which host it was.

The first rank of each host opens a port, and writes its address. It connects with the ports of the others, sends nothing, and
writes which it could not reach. All ranks read that, and raise if a host cannot reach another, in one direction or both.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.engines.torchrun.rank_board import RankBoard
from pippy.drivers.wire.messages.doors import connect_to, listen_at

WITHIN = 10.0  # seconds: TCP asks again after 1, 3 and 7
_LINES = 8  # that a message has of them

Place = tuple[str, int]

SocketAddress = tuple[str, int]


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
            own = f"{hosts[board.rank]} ({address})"
            place, wrong = ("", 0), []
            try:
                if address is not None:
                    place = opened.enter_context(listen_at(address, len(firsts))).getsockname()[:2]
            except OSError as error:
                wrong.append(f"{own} cannot listen there: {error.strerror}")
            board.write("door for hosts", place)
            places = dict(zip(firsts, board.read("door for hosts", firsts)))
            others = {rank: (to, port) for rank, (to, port) in places.items() if rank != board.rank and to}
            for rank, why in out_of_reach(others, min(board.timeout, WITHIN)).items():
                wrong.append(f"{own} gets no connection with {hosts[rank]} ({others[rank][0]}): {why}")
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


def out_of_reach(places: Mapping[int, SocketAddress], seconds: float) -> dict[int, str]:
    """Connect with all of these addresses at once, for a moment. Returns those that cannot be reached, with the reasons.

    >>> import socket
    >>> door = socket.create_server(("127.0.0.1", 0))
    >>> out_of_reach({3: door.getsockname()}, 5.0)
    {}
    >>> place = door.getsockname()
    >>> door.close()
    >>> out_of_reach({3: place}, 5.0)
    {3: 'Connection refused'}
    """

    def why_not(place: Place) -> str | None:
        try:
            connect_to(*place, seconds).close()
        except TimeoutError:
            return f"no answer within {seconds:g} s"
        except OSError as error:
            return error.strerror
        return None

    with ThreadPoolExecutor(max(1, len(places))) as threads:
        found = dict(zip(places, threads.map(why_not, places.values())))
    return {rank: why for rank, why in found.items() if why is not None}
