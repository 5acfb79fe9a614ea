"""Recordings: what each worker did when, in real steps, on one clock.

The workers note the times of their instructions and send them along with the step's answer. All else is worked out when it
is asked for, in the controller.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pippy.drivers.control.messages import StepResult, WorkerRecord
from pippy.drivers.errors import DriverError
from pippy.drivers.recording.activity import Activity, Sending, activities, label, spent
from pippy.drivers.recording.clocks import clock_offsets
from pippy.drivers.recording.drawing import svg
from pippy.drivers.recording.findings import findings
from pippy.drivers.recording.page import page
from pippy.drivers.recording.prediction import Medians, median_seconds, predicted
from pippy.drivers.recording.trace import trace
from pippy.drivers.schedules.programs.instructions import Compute, Receive, Send
from pippy.drivers.schedules.programs.program import Program
from pippy.drivers.schedules.simulation.simulate import Simulation
from pippy.drivers.schedules.simulation.timeline import Span, Timeline
from pippy.drivers.workers.recorder import clock


@dataclass(frozen=True)
class Traffic:
    """What one value of the program moved from worker to worker in a step, over all micro-batches.

    >>> moved = Traffic("relu", source=0, to=1, times=4, bytes=8192)
    >>> moved.bytes // moved.times
    2048
    """

    value: str
    source: int
    to: int
    times: int
    bytes: int


@dataclass(frozen=True)
class RecordedStep:
    """A step as it ran. Its times are seconds from when the first worker began with it.

    ``workers`` are the names of the program's workers, ``noted`` is what each noted by its own clock, and the controller sent
    the step off at ``posted`` and had all answers at ``answered``, by its clock.
    """

    program: Program
    workers: tuple[str, ...]
    noted: tuple[WorkerRecord, ...]
    posted: float
    answered: float

    @cached_property
    def records(self) -> tuple[WorkerRecord, ...]:
        """What each worker noted, in seconds from when the first began."""
        return tuple(each.shifted(-offset - self.begin) for each, offset in zip(self.noted, self._clocks[0]))

    @cached_property
    def begin(self) -> float:
        """When the first worker began, by the clock of worker 0."""
        return min(each.began - offset for each, offset in zip(self.noted, self._clocks[0]))

    @property
    def clock_errors(self) -> tuple[float, ...]:
        """By how many seconds each worker's times may be wrong beside those of worker 0: by none on its host."""
        return tuple(self._clocks[1][: len(self.noted)])

    @cached_property
    def _clocks(self) -> tuple[list[float], list[float]]:
        controller = len(self.noted)
        ahead: dict[tuple[int, int], float] = {}
        for worker, each in enumerate(self.noted):
            ahead[controller, worker] = each.began - self.posted
            ahead[worker, controller] = self.answered - each.ended
        sent = _sending(self.program, self.noted)
        for worker, (order, each) in enumerate(zip(self.program.orders, self.noted)):
            for at, instruction in enumerate(order):
                if isinstance(instruction, Receive):
                    begun = sent[instruction.value, instruction.microbatch, worker]
                    pair = instruction.source, worker
                    ahead[pair] = min(ahead.get(pair, float("inf")), each.ends[at] - begun)
        return clock_offsets([*(each.clock for each in self.noted), clock()], ahead)

    @cached_property
    def makespan(self) -> float:
        """How long the step took, from when the first worker began with it until the last had done its part."""
        return max(each.ended for each in self.records)

    @cached_property
    def timeline(self) -> Timeline:
        """When each worker computed what: it is drawn as a simulated timeline is."""
        return Timeline(
            tuple(
                tuple(
                    Span(instruction, start, end)
                    for (start, end), instruction in sorted(zip(record.spans(), order), key=lambda each: each[0])
                    if isinstance(instruction, Compute)
                )
                for order, record in zip(self.program.orders, self.records)
            )
        )

    @cached_property
    def activities(self) -> tuple[tuple[Activity, ...], ...]:
        """All that each worker did, or waited for, without a gap from 0 to the makespan."""
        sending = _sending(self.program, self.records)
        return tuple(
            activities(order, record, sending, worker, self.makespan)
            for worker, (order, record) in enumerate(zip(self.program.orders, self.records))
        )

    @cached_property
    def medians(self) -> Medians:
        """How long each kind of pass of each stage took: the median."""
        return median_seconds(self.program, self.durations())

    @cached_property
    def predicted(self) -> Simulation:
        """The same program simulated, with the measured medians as costs, and nothing else that takes time."""
        return predicted(self.program, self.medians)

    def durations(self) -> dict[str, list[float]]:
        """How long each pass of each stage took, over the micro-batches, by its name: "F0", "B3"."""
        found: dict[str, list[float]] = {}
        for spans in self.timeline.spans:
            for span in spans:
                found.setdefault(f"{span.compute.op}{span.compute.stage}", []).append(float(span.duration))
        return found

    def spent(self) -> list[dict[str, float]]:
        """How many seconds of the step each worker spent with what: computing, or idle, by cause. They add up to the step."""
        return [
            {label(cause, peer): seconds for (cause, peer), seconds in spent(each).items()} for each in self.activities
        ]

    def traffic(self) -> list[Traffic]:
        """The bytes that each value moved between workers; the largest first."""
        found: dict[tuple[str, int, int], list[int]] = {}
        for worker, (order, record) in enumerate(zip(self.program.orders, self.noted)):
            for at, size in record.sizes.items():
                send = order[at]
                assert isinstance(send, Send)
                found.setdefault((send.value, worker, send.to), []).append(size)
        moved = [Traffic(*edge, len(sizes), sum(sizes)) for edge, sizes in found.items()]
        return sorted(moved, key=lambda each: -each.bytes)

    def stages_of(self, worker: int) -> list[int]:
        """The stages that a worker holds."""
        return [stage for stage, its in enumerate(self.program.placement.worker_of) if its == worker]

    def named(self, worker: int) -> str:
        """A worker, as people read it: its number, and the name that the user gave it."""
        name = self.workers[worker]
        return f"worker {worker}" if name == f"worker{worker}" else f"{name} (worker {worker})"

    def findings(self) -> list[str]:
        """What the step says, in sentences: the slowest stage, where the time went, and what helps."""
        return findings(self)

    def trace(self) -> str:
        """Trace events, as JSON: https://ui.perfetto.dev and chrome://tracing open them."""
        return trace([self])

    def save_trace(self, path: str | Path) -> None:
        """Write the trace events to a file."""
        Path(path).write_text(self.trace(), encoding="utf-8")

    def svg(self) -> str:
        """The timeline as a picture, the predicted one below the measured one."""
        return svg(self)

    def save_svg(self, path: str | Path) -> None:
        """Write the picture to a file."""
        Path(path).write_text(self.svg(), encoding="utf-8")


