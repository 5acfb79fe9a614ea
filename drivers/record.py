"""Recording steps: when each worker computed what, on one clock.

The clock is the host's monotonic one, so that the times of workers on one host agree.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pippy.drivers.messages import StepResult
from pippy.drivers.schedules.instructions import Compute
from pippy.drivers.schedules.program import Program
from pippy.drivers.schedules.timeline import Span, Timeline


@dataclass(frozen=True)
class RecordedStep:
    """A step as it ran: its program, and the times, in seconds from its first computation."""

    program: Program
    timeline: Timeline

    def durations(self) -> dict[str, list[float]]:
        """How long each pass of each stage took, over the micro-batches, by its name: "F0", "B3"."""
        found: dict[str, list[float]] = {}
        for spans in self.timeline.spans:
            for span in spans:
                found.setdefault(f"{span.compute.op}{span.compute.stage}", []).append(float(span.duration))
        return found


@dataclass
class Recording:
    """The steps that were recorded, the latest last; no more than ``limit`` are kept."""

    limit: int = 100
    steps: list[RecordedStep] = field(default_factory=list)

    def add(self, program: Program, results: Mapping[int, StepResult]) -> None:
        """Take in what the workers noted of one step; ``results`` go by the program's workers."""
        starts = [result.spans[0][1] for result in results.values() if result.spans]
        if not starts:
            return
        begin = min(starts)
        workers = []
        for worker, order in enumerate(program.orders):
            spans = []
            for at, start, end in results[worker].spans:
                compute = order[at]
                assert isinstance(compute, Compute)
                spans.append(Span(compute, start - begin, end - begin))
            workers.append(tuple(spans))
        self.steps.append(RecordedStep(program, Timeline(tuple(workers))))
        del self.steps[: -self.limit]
