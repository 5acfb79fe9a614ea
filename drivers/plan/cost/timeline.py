"""What ran when: made by a simulation or recorded from a real run, and drawn the same way."""

from collections.abc import Sequence
from dataclasses import dataclass

from pippy.drivers.plan.cost.costs import Number
from pippy.drivers.plan.language.drawn import Drawn
from pippy.drivers.plan.language.errors import ArgumentError
from pippy.drivers.plan.language.instructions import Compute


@dataclass(frozen=True, slots=True)
class Span:
    """One computation of a worker, from start to end.

    >>> from pippy.drivers.plan.orders.schedule import F
    >>> Span(Compute(F, 0, 0), 1.0, 2.5).duration
    1.5
    """

    compute: Compute
    start: Number
    end: Number

    @property
    def duration(self) -> Number:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline(Drawn):
    """Each worker's spans, in order of time.

    >>> from pippy.drivers.plan.orders.schedule import F
    >>> Timeline([[Span(Compute(F, 0, 0), 1.0, 2.5)]]).makespan
    2.5
    """

    spans: Sequence[Sequence[Span]]

    def __repr__(self) -> str:
        """
        >>> Timeline([[], []])
        <Timeline: 2 workers, 0 passes, makespan 0>
        """
        workers = "1 worker" if len(self.spans) == 1 else f"{len(self.spans)} workers"
        return f"<Timeline: {workers}, {sum(map(len, self.spans))} passes, makespan {float(self.makespan):g}>"

    def __post_init__(self) -> None:
        for worker, spans in enumerate(self.spans):
            clock: Number = 0
            for span in spans:
                if span.start < clock or span.end < span.start:
                    raise ArgumentError(
                        f"worker {worker} runs {span.compute} from {span.start} to {span.end}, when it is {clock}; "
                        "give each worker's spans in order of time, from 0, without overlap"
                    )
                clock = span.end

    @property
    def makespan(self) -> Number:
        return max((spans[-1].end for spans in self.spans if spans), default=0)
