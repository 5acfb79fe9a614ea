"""Ranks of torchrun: they come in at the door of rank 0, or all say why not; and leave when their cluster is closed."""

import os
import pickle
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import FileStore, HashStore, TCPStore

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.engines.cluster import Cluster
from pippy.drivers.engines.connected_worker import ConnectedWorker, RunSettings
from pippy.drivers.engines.engine import start
from pippy.drivers.engines.hub.hub_worker import place_of_this_process
from pippy.drivers.engines.hub.interfaces import NetworkInterface
from pippy.drivers.engines.torchrun import rank_worker, ranks, torchrun
from pippy.drivers.engines.torchrun.rank_worker import work
from pippy.drivers.engines.torchrun.ranks import RankBoard, RankInfo, check_terms, write_terms
from pippy.drivers.engines.torchrun.torchrun import RanksLaunch, TorchrunEngine
from pippy.drivers.protocol.commands import ComeIn, Connect
from pippy.drivers.session.calls import Address
from pippy.drivers.session.session import Session
from pippy.drivers.wire.messages import handed_sockets, rpc
from pippy.drivers.wire.messages.controller_messages import ControllerConnections
from pippy.drivers.wire.messages.doors import Invitation
from pippy.drivers.wire.messages.handed_sockets import this_host
from pippy.drivers.wire.messages.worker_messages import DeliveryFailure
from pippy.drivers.wire.pickling import pickle_message, unpickle
from tests.drivers.processes import Forked, few_descriptors, until, within

DOOR = Invitation("", 0, b"")
SCRIPTED = "tests.drivers.scripted_worker:Worker"


# -- what must be the same


def written(rank):
    """What a rank of three has written."""
    store = HashStore()
    write_terms(
        board := RankBoard(store, rank, 1.0), RankInfo(rank, 3, rank, 3, True), {"host": f"node{rank}"}, names="ab"
    )
    return board.read("terms", [rank])[0] | {"files": {"model.py": "a", "train.py": "b"}}


@pytest.mark.parametrize(
    "what, value, words",
    [
        (
            "trouble",
            "GLOO_SOCKET_IFNAME is 'ib7'",
            "connect with each other:\n  rank 2 on node2: GLOO_SOCKET_IFNAME is 'ib7'",
        ),
        (
            "terms",
            {"torch": "2.12.0"},
            "on node0, node1 (ranks 0, 1); 2.12.0 on node2 (rank 2)\ninstall the same versions on",
        ),
        (
            "terms",
            {"names": "'ac'"},
            "names: 'ab' on node0, node1 (ranks 0, 1); 'ac' on node2 (rank 2)\ngive cluster() the same",
        ),
        (
            "files",
            {"model.py": "c", "log.py": "d"},
            "model.py on node2 (rank 2) differs from that on node0 (rank 0), so stages",
        ),
        ("files", {"log.py": "only one rank has imported it, which says nothing of the others"}, ""),
    ],
)
def test_a_rank_that_differs_is_named(what, value, words):
    found = [written(rank) for rank in range(3)]
    check_terms(found)
    found[2][what] = {**found[2][what], **value} if isinstance(value, dict) else value
    if not words:
        check_terms(found)
        return
    with pytest.raises(ClusterError) as refused:
        check_terms(found)
    assert words in str(refused.value)


def test_what_makes_a_host(monkeypatch):
    monkeypatch.delenv("PIPPY_HOST", raising=False)
    own = this_host()
    assert os.readlink("/proc/self/ns/mnt") in own
    monkeypatch.setenv("PIPPY_HOST", "another")
    assert this_host() != own


# -- coming in


def board_of(store, rank, timeout=20.0):
    """The board of one of two ranks, which has written its terms."""
    board, place = RankBoard(store, rank, timeout), place_of_this_process() | {"device": "cpu", "threads": 1}
    write_terms(board, RankInfo(rank, 2, rank, 2, True), place)
    return board


def engine_of(board, transport=None):
    launch = RanksLaunch(worker=SCRIPTED, names=("a", "b"), transport=transport, timeout=5.0, patience=None)
    return TorchrunEngine(launch, RankInfo(0, 2, 0, 2, True), board)