@dataclass
class Recording:
    """The steps that were recorded, the latest last. No more than ``limit`` are kept; ``dropped`` says how many were not.

    >>> Recording(limit=0)
    Traceback (most recent call last):
    pippy.drivers.errors.DriverError: limit=0: give how many of the latest steps are to be kept, 1 or more
    """

    limit: int = 100
    steps: list[RecordedStep] = field(default_factory=list)
    dropped: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.limit, int) or isinstance(self.limit, bool) or self.limit < 1:
            raise DriverError(f"limit={self.limit!r}: give how many of the latest steps are to be kept, 1 or more")

    def report(self, path: str | Path, *, title: str = "A recorded step", step: int | None = None) -> None:
        """Write a page that opens from disk, with no network: the timeline of a step, and all that is known of it.

        ``step`` says which of the kept steps; left out, the one of middle length among those of the last one's program.
        """
        if not self.steps:
            raise DriverError(
                "nothing was recorded; run steps inside `with driver.record() as recording:`, then report"
            )
        if step is not None and not -len(self.steps) <= step < len(self.steps):
            raise DriverError(
                f"step={step}: {len(self.steps)} steps were kept; give 0 to {len(self.steps) - 1}, or none"
            )
        alike = [each for each in self.steps if each.program == self.steps[-1].program]
        middle = sorted(alike, key=lambda each: each.makespan)[(len(alike) - 1) // 2]
        chosen = middle if step is None else self.steps[step]
        Path(path).write_text(page(self, chosen, title), encoding="utf-8")

    def save_trace(self, path: str | Path) -> None:
        """Write the trace events of all kept steps to one file."""
        if not self.steps:
            raise DriverError("nothing was recorded; run steps inside `with driver.record() as recording:`, then save")
        Path(path).write_text(trace(self.steps), encoding="utf-8")

    def begin(
        self, program: Program, ranks: Sequence[int], names: Sequence[str]
    ) -> Callable[[Mapping[int, StepResult]], None]:
        """A step is sent off now; what this gives takes the answers, by rank, when they are there."""
        posted = time.monotonic()

        def note(results: Mapping[int, StepResult]) -> None:
            noted = [results[rank].record for rank in ranks]
            kept = tuple(each for each in noted if each is not None)
            self.steps.append(RecordedStep(program, tuple(names), kept, posted, time.monotonic()))
            self.dropped += len(self.steps[: -self.limit])
            del self.steps[: -self.limit]

        return note


def _sending(program: Program, records: Sequence[WorkerRecord]) -> Sending:
    return {
        (instruction.value, instruction.microbatch, instruction.to): start
        for order, record in zip(program.orders, records)
        for instruction, (start, _) in zip(order, record.spans())
        if isinstance(instruction, Send)
    }
