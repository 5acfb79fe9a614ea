"""What goes around every command and every answer, the messages that are urgent, and those that need connections."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pippy.drivers.plan.language.instructions import Instruction
from pippy.drivers.wire.messages.doors import Invitation
from pippy.ir.base.surroundings import Surroundings

# What workers have logged, on its way to the controller.


@dataclass(frozen=True)
class WorkerLogRecord:
    """A record of a worker's logger. The message is whole: with its arguments, and with the traceback if it has one.

    >>> WorkerLogRecord("pippy.drivers", 20, "a message", 0.0, "/a/file.py", 7, "function").level
    20
    """

    logger: str
    level: int
    message: str
    created: float
    path: str
    line: int
    function: str


ZeroGrad = bool | tuple[int, ...]


@dataclass(frozen=True)
class Command:
    """What a worker does for one driver. Commands up to ``settled`` have succeeded on all workers.

    With ``zero_grad`` the worker drops the driver's gradients first: all, or those of the parameters that the optimizers with
    these numbers have. ``dropped`` lists drivers that are gone: the worker forgets them.
    """

    number: int
    settled: int
    driver: int
    body: Any
    zero_grad: ZeroGrad = False
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True)
class CommandElsewhere(Command):
    """A command with new `Surroundings`: those of the user's call have changed since the workers were told of them."""

    surroundings: Surroundings | None = None


@dataclass(frozen=True)
class Failure:
    """What went wrong on a worker. ``peer`` is another worker that seems to be dead, if that is the reason. ``guard`` is the
    text of a `GuardError`: forward would go on in another way than when it was traced."""

    message: str
    traceback: str
    where: str = ""
    instruction: str = ""
    stage: int | None = None
    microbatch: int | None = None
    peer: int | None = None
    guard: str = ""


@dataclass(frozen=True)
class Answer:
    """The answer to a command: a value, or what went wrong."""

    value: Any = None
    failure: Failure | None = None


@dataclass(frozen=True)
class News:
    """What a worker tells beside what it was asked: while it compiles, how many pieces are done and how many there are; and
    what it has logged."""

    compiling: tuple[int, int] | None = None
    records: tuple[WorkerLogRecord, ...] = ()


@dataclass(frozen=True)
class AnswerTelling(Answer):
    """The answer of a worker that has something to tell."""

    told: News | None = None


# Urgent messages: a worker answers them at once, while it runs commands.


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
    """Urgent: worker ``one``, which gets this, is to let the ``other`` in. With ``near`` the two can share memory.

    The answer is an Invitation for the other.
    """

    one: int
    other: int
    near: bool = True


@dataclass(frozen=True)
class ComeIn:
    """Urgent: go to the door that another worker has opened."""

    host: int
    invitation: Invitation


# Messages after which workers need connections with each other.


class NeedsPeers(ABC):
    """A message after which a worker passes values to other workers, or takes theirs."""

    @abstractmethod
    def peers(self, worker: int) -> set[int]:
        """The other workers, if the message goes to this one."""


def others_in(order: Iterable[Instruction]) -> set[int]:
    """The workers that instructions send to, or receive from."""
    return {other(each) for each in order if (other := each.kind.sends_to or each.kind.receives_from)}
