"""Ranks of one host find each other, or say why not; and when that is over nobody listens."""

import gc
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed import HashStore

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.engines.torchrun import meeting
from pippy.drivers.engines.torchrun.meeting import meet_neighbours
from pippy.drivers.engines.torchrun.ranks import RankBoard
from pippy.drivers.wire.messages import doors, handed_sockets
from pippy.drivers.wire.messages.handed_sockets import close_all, this_host
from tests.drivers.processes import listening, open_descriptors, within


def meet(hosts, absent=(), timeout=20.0):
    """What the ranks of these hosts find, each in a thread of its own; an error where one is raised."""
    store = HashStore()

    def of(rank):
        try:
            return meet_neighbours(RankBoard(store, rank, timeout), hosts)
        except ClusterError as error:
            return error

    with ThreadPoolExecutor(len(hosts)) as pool:
        met = {rank: pool.submit(of, rank) for rank in range(len(hosts)) if rank not in absent}
        return {rank: future.result() for rank, future in met.items()}


@pytest.fixture
def closed():
    """Closes the sockets of what ranks have found."""
    with ExitStack() as stack:

        def close_later(met):
            for each in met.values():
                for pair in [*each.ends.values(), *filter(None, [each.own])]:
                    stack.callback(close_all, pair)
            return met

        yield close_later


def reach(one, other):
    one.send(b"here")
    return other.recv(10) == b"here"


def test_ranks_of_a_host_get_sockets_to_the_first_of_them(closed):
    met = closed(meet(["a", "b", "a", "b", "a", "c"]))
    assert all(each.groups == ((0, 2, 4), (1, 3), (5,)) and not each.reasons for each in met.values())
    assert {rank: set(each.ends) for rank, each in met.items() if each.ends} == {0: {2, 4}, 1: {3}}
    for first, rank in ((0, 2), (0, 4), (1, 3)):
        for here, there in zip(met[first].ends[rank], met[rank].own, strict=True):
            assert reach(here, there) and reach(there, here)
    assert met[5].own is None


def test_nobody_else_can_come_in_and_nothing_is_left(closed, monkeypatch, tmp_path):
    """While the door is open it has no name, so a first rank that is killed leaves none; afterwards nobody listens."""
    monkeypatch.setattr(doors.tempfile, "tempdir", str(tmp_path / ("long" * 40)))
    (tmp_path / ("long" * 40)).mkdir()
    seen, inner = [], doors.Door._let_in

    def look(door):
        name = door._socket.getsockname()
        seen.append([*(tmp_path / ("long" * 40)).iterdir(), name.startswith("/proc/self/fd/"), Path(name).exists()])
        return inner(door)

    monkeypatch.setattr(doors.Door, "_let_in", look)
    gc.collect()  # or a door of an earlier test might be closed meanwhile
    before = listening([os.getpid()])
    closed(meet(["a", "a"]))
    assert seen == [[True, False]] and listening([os.getpid()]) == before
    assert not list((tmp_path / ("long" * 40)).iterdir())


@pytest.mark.parametrize(
    "where, what, how, words",
    [
        (handed_sockets, "create_shared", OSError(38, "not here"), "OSError: .*not here"),
        (doors, "_check_same_user", PermissionError("user 7"), "PermissionError: user 7"),
        (handed_sockets, "two_pairs", OSError(24, "Too many open files"), "Too many open files"),
        (handed_sockets, "map_shared", OSError(12, "no memory"), "^rank 0 could not let it in: .*no memory"),
    ],
)
def test_a_rank_that_cannot_share_memory_is_alone_and_all_know_why(closed, monkeypatch, where, what, how, words):
    """One of three cannot: it is by the thread that it is told from the others."""
    inner, calls = getattr(where, what), threading.local()
    coming, take = meeting._come_in, meeting._take
    broken = []

    def fail(*arguments):
        if getattr(calls, "rank", None) == 2 or (what == "map_shared" and getattr(calls, "takes", None) == 2):
            broken.append(1)
            raise type(how)(*how.args)  # each with its own traceback, which holds what was open
        return inner(*arguments)

    def come_in(board, first):
        calls.rank = board.rank
        try:
            return coming(board, first)
        finally:
            calls.rank = None

    def takes(came, within, rank, end):
        calls.takes = rank
        return take(came, within, rank, end)

    monkeypatch.setattr(meeting, "_come_in", come_in)
    monkeypatch.setattr(meeting, "_take", takes)
    monkeypatch.setattr(where, what, fail)
    files = open_descriptors()
    met = closed(meet(["a"] * 3))
    assert broken
    for each in met.values():
        assert each.groups == ((0, 1), (2,)) and set(each.reasons) == {2}
        assert re.search(words, each.reasons[2])
    assert met[2].own is None and set(met[0].ends) == {1}
    assert open_descriptors() == files + 4


def _raise(text):
    raise OSError(text)


def test_a_first_rank_without_a_door(closed, monkeypatch):
    monkeypatch.setattr(doors.tempfile, "mkdtemp", lambda **_: _raise("no folder"))
    met = closed(meet(["a"] * 3))
    assert all(each.groups == ((0,), (1,), (2,)) for each in met.values())
    assert met[0].reasons[1] == "rank 0 could not open a socket: no folder"
    assert not met[0].ends and met[1].own is met[2].own is None


def test_a_rank_that_ends_in_between_is_named_in_time():
    with within(3):
        met = meet(["a", "a", "b"], absent=[1], timeout=0.2)
    assert "these ranks did not call cluster() within 0.2 s, as rank 0 saw: 1" in str(met[0])
    assert isinstance(met[2], ClusterError)


def test_what_makes_a_host(monkeypatch):
    monkeypatch.delenv("PIPPY_HOST", raising=False)
    own = this_host()
    assert os.readlink("/proc/self/ns/mnt") in own
    assert Path("/proc/sys/kernel/random/boot_id").read_text().strip() in own
    monkeypatch.setenv("PIPPY_HOST", "another")
    assert this_host() != own
