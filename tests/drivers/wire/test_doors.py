"""Who comes to a door and is not its guest is refused in time, and the guest still comes in; who else answers is found out."""

import gc
import os
import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace

import pytest
from torch.distributed import HashStore

from pippy.drivers.engines.torchrun import far_peers, neighbours, reach
from pippy.drivers.engines.torchrun.rank_board import RankBoard
from pippy.drivers.wire.messages import doors
from pippy.drivers.wire.messages.doors import THIS_HOST, Door, Invitation, come_in
from tests.drivers.processes import listening, open_descriptors, within

GUEST, OTHER = 1, 7  # the guest of each door, and one that has not been invited


@contextmanager
def for_values(monkeypatch):
    """A worker's door for another one of another host."""
    taken = queue.SimpleQueue()
    peers = far_peers.FarPeers(0, str, [GUEST], "127.0.0.1", 20.0, lambda peer, end: taken.put((peer, end)))
    yield peers.invite(GUEST)
    guest, end = taken.get(timeout=10)
    end.close()
    assert guest == GUEST


@contextmanager
def written(what, run):
    """An invitation that is written on the board, while a rank runs this."""
    store = HashStore()
    guests = RankBoard(store, GUEST, 20.0)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, RankBoard(store, 0, 20.0))
        found = guests.read(what, [0])[0]
        yield guests, Invitation.of_line(found if isinstance(found, str) else found[0]), running


@contextmanager
def for_neighbours(monkeypatch):
    """The door of the first rank of a host for the others."""
    with written("door of", lambda board: neighbours._welcome(board, [GUEST])) as (board, invitation, running):
        yield invitation
        board.write("has come in", "it gave up")
        assert running.result() == {}


@contextmanager
def for_hosts(monkeypatch):
    """The door of a host that tries whether another one reaches it."""
    names = ["a", "b"]
    given = names, names, "127.0.0.1"
    with written("door for hosts", lambda board: reach.check_reach(board, *given)) as (board, invitation, running):
        board.write("door for hosts", "")
        yield invitation
        board.write("out of reach", [])
        assert running.result() is None


@pytest.fixture(params=[for_values, for_neighbours, for_hosts])
def invitation(request, monkeypatch):
    """That of each kind of door. The guest comes in at the end."""
    with request.param(monkeypatch) as invitation:
        yield invitation
        with come_in(invitation, GUEST, 10.0):
            pass


def connected(invitation):
    end = doors.socket_for(invitation.address)
    end.settimeout(10)
    place = invitation.address, invitation.port
    end.connect(place[0] if end.family == socket.AF_UNIX else place)
    return end


def greeting(word, guest=GUEST, runs=None):
    return doors._GREETING.pack(word, guest, (runs or doors._versions()).encode())


def heard(end):
    """All that is said until the connection is closed, or broken."""
    said = b""
    with suppress(ConnectionError):
        while more := end.recv(1000):
            said += more
    return said


WRONG_GUESTS = {
    "closes at once": lambda invitation: None,
    "silent": lambda invitation: b"",
    "another word": lambda invitation: greeting(os.urandom(32)),
    "the host's word": lambda invitation: greeting(invitation.second),
    "half a word": lambda invitation: invitation.first[:16],
    "half a greeting": lambda invitation: greeting(invitation.first)[:60],
    "much": lambda invitation: os.urandom(1 << 20),
    "not invited": lambda invitation: greeting(invitation.first, OTHER),
}


@pytest.mark.parametrize("said", WRONG_GUESTS.values(), ids=WRONG_GUESTS)
def test_a_wrong_guest_is_told_nothing(invitation, said):
    with within(5), connected(invitation) as stranger:
        stranger.settimeout(0.1)
        with suppress(OSError):  # the door has closed it meanwhile
            if said(invitation) is None:
                stranger.shutdown(socket.SHUT_WR)
            else:
                stranger.sendall(said(invitation))
        stranger.settimeout(10)
        assert heard(stranger) == b""


REFUSED_GUESTS = {
    "another version": lambda invitation: greeting(invitation.first, runs="Python 2.7, torch 0.1, pippy source 0"),
    "a greeting that is too long": lambda invitation: greeting(invitation.first) + b"and more",
}


@pytest.mark.parametrize("said", REFUSED_GUESTS.values(), ids=REFUSED_GUESTS)
def test_a_guest_that_goes_on_otherwise_is_greeted_and_refused(invitation, said):
    with within(5), connected(invitation) as guest:
        guest.sendall(said(invitation))
        assert heard(guest) == greeting(invitation.second)


def test_a_guest_that_gives_up_leaves_the_host_without_a_connection(invitation):
    with within(5), connected(invitation) as guest:
        guest.sendall(greeting(invitation.first))
        assert guest.recv(1000) == greeting(invitation.second)


