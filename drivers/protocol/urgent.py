"""Urgent messages: a worker answers them at once, while it runs commands."""

from dataclasses import dataclass

from pippy.drivers.wire.messages.doors import Invitation


@dataclass(frozen=True)
class GiveUp:
    """Urgent: give up the commands from ``first`` to ``last``, as far as they are not done."""

    first: int
    last: int


GIVE_UP_ALL = GiveUp(first=0, last=1 << 62)


@dataclass(frozen=True)
class Dump:
    """Urgent: say what the worker is doing, or waiting for."""


@dataclass(frozen=True)
class AskWays:
    """Urgent: say to which workers values stay on devices, and why not to others."""


@dataclass(frozen=True)
class Ping:
    """Urgent: answer, to show that the worker lives. The answer is a `News` if the worker has something to tell."""


@dataclass(frozen=True)
class Connect:
    """Urgent: give two workers a connection with each other. Both are of this worker's host, or one is this worker.

    If the answer is an Invitation, the other worker is to come in. With ``near`` the two can share memory.
    """

    one: int
    other: int
    near: bool = True


@dataclass(frozen=True)
class ComeIn:
    """Urgent: go to the door that another worker has opened."""

    host: int
    invitation: Invitation


@dataclass(frozen=True)
class Invite:
    """Urgent, from worker ``guest`` of another host: open a door for it. The answer is an Invitation, or None."""

    guest: int