def refused_by_both(timeout=20.0, transport=None):
    """What rank 0 raises, and what rank 1 does."""
    store = HashStore()
    with ThreadPoolExecutor(1) as pool, closing(engine_of(board_of(store, 0, timeout), transport)) as engine:
        other = pool.submit(lambda: work(RankInfo(1, 2, 1, 2, True), board_of(store, 1), False))
        with pytest.raises(ClusterError) as first:
            engine.start(20.0)
        with pytest.raises(ClusterError) as second:
            other.result()
    return str(first.value), str(second.value)


def test_what_rank_0_refuses_all_ranks_raise(monkeypatch):
    monkeypatch.setattr(torchrun, "check_terms", lambda ranks: _raise(ClusterError("they differ")))
    assert refused_by_both() == ("they differ", "they differ")


def test_shared_memory_where_it_cannot_be_had_is_refused_by_all_ranks(monkeypatch):
    places = iter(["one", "another"])
    monkeypatch.setattr(ranks, "script_files", dict)
    monkeypatch.setitem(globals(), "place_of_this_process", lambda: place_of_this_process_of(next(places)))
    first, second = refused_by_both(transport="shared_memory")
    assert first == second and "is not available for all workers; leave transport out" in first
    host = socket.gethostname()
    assert f"cannot share memory use TCP:\na on {host}\nb on {host}\nbetween these lines: TCP" in first


OWN_PLACE = place_of_this_process()


def place_of_this_process_of(memory):
    return OWN_PLACE | {"memory": memory}


def test_a_rank_that_gets_no_connection_is_named_by_both(monkeypatch):
    monkeypatch.setattr(rank_worker, "come_in", lambda *_: _raise(TimeoutError("no answer within 20 s")))
    first, second = refused_by_both()
    assert (
        f"\n  rank 1 on {socket.gethostname()}: no answer within 20 s\n" in first
        and "a firewall must let them" in first
    )
    assert second == "rank 1 gets no connection with rank 0: no answer within 20 s"


def test_a_rank_0_without_a_door_says_so_to_all(monkeypatch):
    monkeypatch.setattr("pippy.drivers.wire.messages.doors.tempfile.mkdtemp", lambda **_: _raise(OSError("no folder")))
    first, second = refused_by_both()
    assert first == second and first.endswith("cannot let the others in at this host: no folder")


def _raise(error):
    raise error


