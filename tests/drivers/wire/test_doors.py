"""Who comes to a door and is not its guest is refused in time, and the guest still comes in; who else answers is found out."""

import gc
import math
import os
import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pippy.drivers.engines.connected_worker import Peers
from pippy.drivers.protocol.commands import Connect
from pippy.drivers.wire.messages import doors
from pippy.drivers.wire.messages.doors import THIS_HOST, Door, Invitation, come_in
from tests.drivers.processes import attack, half_open, listening, open_descriptors, within

GUEST, OTHER = 1, 7  # the guest of each door, and one that has not been invited


@contextmanager
def for_values(monkeypatch):
    """A worker's door for another one of another host."""
    taken = queue.SimpleQueue()
    carrier = SimpleNamespace(add_far=lambda peer, end: taken.put((peer, end)))
    yield Peers(0, ["a", "b"], "127.0.0.1", 20.0, carrier).answer(Connect(0, GUEST, near=False))
    guest, end = taken.get(timeout=10)
    end.close()
    assert guest == GUEST


@contextmanager
def for_ranks(monkeypatch):
    """The door of rank 0 for those of its host."""
    taken = queue.SimpleQueue()
    with closing(Door(THIS_HOST, [GUEST], lambda *came: taken.put(came), 20.0)) as door:
        yield door.invitation
        guest, end = taken.get(timeout=10)
        end.close()
        assert guest == GUEST


@contextmanager
def for_workers_that_join(monkeypatch):
    """A door with a secret of its own, to which any number may come, at any time. It is open to all."""
    taken = queue.SimpleQueue()
    with closing(Door("127.0.0.1", None, lambda *came: taken.put(came), math.inf, secret=b"a text")) as door:
        yield door.invitation
        guest, end = taken.get(timeout=10)
        end.close()
        assert guest == GUEST and taken.empty()


@pytest.fixture(params=[for_values, for_ranks, for_workers_that_join])
def invitation(request, monkeypatch):
    """That of each kind of door. The guest comes in at the end."""
    monkeypatch.setattr(doors, "_GREETS", 0.5)
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


def greeting(invitation, challenge, guest=GUEST, runs=None, who=b"guest", own=bytes(32)):
    text = (runs or doors._versions()).encode()
    proof = doors._proof(invitation.secret, who, own, challenge, guest, text.ljust(doors._TEXT, b"\0"))
    return doors._GREETING.pack(proof, own, guest, text)


def exactly(end, size):
    said = b""
    while len(said) < size:
        said += (more := end.recv(size - len(said)))
        assert more, "it is closed"
    return said


def heard(end):
    """All that is said until the connection is closed, or broken."""
    said = b""
    with suppress(ConnectionError):
        while more := end.recv(1000):
            said += more
    return said


ELSE = Invitation("", 0, os.urandom(32))
WRONG_GUESTS = {
    "closes at once": lambda invitation, challenge: None,
    "silent": lambda invitation, challenge: b"",
    "another secret": lambda invitation, challenge: greeting(ELSE, challenge),
    "the host's proof": lambda invitation, challenge: greeting(invitation, challenge, who=b"host"),
    "a proof for another challenge": lambda invitation, challenge: greeting(invitation, bytes(32)),
    "the challenge": lambda invitation, challenge: 5 * challenge,
    "half a proof": lambda invitation, challenge: greeting(invitation, challenge)[:16],
    "half a greeting": lambda invitation, challenge: greeting(invitation, challenge)[:60],
    "a changed number": lambda invitation, challenge: (
        (whole := greeting(invitation, challenge))[:64] + b"\7" + whole[65:]
    ),
    "much": lambda invitation, challenge: os.urandom(1 << 20),
}


@pytest.mark.parametrize("said", WRONG_GUESTS.values(), ids=WRONG_GUESTS)
def test_a_wrong_guest_is_told_nothing(invitation, said):
    with within(5), connected(invitation) as stranger:
        says = said(invitation, exactly(stranger, 32))
        stranger.settimeout(0.1)
        with suppress(OSError):  # the door has closed it meanwhile
            if says is None:
                stranger.shutdown(socket.SHUT_WR)
            else:
                stranger.sendall(says)
        stranger.settimeout(10)
        assert heard(stranger) == b""


@pytest.fixture
def standing():
    """Who is kept here stands before a door until its guest has come in."""
    with ExitStack() as kept:
        yield kept


def test_what_strangers_do_keeps_the_guest_out_of_no_door(standing, invitation):
    """The guest is not kept waiting either: the system drops nothing that comes to a door."""
    with within(2):
        standing.enter_context(half_open(lambda: connected(invitation), 40))
        attack(lambda: connected(invitation))


def test_a_guest_that_was_not_invited_is_told_nothing():
    with closing(Door("127.0.0.1", [GUEST], print, 10.0)) as door, connected(door.invitation) as guest:
        guest.sendall(greeting(door.invitation, exactly(guest, 32), OTHER))
        assert heard(guest) == b""


REFUSED_GUESTS = {
    "another version": ({"runs": "Python 2.7, torch 0.1, pippy source 0"}, b""),
    "a greeting that is too long": ({}, b"and more"),
}


