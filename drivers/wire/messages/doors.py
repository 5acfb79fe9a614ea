"""Doors: the one way in which processes that do not know each other get a connection, of one host or of two.

A door is open for guests that have its invitation: where it is, and a secret. Most are open for a moment, and have a secret of
32 random bytes; that of a cluster which workers join is open as long as the cluster is, and its secret is in a file.

    the host    says 32 random bytes, the challenge
    the guest   says 32 random bytes, its number, which versions it runs, and a proof of all that was said, made with the secret
    the host    says its versions, and a proof of its own
    the guest   says that it takes the connection
    the host    takes it, too; behind the last guest it closes the door

So all doors refuse alike, and no secret travels. Who does not know it is told nothing but the challenge, and nothing that it
says is read beyond one greeting. Who answers and does not know it is another program. Processes with other versions do not work
together. A guest that has given up leaves the host without a connection, too. What goes through a connection afterwards is not
the door's matter: it is neither encrypted nor signed.

Several guests may stand in a door at once, each for a few seconds. Where there are too many, the one that has stood there
longest without a proof is sent away for the next, but none at once.

Of one host: a door is a unix socket without a name, which this user's processes find among the open files of the process that
opened it. Both ends also ask the system whether the other belongs to this user. Of two hosts: it is a port of TCP.

An invitation is as secret as what carries it: RPC, for connections that carry values; torchrun's store for the other doors,
behind which nothing is taken from another host, or from another user.
"""

import hmac
import math
import os
import select
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field

from pippy.drivers.base.versions import versions
from pippy.drivers.wire.pollable_event import PollableEvent

THIS_HOST = ""  # the address of a door for processes of this host
_WORD, _TEXT, _TAKEN = 32, 92, b"+"
_GREETING = struct.Struct(f"<{_WORD}s{_WORD}si{_TEXT}s")  # a proof, random bytes, the guest's number, versions
_GREETS = 5.0  # seconds that a guest has for its greeting
_STANDING = 128  # so many may be without a proof at once
_STAYS = 0.25  # seconds that each of these may stay at least: an answer may take so long
_BACKLOG = 128  # connections that the system keeps for a door: if it keeps none, it drops a guest's first packet, too
_LATEST = 60.0  # seconds until a guest that has proved it takes the connection
_NO_DESCRIPTOR = 0.05  # seconds to wait for a free one
_ANOTHER = "another program answers at the place that was opened for this connection"
_CREDENTIALS = struct.Struct("3i")

Take = Callable[[int, socket.socket], object]


class GuestRefused(ConnectionError):
    """The host has heard the greeting of a guest, and does not let it in; or the guest does not work with this host.

    >>> issubclass(GuestRefused, OSError)
    True
    """


@dataclass(frozen=True)
class Invitation:
    """Where a door is, and the secret of those who may come in. The port of a unix socket is 0.

    >>> Invitation("10.0.0.2", 40000, b"secret")
    Invitation(address='10.0.0.2', port=40000)
    """

    address: str
    port: int
    secret: bytes = field(repr=False)

    def line(self) -> str:
        """The invitation as a line of text.

        >>> Invitation("10.0.0.2", 40000, b"ab").line()
        '10.0.0.2 40000 6162'
        """
        return f"{self.address} {self.port} {self.secret.hex()}"

    @staticmethod
    def of_line(line: str) -> "Invitation":
        """The invitation that `line` has given."""
        address, port, secret = line.rsplit(" ", 2)
        return Invitation(address, int(port), bytes.fromhex(secret))


@dataclass(eq=False)
class _Standing:
    """Who stands in a door: what it has said so far, and until when the rest must come."""

    end: socket.socket
    challenge: bytes
    since: float
    until: float
    said: bytes = b""
    number: int | None = None  # once it has proved that it knows the secret


