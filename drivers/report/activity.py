"""Where the time of a worker went in a step. Every moment of the step has one cause:

    STARTING │ FILL │ TRANSFER │ COMPUTING │ SENDING │ WAITING │ TRANSFER │ COMPUTING │ PYTHON │ ADDING │ DRAIN
             ▲      ▲                                          ▲                               ▲        ▲
    first instruction                             the sender begins to send       gradients of copies   the worker is done

A receive counts as WAITING until the other worker begins to send the value, and as TRANSFER from then until the value is here.
Before the worker's first computation, FILL takes the place of WAITING.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pippy.drivers.plan.language.instructions import Add, Compute, Instruction, Receive, Send
from pippy.drivers.protocol.steps import WorkerRecord

SendTimes = Mapping[tuple[str, int, int], float]  # when a value of a micro-batch began to be sent to a worker


class Cause(StrEnum):
    """What a worker does, or why it does nothing.

    >>> Cause.WAITING
    <Cause.WAITING: 'waiting'>
    """

    COMPUTING = "computing"
    STARTING = "starting"
    FILL = "fill"
    WAITING = "waiting"
    TRANSFER = "transfer"
    SENDING = "sending"
    ADDING = "adding up"
    PYTHON = "Python"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class Activity:
    """A part of a worker's time. ``peer`` is the worker that it waits for or sends to, ``at`` the number of the instruction.

    >>> Activity(Cause.WAITING, 1.0, 1.5, peer=2).label
    'waiting for worker 2'
    """

    cause: Cause
    start: float
    end: float
    peer: int | None = None
    at: int | None = None

    @property
    def duration(self) -> float:
        return self.end - self.start

    @property
    def label(self) -> str:
        """The cause, with the number of the other worker."""
        return label(self.cause, self.peer)


def label(cause: Cause, peer: int | None) -> str:
    """A cause, with the number of the other worker if there is one."""
    words = {Cause.WAITING: " for worker", Cause.TRANSFER: " from worker", Cause.SENDING: " to worker"}
    return f"{cause}{words[cause]} {peer}" if peer is not None and cause in words else str(cause)


def activities(
    order: Sequence[Instruction], record: WorkerRecord, send_times: SendTimes, worker: int, end: float
) -> tuple[Activity, ...]:
    """All that a worker did from 0 to ``end``, without a gap. The times of ``record`` must begin at 0, too."""
    done: list[Activity] = []
    computed = False

    def until(time: float, cause: Cause, peer: int | None = None, at: int | None = None) -> None:
        now = done[-1].end if done else 0.0
        if time > now:
            done.append(Activity(cause, now, time, peer, at))

    until(record.started, Cause.STARTING)
    for at, (start, stop) in sorted(enumerate(record.spans()), key=lambda each: each[1]):
        instruction = order[at]
        match instruction:
            case Compute():
                computed = True
                until(stop, Cause.COMPUTING, at=at)
            case Receive(value, microbatch, source):
                sent = min(stop, send_times.get((value, microbatch, worker), start))
                if computed:
                    until(sent, Cause.WAITING, source, at)
                else:
                    until(sent, Cause.FILL, at=at)
                until(stop, Cause.TRANSFER, source, at)
            case Send(_, _, to):
                until(stop, Cause.SENDING, to, at)
            case _:
                adding = isinstance(instruction, Add) or (instruction.kind.exchange and record.adding is not None)
                until(stop, Cause.ADDING if adding else Cause.PYTHON, at=at)
    if record.adding is not None:
        until(record.adding, Cause.PYTHON)
        until(record.ended, Cause.ADDING)
    until(record.ended, Cause.PYTHON)
    until(end, Cause.DRAIN)
    return tuple(done)


def spent(worker: Sequence[Activity]) -> dict[tuple[Cause, int | None], float]:
    """How long a worker spent on each cause, in the order of the causes.

    >>> spent([Activity(Cause.SENDING, 0.0, 1.0, 3), Activity(Cause.COMPUTING, 1.0, 3.0)])
    {(<Cause.COMPUTING: 'computing'>, None): 2.0, (<Cause.SENDING: 'sending'>, 3): 1.0}
    """
    total: dict[tuple[Cause, int | None], float] = {}
    for each in worker:
        key = each.cause, each.peer
        total[key] = total.get(key, 0.0) + each.duration
    causes = list(Cause)
    return dict(sorted(total.items(), key=lambda item: (causes.index(item[0][0]), item[0][1] or 0)))