@pytest.mark.parametrize(("says", "more"), REFUSED_GUESTS.values(), ids=REFUSED_GUESTS)
def test_a_guest_that_goes_on_otherwise_is_greeted_and_refused(invitation, says, more):
    with within(5), connected(invitation) as guest:
        challenge = exactly(guest, 32)
        guest.sendall(greeting(invitation, challenge, **says) + more)
        assert heard(guest) == greeting(invitation, bytes(32), who=b"host", own=challenge)


def test_a_guest_that_gives_up_leaves_the_host_without_a_connection(invitation):
    with within(5), connected(invitation) as guest:
        challenge = exactly(guest, 32)
        guest.sendall(greeting(invitation, challenge))
        assert exactly(guest, 160) == greeting(invitation, bytes(32), who=b"host", own=challenge)


def test_who_runs_other_versions_is_named_to_the_host():
    told = queue.SimpleQueue()
    door = Door("127.0.0.1", [GUEST], print, 10.0, refused=lambda end, why: told.put((end.getpeername()[0], why)))
    with closing(door), connected(door.invitation) as guest:
        guest.sendall(greeting(door.invitation, exactly(guest, 32), runs="Python 2.7"))
        address, why = told.get(timeout=10)
    assert address == "127.0.0.1" and why.startswith("it runs Python 2.7, and this process Python 3.")


CHALLENGE = bytes(range(32))
WRONG_HOSTS = {
    "silent": (None, TimeoutError, "no answer within 0.5 s"),
    "closes": (lambda invitation, own: None, ConnectionError, "closed|reset"),
    "says only the challenge": (lambda invitation, own: b"", TimeoutError, "no answer within 0.5 s"),
    "half a greeting": (
        lambda invitation, own: greeting(invitation, own, who=b"host", own=CHALLENGE)[:60],
        TimeoutError,
        "no answer within 0.5 s",
    ),
    "another secret": (
        lambda invitation, own: greeting(ELSE, own, who=b"host", own=CHALLENGE),
        ConnectionError,
        "another program answers",
    ),
    "the guest's own proof": (
        lambda invitation, own: greeting(invitation, own, own=CHALLENGE),
        ConnectionError,
        "another program answers",
    ),
    "another challenge": (
        lambda invitation, own: greeting(invitation, own, who=b"host"),
        ConnectionError,
        "another program answers",
    ),
    "another version": (
        lambda invitation, own: greeting(invitation, own, who=b"host", own=CHALLENGE, runs="Python 2.7"),
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
        invitation = Invitation(*place, os.urandom(32))

        def answer():
            with other.accept()[0] as end:
                if says is None:
                    assert heard(end) == b""
                    return
                end.sendall(CHALLENGE)
                if (said := says(invitation, exactly(end, 160)[32:64])) is not None:
                    end.sendall(said)
                    heard(end)

        with ThreadPoolExecutor(1) as pool, within(5):
            answering = pool.submit(answer)
            with pytest.raises(error, match=words):
                come_in(invitation, GUEST, 0.5)
            answering.result()


def test_the_port_is_closed_behind_the_last_guest_and_the_secret_is_not_shown():
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
    assert repr(door.invitation.secret) not in repr(door.invitation)
    assert Invitation.of_line(door.invitation.line()) == door.invitation


def test_strangers_at_a_door_take_few_descriptors_and_the_invited_still_comes_in():
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
        assert open_descriptors() <= before + 3 + 2 + doors._STANDING, "the strangers, the door, and who stands in it"
        guest = come_in(invitation, 1, 20.0)
        stack.callback(guest.close)
        host = taken.get(timeout=10)
        host.close()
    with within(5):
        while open_descriptors() > before:
            os.sched_yield()


def test_a_thousand_that_stay_and_say_nothing_keep_nobody_out():
    """Those that stand there longest are sent away, at once: the guest waits for none of them."""
    taken, half, before = queue.SimpleQueue(), 32 * b"?", open_descriptors()
    with closing(Door("127.0.0.1", None, lambda _, end: taken.put(end), math.inf, secret=b"a text")) as door:
        place, strangers = (door.invitation.address, door.invitation.port), []
        with ExitStack() as stack, within(10):
            for number in range(1000):
                stranger = stack.enter_context(socket.socket())
                stranger.setblocking(False)
                stranger.connect_ex(place)
                strangers.append(stranger)
                if number % 100 == 0:
                    with suppress(OSError):
                        stranger.send(half)
            with come_in(door.invitation, 1, 20.0), taken.get(timeout=10):
                assert open_descriptors() <= before + 1000 + 3 + 2 + doors._STANDING
    assert open_descriptors() == before


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
        wrong = replace(door.invitation, secret=bytes(32))
        with pytest.raises(ConnectionError, match=r"closed|reset|Broken pipe"):
            come_in(wrong, 1, 5.0)
        come_in(door.invitation, 1, 5.0).close()
        taken.get(timeout=10).close()


def test_who_has_come_in_is_taken_although_the_door_closes():
    """A worker says that it has joined once it takes the connection: it was dropped if the door had not read that yet."""
    taken: list[int] = []
    for number in range(50):
        door = Door("127.0.0.1", None, lambda number, end: (taken.append(number), end.close()), 10.0)
        with come_in(door.invitation, number, 10.0):
            door.close()
    assert taken == [*range(50)]