class Door:
    """A door at an address of this host, for these ``guests``: their numbers. With None any number may come, again and again.

    ``take`` is called with the number of each that comes and its connection, on another thread. The door is open until all have
    come, or for ``within`` seconds, or until it is closed. ``port`` and ``secret`` are chosen where they are not given.
    ``refused`` is called with the connection of a guest that knows the secret and runs other versions, and with the reason.

    >>> import queue
    >>> taken = queue.SimpleQueue()
    >>> door = Door("127.0.0.1", [7], lambda guest, end: taken.put((guest, end)), 5.0)
    >>> there = come_in(door.invitation, 7, 5.0)
    >>> guest, here = taken.get()
    >>> here.sendall(b"hello"), there.recv(5), guest
    (None, b'hello', 7)
    >>> here.close(), there.close()
    (None, None)
    """

    def __init__(
        self,
        address: str,
        guests: Collection[int] | None,
        take: Take,
        within: float,
        port: int = 0,
        secret: bytes | None = None,
        refused: Callable[[socket.socket, str], object] = lambda end, why: None,
    ) -> None:
        self._waiting = None if guests is None else set(guests)
        self._take, self._refused, self._end_time = take, refused, time.monotonic() + within
        self._standing: dict[int, _Standing] = {}  # by their descriptors, the first comer first
        with ExitStack() as opened:
            if address == THIS_HOST:
                self._socket, place = _listen_here(opened)
            else:
                self._socket = opened.enter_context(socket_for(address))
                if port:  # which the last cluster may have had a moment ago
                    self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self._socket.bind((address, port))
                place = address, self._socket.getsockname()[1]
            self._socket.listen(_BACKLOG)
            self._socket.setblocking(False)
            self._closing = PollableEvent()
            opened.callback(self._closing.close)
            self.invitation = Invitation(*place, os.urandom(_WORD) if secret is None else secret)
            self._thread = threading.Thread(target=self._let_in, name="pippy door", daemon=True)
            self._opened = opened.pop_all()
            try:
                self._thread.start()
            except BaseException:
                self._opened.close()
                raise

    def close(self) -> None:
        """Let nobody in any more."""
        self._closing.set()
        self._thread.join()

    def _let_in(self) -> None:
        """Let the guests in, and nobody else."""
        with self._opened:
            while self._is_open() and self._serve():
                pass
            for each in [each for each in self._standing.values() if each.number is not None]:
                self._hear(each)  # who has taken the connection already takes itself to be let in
            for each in list(self._standing.values()):
                self._send_away(each)

    def _is_open(self) -> bool:
        expects = self._waiting is None or bool(self._waiting)
        late = any(each.number is not None for each in self._standing.values())
        return expects and (late or time.monotonic() < self._end_time)

    def _serve(self) -> bool:
        """Wait for what comes next, and take it in. Returns False if the door is to be closed."""
        now, coming = time.monotonic(), select.poll()
        for fd in (self._closing.fileno(), *self._standing):
            coming.register(fd, select.POLLIN)
        limits = [each.until for each in self._standing.values()]
        if now < self._end_time:
            without = self._without_proof()
            if (room := without[0].since + _STAYS if len(without) >= _STANDING else now) <= now:
                coming.register(self._socket, select.POLLIN)
            else:
                limits.append(room)
            limits.append(self._end_time)
        left = min(limits, default=now) - now
        for fd, _ in coming.poll(None if left == math.inf else max(0.0, left) * 1000):
            if fd == self._closing.fileno():
                return False
            if fd in self._standing:
                self._hear(self._standing[fd])
            elif fd == self._socket.fileno():
                self._open_to_next()
        for each in [each for each in self._standing.values() if each.until <= time.monotonic()]:
            self._send_away(each)
        return True

    def _open_to_next(self) -> None:
        """Say the challenge to who comes."""
        without, now = self._without_proof(), time.monotonic()
        try:
            end = self._socket.accept()[0]
        except (BlockingIOError, ConnectionError):  # who has come is gone again
            return
        except OSError:  # no descriptor is free
            if without:
                self._send_away(without[0])
            else:
                time.sleep(_NO_DESCRIPTOR)
            return
        if len(without) >= _STANDING:
            self._send_away(without[0])
        until = min(self._end_time, now + _GREETS)
        guest = self._standing[end.fileno()] = _Standing(end, os.urandom(_WORD), now, until)
        try:
            _check_same_user(end)
            end.setblocking(False)
            end.sendall(guest.challenge)
        except OSError:
            self._send_away(guest)

    def _without_proof(self) -> list[_Standing]:
        return [each for each in self._standing.values() if each.number is None]

    def _send_away(self, guest: _Standing) -> None:
        self._standing.pop(guest.end.fileno(), None)
        guest.end.close()

    def _hear(self, guest: _Standing) -> None:
        """Take in what a guest says; once it has said all, let it in."""
        wanted = _GREETING.size + (0 if guest.number is None else len(_TAKEN))
        try:
            try:
                more = guest.end.recv(wanted - len(guest.said))
            except BlockingIOError:
                return
            if not more:
                raise ConnectionError("it has closed the connection")
            guest.said += more
            if len(guest.said) == wanted:
                if guest.number is None:
                    self._welcome(guest)
                else:
                    self._admit(guest)
        except OSError:
            self._send_away(guest)

    def _welcome(self, guest: _Standing) -> None:
        """Greet who has greeted. Raises OSError unless it is a guest."""
        number, theirs, random = _checked(self.invitation.secret, b"guest", guest.said, guest.challenge)
        self._check_invited(number)
        guest.end.sendall(_greeting(self.invitation.secret, b"host", guest.challenge, random, number))
        try:
            _check_versions(theirs)
        except ConnectionError as error:
            self._refused(guest.end, str(error))
            raise
        guest.number = number
        guest.until = min(self._end_time, time.monotonic() + _LATEST) + _GREETS

    def _admit(self, guest: _Standing) -> None:
        """Let in who has taken the connection."""
        number = guest.number
        assert number is not None
        self._check_invited(number)
        if guest.said[-len(_TAKEN) :] != _TAKEN:
            raise ConnectionError("it does not take the connection")
        del self._standing[guest.end.fileno()]
        guest.end.settimeout(None)
        if self._waiting is not None:
            self._waiting.remove(number)
            if not self._waiting:
                self._opened.close()
        self._take(number, guest.end)

    def _check_invited(self, number: int) -> None:
        if self._waiting is not None and number not in self._waiting:
            raise ConnectionError("it was not invited")


