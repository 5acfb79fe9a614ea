"""Doors: the one way in which processes that do not know each other get a connection, of one host or of two.

A door is open for a moment, for guests that have its invitation: where it is, and two words of 32 random bytes.

    the guest   connects, and says the first word, its number, and which versions it runs
    the host    says the second word, that number, and which versions it runs
    the guest   says that it takes the connection
    the host    takes it, too; behind the last guest it closes the door

So all doors refuse alike. Who does not know the first word is told nothing, and nothing that it says is read beyond 32 bytes.
Who answers and does not know the second is another program. Processes with other versions do not work together. A guest that
has given up leaves the host without a connection, too. What goes through a connection afterwards is not the door's matter.

Of one host: a door is a unix socket without a name, which this user's processes find among the open files of the process that
opened it. Both ends also ask the system whether the other belongs to this user. Of two hosts: it is a port of TCP.

An invitation is as secret as what carries it: RPC, for connections that carry values; torchrun's store for the other doors,
behind which nothing is taken from another host, or from another user.
"""

import hmac
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
_GREETING = struct.Struct(f"<{_WORD}si{_TEXT}s")  # a word, the guest's number, versions
_GREETS = 1.0  # seconds that a guest has for its greeting: nobody else comes in meanwhile
_CREDENTIALS = struct.Struct("3i")

Take = Callable[[int, socket.socket], object]


@dataclass(frozen=True)
class Invitation:
    """Where a door is, and what the two ends say there. The port of a unix socket is 0.

    >>> Invitation("10.0.0.2", 40000, b"first", b"second")
    Invitation(address='10.0.0.2', port=40000)
    """

    address: str
    port: int
    first: bytes = field(repr=False)
    second: bytes = field(repr=False)

    def line(self) -> str:
        """The invitation as a line of text.

        >>> Invitation("10.0.0.2", 40000, b"a", b"b").line()
        '10.0.0.2 40000 61 62'
        """
        return f"{self.address} {self.port} {self.first.hex()} {self.second.hex()}"

    @staticmethod
    def of_line(line: str) -> "Invitation":
        """The invitation that `line` has given."""
        address, port, *words = line.rsplit(" ", 3)
        return Invitation(address, int(port), *map(bytes.fromhex, words))


class Door:
    """A door at an address of this host, for these ``guests``: their numbers.

    ``take`` is called with the number of each that comes and its connection, on another thread. The door is open until all have
    come, or for ``within`` seconds, or until it is closed.

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

    def __init__(self, address: str, guests: Collection[int], take: Take, within: float) -> None:
        self._waiting, self._take, self._end_time = set(guests), take, time.monotonic() + within
        with ExitStack() as opened:
            if address == THIS_HOST:
                self._socket, place = _listen_here(opened)
            else:
                self._socket = opened.enter_context(socket_for(address))
                self._socket.bind((address, 0))
                place = address, self._socket.getsockname()[1]
            self._socket.listen(len(self._waiting))
            self._socket.setblocking(False)
            self._closing = PollableEvent()
            opened.callback(self._closing.close)
            self.invitation = Invitation(*place, os.urandom(_WORD), os.urandom(_WORD))
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
        """Wait for the guests, and let nobody else in."""
        with self._opened:
            while self._waiting and (end := self._next()) is not None:
                try:
                    guest = self._welcome(end)
                except OSError:
                    end.close()
                    continue
                self._waiting.remove(guest)
                if not self._waiting:
                    self._opened.close()
                self._take(guest, end)

    def _next(self) -> socket.socket | None:
        """The connection of who comes next; None if the door is to be closed."""
        coming = select.poll()
        for each in (self._socket, self._closing):
            coming.register(each, select.POLLIN)
        while (left := self._end_time - time.monotonic()) > 0:
            ready = [fd for fd, _ in coming.poll(left * 1000)]
            if self._closing.fileno() in ready:
                return None
            try:
                return self._socket.accept()[0]
            except (BlockingIOError, ConnectionError):  # who has come is gone again
                continue
            except OSError:  # no descriptor is free
                return None
        return None

    def _welcome(self, end: socket.socket) -> int:
        """The number of who has come. Raises OSError unless it is a guest."""
        until = min(self._end_time, time.monotonic() + _GREETS)
        _check_same_user(end)
        _hear_word(end, self.invitation.first, until)
        guest, theirs = _hear_rest(end, until)
        if guest not in self._waiting:
            raise ConnectionError("it was not invited")
        end.sendall(_greeting(self.invitation.second, guest))
        _check_versions(theirs)
        if _read(end, len(_TAKEN), self._end_time + _GREETS) != _TAKEN:
            raise ConnectionError("it does not take the connection")
        end.settimeout(None)
        return guest


def come_in(invitation: Invitation, guest: int, within: float) -> socket.socket:
    """Go to a door, as this guest. Returns the connection. Raises OSError if that cannot be had in so many seconds."""
    end, until = socket_for(invitation.address), time.monotonic() + within
    try:
        end.settimeout(within)
        place = invitation.address, invitation.port
        end.connect(place[0] if end.family == socket.AF_UNIX else place)
        _check_same_user(end)
        end.sendall(_greeting(invitation.first, guest))
        _hear_word(end, invitation.second, until)
        _check_versions(_hear_rest(end, until)[1])
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


def _greeting(word: bytes, guest: int) -> bytes:
    return _GREETING.pack(word, guest, _versions().encode())


def _versions() -> str:
    return ", ".join(f"{name} {version}" for name, version in versions().items())[:_TEXT]


def _hear_word(end: socket.socket, word: bytes, until: float) -> None:
    if not hmac.compare_digest(_read(end, _WORD, until), word):
        raise ConnectionError("another program answers at the place that was opened for this connection")


def _hear_rest(end: socket.socket, until: float) -> tuple[int, str]:
    """The guest's number, and the versions of the other end."""
    _, guest, theirs = _GREETING.unpack(bytes(_WORD) + _read(end, _GREETING.size - _WORD, until))
    return guest, theirs.rstrip(b"\0").decode(errors="replace")


def _check_versions(theirs: str) -> None:
    if theirs != (own := _versions()):
        raise ConnectionError(f"it runs {theirs}, and this process {own}; install the same versions on each host")


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
