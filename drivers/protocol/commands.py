"""What goes around every command and every answer."""

from dataclasses import dataclass
from typing import Any

from pippy.drivers.protocol.log_records import WorkerLogRecord
from pippy.ir.base.surroundings import Surroundings

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
    """What went wrong on a worker. ``peer`` is another worker that seems to be dead, if that is the reason."""

    message: str
    traceback: str
    where: str = ""
    instruction: str = ""
    stage: int | None = None
    microbatch: int | None = None
    peer: int | None = None


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
