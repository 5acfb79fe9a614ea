"""What ranks know of each other once they have met: who shares memory, and who can connect whom."""

import pickle
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.engines.torchrun import meeting, ranks
from pippy.drivers.engines.torchrun.interfaces import NetworkInterface
from pippy.drivers.engines.torchrun.ranks import RankInfo
from pippy.drivers.engines.torchrun.torchrun import ControllerMessages, TorchrunEngine
from pippy.drivers.engines.torchrun.torchrun_worker import TorchrunWorker
from pippy.drivers.protocol.commands import ComeIn, Connect
from pippy.drivers.session.calls import Address
from pippy.drivers.session.session import Session
from pippy.drivers.wire.messages import rpc
from pippy.drivers.wire.messages.doors import Invitation
from pippy.drivers.wire.messages.handed_sockets import close_all
from pippy.drivers.wire.messages.rpc import BEYOND
from pippy.drivers.wire.messages.worker_messages import DeliveryFailure
from pippy.drivers.wire.pickling import pickle_message, unpickle
from tests.drivers.processes import few_descriptors, until

DOOR = Invitation("", 0, b"")
NOTHING: MappingProxyType[int, Any] = MappingProxyType({})


@pytest.fixture
def meet(monkeypatch):
    """Has ranks meet that are on these hosts, each in a thread of its own; an error where one is raised."""
    store, own, met = HashStore(), threading.local(), []
    monkeypatch.setattr(meeting, "rendezvous", lambda *_, **__: iter([(store, 0, 0)]))
    monkeypatch.setattr(meeting, "this_host", lambda: own.host)

    def of(rank, hosts, controller_hosts, transport, links, troubles):
        own.host = hosts[rank]
        info = RankInfo(rank, len(hosts), rank, len(hosts), controller_hosts)
        names = [f"w{i}" for i in range(info.workers)]
        try:
            return meeting.meet(
                info, names, 20.0, transport, links.get(rank, NetworkInterface()), troubles.get(rank, "")
            )
        except ClusterError as error:
            return error

    def all_meet(hosts, controller_hosts=True, transport=None, links=NOTHING, troubles=NOTHING):
        def one(rank):
            own.rank = rank
            return of(rank, hosts, controller_hosts, transport, links, troubles)

        with ThreadPoolExecutor(len(hosts)) as pool:
            met.extend(pool.map(one, range(len(hosts))))
        return met

    all_meet.own = own
    yield all_meet
    for each in met:
        if isinstance(each, meeting.Meeting):
            each.connections.close()
            close_all(each.sockets or ())


def test_workers_are_counted_from_the_first_rank_that_hosts_one(meet):
    met = meet("aabbc", controller_hosts=False)
    assert [each.routes.groups for each in met] == [((0,), (1, 2), (3,))] * 5
    assert [each.near for each in met] == [{0}, set(), set(), set(), set()]
    assert [each.sockets is not None for each in met] == [False, True, False, False, False]


def test_a_rank_without_neighbours_but_with_the_controller(meet):
    """Messages to the worker in the controller's own process take the same way as those to its neighbours."""
    met = meet("ab")
    assert met[0].near == {0} and met[0].sockets is not None
    assert not met[1].near and met[1].sockets is None


def test_all_by_rpc(meet):
    met = meet("aaa", transport="rpc")
    assert all(each.routes.groups == ((0,), (1,), (2,)) and each.sockets is None and not each.near for each in met)


def test_shared_memory_where_it_cannot_be_had_is_refused_by_all_ranks(meet):
    met = meet("aab", transport="shared_memory")
    for each in met:
        assert "is not available for all workers; leave transport out" in str(each)
        assert f"w0, w1 on {socket.gethostname()}: shared memory\nw2 on {socket.gethostname()}\n" in str(each)


def test_a_rank_that_cannot_join_is_named_by_all(meet):
    for each in meet("aab", troubles={2: "GLOO_SOCKET_IFNAME is 'ib7'"}):
        assert f"rank 2 on {socket.gethostname()}: GLOO_SOCKET_IFNAME is 'ib7'" in str(each)


@pytest.mark.parametrize(
    ("name", "remedy"), [("torch", "install the same versions"), ("names", "give cluster() the same")]
)
def test_ranks_that_differ_are_named_by_all(meet, monkeypatch, name, remedy):
    """Rank 2 has another version, or was called with other arguments."""
    known = ranks.terms_of_rank
    monkeypatch.setattr(
        meeting, "terms_of_rank", lambda given: known(given) | ({name: "2.12.0"} if meet.own.rank == 2 else {})
    )
    for each in meet("aab"):
        text, host = str(each), socket.gethostname()
        assert remedy in text and f"; 2.12.0 on {host} (rank 2)" in text and f"on {host} (ranks 0, 1); " in text


def test_a_module_that_differs_on_one_host_is_named_by_all(meet, monkeypatch):
    """Those that only one rank has imported are not compared: they say nothing of the others."""
    files = [{"model.py": "a", "train.py": "b"}, {"model.py": "a", "train.py": "b", "log.py": "c"}]
    monkeypatch.setattr(ranks, "script_files", lambda: files[meet.own.rank % 2])
    assert all(isinstance(each, meeting.Meeting) for each in meet("ab"))
    files[1]["model.py"] = "other"
    for each in meet("cd")[2:]:
        assert f"model.py on {socket.gethostname()} (rank 1) differs from that on" in str(each) and "log.py" not in str(
            each
        )