def test_a_rank_that_does_not_come_is_named_in_time():
    store = HashStore()
    with within(3), closing(engine_of(board_of(store, 0, 0.2))) as engine, pytest.raises(ClusterError) as missing:
        engine.start(0.2)
    with pytest.raises(ClusterError) as told:
        work(RankInfo(1, 2, 1, 2, True), RankBoard(store, 1, 20.0), False)
    assert "these ranks did not call cluster() within 0.2 s, as rank 0 saw: 1" in str(missing.value) == str(told.value)
    with within(3), pytest.raises(ClusterError, match=r"within 0.2 s, as rank 1 saw: 0"):
        work(RankInfo(1, 2, 1, 2, True), RankBoard(HashStore(), 1, 0.2), False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the script goes on, and is its own again"


def test_a_host_whose_own_name_is_its_loopback_listens_where_another_host_is_reached(monkeypatch):
    """Rank 0 knows MASTER_ADDR as 127.0.1.1, as Debian writes it; rank 1 knows the address that others reach."""
    monkeypatch.setattr(torchrun, "link_of_rank", lambda info: (NetworkInterface("lo", "127.0.0.1"), ""))
    monkeypatch.setattr(
        torchrun, "link_to", lambda host, port: {"10.0.0.2": NetworkInterface("eth0", "10.0.0.1")}[host]
    )
    found = [written(rank) for rank in range(2)]
    found[0]["place"]["machine"], found[1]["place"]["machine"], found[1]["address"] = this_host(), "another", "10.0.0.2"
    engine = engine_of(None)
    assert engine._address(found) == "10.0.0.1"
    monkeypatch.setenv("TP_SOCKET_IFNAME", "lo")
    assert engine._address(found) == "127.0.0.1"


def test_ctrl_c_ends_a_rank_that_waits_for_the_others():
    """It waited to the end of start_timeout, unless the store of torchrun ended before."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def wait():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        board = RankBoard(TCPStore("127.0.0.1", store.port, is_master=False), 1, 60.0)
        board.write("host", "a")
        work(RankInfo(1, 2, 1, 2, True), board, False)

    rank = Forked(wait)
    assert RankBoard(store, 0, 60.0).read("host", [1]) == ["a"]
    assert until(lambda: len(os.listdir(f"/proc/{rank.pid}/task")) > 1), "it waits on a thread"
    os.kill(rank.pid, signal.SIGINT)
    assert rank.ended()[1].endswith("KeyboardInterrupt\n")


def test_a_rank_that_others_do_not_connect_with_by_rpc_does_not_wait_for_ever(monkeypatch):
    """It has met them at the store, that of torchrun. RPC alone would wait for 24 days. In another process: it half joins."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    def join():
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        rpc.join_ranks(0, 2, store, "lo", 1.0, 5.0, 0)

    _, text = Forked(join).ended()
    assert "ClusterError: rank 0 has met the others" in text
    assert "start_timeout (1 s)" in text and "of the interface lo" in text and "TP_SOCKET_IFNAME" in text


# -- connections between workers


def session(answers=(), asked=None, **options):
    """Six workers, of which the controller reaches none through memory; ``asked`` is who was asked for what."""
    left = list(answers)

    class Messages(ControllerConnections):
        def connect(self, one, other):
            return one

        def urgent(self, worker, pickled):
            asked.append((worker, unpickle(pickled)))
            future = torch.futures.Future()
            future.set_result(pickle_message(left.pop(0)))
            return future

    return Session([Address(f"w{i}", "there", 1, "ab"[i > 1]) for i in range(6)], messages=Messages(), **options)


def test_of_two_workers_one_opens_a_door_and_the_other_comes_in_once():
    """Those of one host share memory. One that cannot is asked again."""
    asked = []
    here = session([DOOR, None, DeliveryFailure("no free file descriptor"), DOOR, None], asked)
    for _ in range(2):
        here.connect(3, {4})
    with pytest.raises(ClusterError, match="no free file descriptor"):
        here.connect(5, {2})
    here.connect(5, {2})
    expected = [
        (3, Connect(3, 4, near=True)),
        (4, ComeIn(3, DOOR)),
        (2, Connect(2, 5, near=True)),
        (2, Connect(2, 5, near=True)),
        (5, ComeIn(2, DOOR)),
    ]
    assert asked == expected


@contextmanager
def two_workers(timeout=3.0):
    """Workers 2 and 3, without a controller."""
    settings = RunSettings(SCRIPTED, tuple("abcd"), "cpu", 1, timeout, 0.0)
    workers = [ConnectedWorker(index, "127.0.0.1", settings) for index in (2, 3)]
    for each in workers:
        each.start()
    yield workers
    first, second = (worker.transport for worker in workers)
    first.send(3, (0, 0, 0), torch.ones(2))
    assert second.receive((0, 0, 0), 2).sum() == 2
    for worker in workers:
        worker.transport.close()
        worker.queue.close()


@pytest.mark.parametrize(
    "mapped, words",
    [
        (lambda *_: _raise(OSError(12, "no memory")), "no memory"),
        (
            lambda *_: SimpleNamespace(part=lambda start, size: bytes(size)),
            "what the other process writes .* cannot be seen",
        ),
    ],
)
def test_sockets_come_only_with_memory_that_both_see(monkeypatch, mapped, words):
    monkeypatch.setattr(handed_sockets, "map_shared", mapped)
    (here, there), (own, theirs) = socket.socketpair(), socket.socketpair()
    with ThreadPoolExecutor(1) as pool, here, there, own, theirs:
        taking = pool.submit(handed_sockets.take_over, there, 1)
        for side in (lambda: handed_sockets.hand_over(here, [theirs]), taking.result):
            with pytest.raises(OSError, match=words):
                side()


def test_two_workers_of_a_host_that_is_not_the_controller_s_share_memory():
    with two_workers() as (first, second):
        with few_descriptors(0), pytest.raises(OSError, match="Too many open files"):
            first.urgent(Connect(2, 3))
        for _ in range(2):  # the first may have been interrupted
            second.urgent(ComeIn(2, first.urgent(Connect(2, 3))))
    assert 3 in first.transport.connections and not first.transport.far_connections


def test_two_workers_of_different_hosts_get_a_connection_that_breaks_when_it_is_silent():
    with two_workers(timeout=3.0) as (first, second):
        second.urgent(ComeIn(2, first.urgent(Connect(2, 3, near=False))))
        assert until(lambda: 3 in first.transport.far_connections)
        for worker, peer in ((first, 3), (second, 2)):
            end = worker.transport.far_connections[peer].socket
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * 4 * 3.0


def test_what_a_rank_is_told_of_its_neighbours():
    """Values between the GPUs of a host may stay on them; the worker beside the script has no core to poll on."""
    engine = TorchrunEngine(replace(engine_of(None).launch, names=tuple("abcd")), RankInfo(0, 4, 0, 4, True), None)
    for worker, (host, device) in enumerate([("a", "cuda:0"), ("a", "cuda:1"), ("b", "cuda:0"), ("a", "cpu")]):
        place = {"host": host, "machine": host, "memory": host, "cores": [worker], "device": device, "threads": 1}
        engine.places.of[worker] = place
    assert [engine._settings(worker).near for worker in range(4)] == [(1,), (0,), (), (0, 1)]
    assert [engine._settings(worker).patience > 0 for worker in range(4)] == [False, True, True, True]
    assert engine.routes.devices == ("cuda:0", "cuda:1", "cuda:0", "cpu")


# -- the end


def test_a_lost_worker_is_followed_by_what_can_be_done():
    """Under torchrun no other process can take its place, so the error does not advise to call `recover`."""
    advice = "is lost: killed; call driver.recover(), or close this cluster and open another"
    assert str(session().mark_lost(2, "killed")).endswith(advice)
    error = session(recovery_advice=TorchrunEngine.recovery_advice).mark_lost(2, "killed")
    assert "recover" not in str(error) and "torchrun --max-restarts 3" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def say_nothing(text):
    raise MemoryError


def after(seconds=0.3):
    """What a script does when its cluster is closed."""
    time.sleep(seconds)
    os._exit(7)


@pytest.mark.parametrize(
    "does, how, status, words",
    [
        ("echo", "closed", 7, ""),
        ("echo", "closed as one was lost", 7, r"pippy: worker 'b' \(pid \d+\) leaves: it is lost\n"),
        (
            "block",
            "closed",
            1,
            r"pippy: worker 'b' .* ends itself: 0.1 s after its cluster was closed it was still at does .'block',.\n",
        ),
        (
            "block",
            "gone",
            1,
            r"pippy: worker 'b' .* ends itself: the controller has ended without closing the cluster\n",
        ),
        ("block", "gone, and no memory to say so", 1, ""),
    ],
)
def test_how_a_rank_ends(tmp_path, does, how, status, words):
    """The end of its script counts, whatever it takes; a stage that hangs is named, and the process has not succeeded."""

    def run():
        rank_worker.LEAVES_WITHIN = 0.1 if does == "block" else 5.0
        if "memory" in how:
            rank_worker.say = say_nothing
        try:
            work(RankInfo(1, 2, 1, 2, True), board_of(FileStore(str(tmp_path / "store"), 2), 1), False)
        except SystemExit:
            after()

    rank, engine = Forked(run), engine_of(board_of(FileStore(str(tmp_path / "store"), 2), 0))
    cluster = Cluster(engine.names, start(engine, 5.0, 60.0), engine)
    cluster.session.send(1, (does, *[3] * (does == "echo")))
    assert until(lambda: does == "echo" or does in cluster.session.answer(cluster.session.urgent(1, ("doing",))))
    if "gone" in how:
        engine._at[1].lines.socket.shutdown(socket.SHUT_RDWR)
    else:
        engine.close("it is lost" if "lost" in how else None)
    ended, text = rank.ended()
    assert ended == status and re.fullmatch(words, text), text
    cluster.close()