WRONG_HOSTS = {
    "silent": (lambda invitation: b"", TimeoutError, "no answer within 0.5 s"),
    "closes": (lambda invitation: None, ConnectionError, "closed|reset"),
    "half a word": (lambda invitation: invitation.second[:16], TimeoutError, "no answer within 0.5 s"),
    "half a greeting": (lambda invitation: greeting(invitation.second)[:60], TimeoutError, "no answer within 0.5 s"),
    "another word": (lambda invitation: bytes(32), ConnectionError, "another program answers"),
    "the guest's word": (lambda invitation: greeting(invitation.first), ConnectionError, "another program answers"),
    "another version": (
        lambda invitation: greeting(invitation.second, runs="Python 2.7"),
        ConnectionError,
        r"it runs Python 2\.7, and this process Python 3.*, torch .*; install the same versions on each host",
    ),
}


@pytest.mark.parametrize("address", [THIS_HOST, "127.0.0.1"], ids=["unix", "TCP"])
@pytest.mark.parametrize(("says", "error", "words"), WRONG_HOSTS.values(), ids=WRONG_HOSTS)
def test_a_guest_goes_away_from_a_wrong_host(tmp_path, address, says, error, words):
    with doors.socket_for(address) as other:
        other.bind(str(tmp_path / "other") if address == THIS_HOST else (address, 0))
        other.listen(1)
        place = (other.getsockname(), 0) if address == THIS_HOST else other.getsockname()
        invitation = Invitation(*place, os.urandom(32), os.urandom(32))

        def answer():
            with other.accept()[0] as end:
                end.recv(1000)
                if (said := says(invitation)) is not None:
                    end.sendall(said)
                    heard(end)

        with ThreadPoolExecutor(1) as pool, within(5):
            answering = pool.submit(answer)
            with pytest.raises(error, match=words):
                come_in(invitation, GUEST, 0.5)
            answering.result()


def test_the_port_is_closed_behind_the_last_guest_and_the_words_are_not_shown():
    gc.collect()  # or a door of an earlier test might be closed meanwhile
    before, taken = listening([os.getpid()]), queue.SimpleQueue()
    door = Door("127.0.0.1", [3, 5], lambda guest, end: taken.put((guest, end)), 10.0)
    with ExitStack() as opened:
        for guest in (5, 3):
            opened.enter_context(come_in(door.invitation, guest, 10.0))
            found, end = taken.get(timeout=10)
            opened.enter_context(end)
            assert found == guest and (listening([os.getpid()]) == before) == (guest == 3)
            with pytest.raises(OSError):
                come_in(door.invitation, guest, 1.0)
    assert repr(door.invitation.first) not in repr(door.invitation)
    assert Invitation.of_line(door.invitation.line()) == door.invitation


def test_strangers_at_a_door_take_one_descriptor_at_a_time_and_the_invited_still_comes_in():
    """One says nothing, one half a secret, one much, and then a thousand come and go, or stay outside."""
    taken, before = queue.SimpleQueue(), open_descriptors()
    invitation = Door("127.0.0.1", [1], lambda _, end: taken.put(end), 30.0).invitation
    place = invitation.address, invitation.port
    with ExitStack() as stack:
        for said in (b"", os.urandom(20), os.urandom(1 << 20)):
            stranger = stack.enter_context(socket.create_connection(place))
            stranger.setblocking(False)
            with suppress(BlockingIOError, ConnectionError):
                stranger.send(said or b"x")
        for _ in range(1000):
            with socket.socket() as stranger:
                stranger.setblocking(False)
                stranger.connect_ex(place)
        assert open_descriptors() <= before + 3 + 2 + 1, "the strangers, the door, and who stands in it"
        guest = come_in(invitation, 1, 20.0)
        stack.callback(guest.close)
        host = taken.get(timeout=10)
        host.close()
    with within(5):
        while open_descriptors() > before:
            os.sched_yield()


@pytest.mark.parametrize("address", [THIS_HOST, "127.0.0.1"], ids=["unix", "TCP"])
@pytest.mark.parametrize("ends", ["in time", "closed"])
def test_a_door_that_nobody_comes_to_closes(address, ends):
    threads, files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    with within(10):
        door = Door(address, [1], print, 0.05 if ends == "in time" else 60.0)
        if ends == "closed":
            with closing(door):
                pass
        while set(threading.enumerate()) - threads or set(os.listdir("/proc/self/fd")) - files:
            os.sched_yield()
        with pytest.raises(OSError):
            come_in(door.invitation, 1, 1.0)


def test_another_user_is_refused_by_both_ends(monkeypatch):
    """The system says to whom a process belongs; here this process takes itself for another one's."""
    taken = queue.SimpleQueue()
    with closing(Door(THIS_HOST, [1], lambda _, end: taken.put(end), 10.0)) as door:
        with monkeypatch.context() as patched, pytest.raises(PermissionError, match="it belongs to user"):
            patched.setattr(doors.os, "geteuid", lambda: 12345)
            come_in(door.invitation, 1, 1.0)
        wrong = replace(door.invitation, first=bytes(32))
        with pytest.raises(ConnectionError, match=r"closed|reset|Broken pipe"):
            come_in(wrong, 1, 5.0)
        come_in(door.invitation, 1, 5.0).close()
        taken.get(timeout=10).close()
