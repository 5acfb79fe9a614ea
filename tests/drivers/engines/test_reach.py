"""Hosts that do not reach each other are named, by all ranks and in time, before RPC tries."""

import socket
from concurrent.futures import ThreadPoolExecutor

from torch.distributed import HashStore

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.engines.torchrun.rank_board import RankBoard
from pippy.drivers.engines.torchrun.reach import check_reach, out_of_reach
from tests.drivers.processes import within


def checked(hosts, addresses):
    """The error of each rank, or None."""
    store, names = HashStore(), [f"node{host}" for host in hosts]

    def check(rank):
        try:
            check_reach(RankBoard(store, rank, 20.0), hosts, names, addresses[rank])
        except ClusterError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(check, range(len(hosts))))


def test_hosts_that_reach_each_other_and_one_whose_address_is_not_known():
    assert checked("aab", ["127.0.0.1", "127.0.0.1", "127.0.0.2"]) == [None] * 3
    assert checked("ab", ["127.0.0.1", None]) == [None] * 2
    assert checked("aa", ["nothing", "is tried"]) == [None] * 2


def test_an_address_that_is_not_there_is_named_by_all():
    """192.0.2.1 is in no network."""
    for text in checked("aab", ["127.0.0.1", "127.0.0.1", "192.0.2.1"]):
        assert "  nodeb (192.0.2.1) cannot listen there: Cannot assign requested address" in text


def test_one_host_that_the_others_do_not_reach(monkeypatch):
    """The port of the second is closed for them, and it reaches theirs: all ranks say so, and name it."""

    def closed(places, seconds):
        return {rank: "no answer" for rank, (address, _) in places.items() if address == "127.0.0.2"}

    monkeypatch.setattr("pippy.drivers.engines.torchrun.reach.out_of_reach", closed)
    for text in checked("abc", ["127.0.0.1", "127.0.0.2", "127.0.0.3"]):
        wrong = [line for line in text.splitlines() if line.startswith("  ")]
        assert wrong == [
            f"  {who} gets no connection with nodeb (127.0.0.2): no answer"
            for who in ("nodea (127.0.0.1)", "nodec (127.0.0.3)")
        ]


def test_a_port_that_nobody_answers_at_is_given_up_in_time():
    """A door whose queue is full drops what would open another connection, as a firewall does."""
    with socket.socket() as door, socket.create_server(("127.0.0.1", 0)) as open_door:
        door.bind(("127.0.0.1", 0))
        door.listen(0)
        with socket.create_connection(door.getsockname()), within(5):
            failed = out_of_reach({1: door.getsockname(), 2: open_door.getsockname()}, 0.2)
    assert failed == {1: "no answer within 0.2 s"}
