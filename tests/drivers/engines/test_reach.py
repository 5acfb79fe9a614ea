"""Hosts that do not reach each other are named, by all ranks and in time, before RPC tries."""

import socket
from concurrent.futures import ThreadPoolExecutor

from torch.distributed import HashStore

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.engines.torchrun.meeting import check_reach, out_of_reach
from pippy.drivers.engines.torchrun.ranks import RankBoard
from pippy.drivers.wire.messages.doors import Door, Invitation
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

    def closed(guest, invitations, seconds):
        return {rank: "no answer" for rank, each in invitations.items() if each.address == "127.0.0.2"}

    monkeypatch.setattr("pippy.drivers.engines.torchrun.meeting.out_of_reach", closed)
    for text in checked("abc", ["127.0.0.1", "127.0.0.2", "127.0.0.3"]):
        wrong = [line for line in text.splitlines() if line.startswith("  ")]
        assert wrong == [
            f"  {who} gets no connection with nodeb (127.0.0.2): no answer"
            for who in ("nodea (127.0.0.1)", "nodec (127.0.0.3)")
        ]


def test_a_port_that_nobody_answers_at_is_given_up_in_time():
    """A door whose queue is full drops what would open another connection, as a firewall does."""
    open_door = Door("127.0.0.1", [0], lambda _, end: end.close(), 5.0)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        invitation = Invitation(*full.getsockname(), bytes(32))
        with socket.create_connection(full.getsockname()), within(5):
            failed = out_of_reach(0, {1: invitation, 2: open_door.invitation}, 0.2)
    assert failed == {1: "no answer within 0.2 s"}