def come_in(invitation: Invitation, guest: int, within: float) -> socket.socket:
    """Go to a door, as this guest. Returns the connection. Raises OSError if that cannot be had in so many seconds."""
    end, until = socket_for(invitation.address), time.monotonic() + within
    try:
        end.settimeout(within)
        place = invitation.address, invitation.port
        end.connect(place[0] if end.family == socket.AF_UNIX else place)
        _check_same_user(end)
        challenge = _read(end, _WORD, until)
        try:
            end.sendall(
                greeting := _greeting(invitation.secret, b"guest", random := os.urandom(_WORD), challenge, guest)
            )
            said = _read(end, len(greeting), until)
        except ConnectionError as error:
            raise GuestRefused(str(error)) from error
        number, theirs, again = _checked(invitation.secret, b"host", said, random)
        if (number, again) != (guest, challenge):
            raise GuestRefused(_ANOTHER)
        _check_versions(theirs)
        end.sendall(_TAKEN)
        end.settimeout(None)
        return end
    except BaseException as error:
        end.close()
        if isinstance(error, TimeoutError):
            raise TimeoutError(f"no answer within {within:g} s") from error
        raise


def socket_for(address: str) -> socket.socket:
    """A socket that can connect to this address, or be bound to it.

    >>> with socket_for("::1") as end:
    ...     end.family.name
    'AF_INET6'
    """
    unix = address == THIS_HOST or address.startswith("/")
    family = socket.AF_UNIX if unix else socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.socket(family, socket.SOCK_STREAM)


def joined_address(host: str, port: int) -> str:
    """A host and a port as the text HOST:PORT.

    >>> joined_address("fd00::1", 29400)
    '[fd00::1]:29400'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen_here(opened: ExitStack) -> tuple[socket.socket, tuple[str, int]]:
    """A unix socket, and where processes of this user can connect to it: among the open files of this process.

    A socket gets a name when it begins to listen, which is removed at once: whenever this process is killed, none is left.
    """
    listening = opened.enter_context(socket_for(THIS_HOST))
    directory = tempfile.mkdtemp(prefix="pippy-")
    try:
        folder = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, folder)
        name = f"/proc/self/fd/{folder}/door"  # the directory's own name may be longer than a unix socket's can
        listening.bind(name)
        found = os.open(name, os.O_PATH | os.O_CLOEXEC)
        opened.callback(os.close, found)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return listening, (f"/proc/{os.getpid()}/fd/{found}", 0)


def _check_same_user(end: socket.socket) -> None:
    """Raise if the other end of a unix socket is of a process of another user."""
    if end.family != socket.AF_UNIX:
        return
    _, user, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        raise PermissionError(f"it belongs to user {user}, and this process to user {os.geteuid()}")


def _greeting(secret: bytes, who: bytes, own: bytes, others: bytes, guest: int) -> bytes:
    """What ``who`` says that has the random bytes ``own``, to one with ``others``."""
    text = _versions().encode()
    return _GREETING.pack(_proof(secret, who, own, others, guest, text.ljust(_TEXT, b"\0")), own, guest, text)


def _proof(secret: bytes, who: bytes, own: bytes, others: bytes, guest: int, text: bytes) -> bytes:
    said = struct.pack(f"<8s{_WORD}s{_WORD}si{_TEXT}s", who, own, others, guest, text)
    return hmac.digest(secret, said, "sha256")


def _versions() -> str:
    return ", ".join(f"{name} {version}" for name, version in versions().items())[:_TEXT]


def _checked(secret: bytes, who: bytes, said: bytes, own: bytes) -> tuple[int, str, bytes]:
    """The guest's number in a greeting, the versions of who said it, and its random bytes. Raises without the right proof."""
    proof, others, guest, text = _GREETING.unpack(said)
    if not hmac.compare_digest(proof, _proof(secret, who, others, own, guest, text)):
        raise GuestRefused(_ANOTHER)
    return guest, text.rstrip(b"\0").decode(errors="replace"), others


def _check_versions(theirs: str) -> None:
    if theirs != (own := _versions()):
        raise GuestRefused(f"it runs {theirs}, and this process {own}; install the same versions on each host")


def _read(end: socket.socket, size: int, until: float) -> bytes:
    """So many bytes. Raises OSError if they have not come in time."""
    data = b""
    while len(data) < size:
        end.settimeout(max(0.001, until - time.monotonic()))
        more = end.recv(size - len(data))
        if not more:
            raise ConnectionError("it has closed the connection")
        data += more
    return data