def test_a_host_whose_own_name_is_its_loopback_listens_where_another_host_is_reached(meet, monkeypatch):
    """Rank 0 knows MASTER_ADDR as 127.0.1.1, as Debian writes it; rank 1 knows the address that others reach."""
    found = NetworkInterface("eth0", "10.0.0.1")
    monkeypatch.setattr(meeting, "check_reach", lambda *_: None)  # these addresses are nobody's
    monkeypatch.setattr(meeting, "link_to", lambda host, port: found if host == "10.0.0.2" else None)
    links = {0: NetworkInterface("lo", "127.0.0.1"), 1: NetworkInterface("eth0", "10.0.0.2")}
    assert [each.link for each in meet("ab", links=links)] == [found, links[1]]
    monkeypatch.setenv("TP_SOCKET_IFNAME", "lo")
    assert [each.link for each in meet("ab", links=links)[2:]] == [links[0], links[1]]


def session(**options):
    messages = ControllerMessages([f"w{i}" for i in range(6)], near=[0, 1], far=True)
    return Session([Address(f"w{i}", "there", 1, "ab"[i > 1]) for i in range(6)], messages=messages, **options)


def test_of_two_workers_one_opens_a_door_and_the_other_comes_in_once(monkeypatch):
    """Those of one host share memory. One that cannot is asked again."""
    answers = [DOOR, None, DeliveryFailure("no free file descriptor"), DOOR, None]
    asked = []

    def urgent(name, pickled):
        asked.append((name, unpickle(pickled)))
        future = torch.futures.Future()
        future.set_result(pickle_message(answers[len(asked) - 1]))
        return future

    monkeypatch.setattr(rpc, "urgent", urgent)
    here = session()
    for _ in range(2):
        here.connect(3, {4})
    with pytest.raises(ClusterError, match="no free file descriptor"):
        here.connect(5, {2})
    here.connect(5, {2})
    assert [(name, message) for name, message in asked] == [
        ("w3", Connect(3, 4, near=True)),
        ("w4", ComeIn(3, DOOR)),
        ("w2", Connect(2, 5, near=True)),
        ("w2", Connect(2, 5, near=True)),
        ("w5", ComeIn(2, DOOR)),
    ]


def test_two_workers_of_a_host_that_is_not_the_controller_s_share_memory():
    workers = [TorchrunWorker(i, ["a", "b", "c", "d"], "cpu", str, far=[0, 1], address="127.0.0.1") for i in (2, 3)]
    with few_descriptors(0), pytest.raises(OSError, match="Too many open files"):
        workers[0].urgent(Connect(2, 3))
    for _ in range(2):  # the first may have been interrupted
        workers[1].urgent(ComeIn(2, workers[0].urgent(Connect(2, 3))))
    first, second = (worker.transport for worker in workers)
    first.send(3, (0, 0, 0), torch.ones(2))
    assert second.receive((0, 0, 0), 2).sum() == 2
    assert 3 in first.connections and not first.far_connections
    for worker in workers:
        worker.transport.close()


def test_two_workers_of_different_hosts_get_a_connection_that_breaks_when_it_is_silent():
    names, timeout = ["a", "b"], 3.0
    workers = [TorchrunWorker(i, names, "cpu", str, far=[1 - i], address="127.0.0.1", timeout=timeout) for i in (0, 1)]
    workers[1].urgent(ComeIn(0, workers[0].urgent(Connect(0, 1, near=False))))
    assert until(lambda: 1 in workers[0].transport.far_connections)
    for worker, peer in zip(workers, (1, 0)):
        end = worker.transport.far_connections[peer].socket
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * (timeout + BEYOND)
    first, second = (worker.transport for worker in workers)
    first.send(1, (0, 0, 0), torch.ones(2))
    assert second.receive((0, 0, 0), 0).sum() == 2
    for worker in workers:
        worker.transport.close()


def test_without_a_connection_values_to_another_host_go_by_rpc(caplog):
    worker = TorchrunWorker(0, ["a", "b"], "cpu", str, far=[1], address="192.0.2.1")  # which is in no network
    assert worker.urgent(Connect(0, 1, near=False)) is None and "values to and from worker 1 by RPC" in caplog.text
    assert TorchrunWorker(0, ["a", "b"], "cpu", str, far=[1]).urgent(Connect(0, 1, near=False)) is None


def test_a_lost_worker_is_followed_by_what_can_be_done():
    """Under torchrun no other process can take its place, so the error does not advise to call `recover`."""
    here = session()
    assert str(here.mark_lost(2, "killed")).endswith(
        "is lost: killed; call driver.recover(), or close this cluster and open another"
    )
    under = session(recovery_advice=TorchrunEngine.recovery_advice)
    error = under.mark_lost(2, "killed")
    assert "recover" not in str(error) and "torchrun --max-restarts 3" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
