"""The data of a recorded step, and what is computed from it: times on one clock, activities, medians, traffic.

The workers note when each of their instructions ends, and send that with the answer of the step. Everything else is computed
here, in the controller, when it is asked for. What draws or describes a step is a function over this data, in a file of its
own: svg.py, trace.py, findings.py, page.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isinf

from pippy.drivers.plan.cost.simulate import Simulation
from pippy.drivers.plan.cost.timeline import Span, Timeline
from pippy.drivers.plan.language.instructions import Compute, Receive, Send
from pippy.drivers.plan.language.program import Program
from pippy.drivers.protocol.steps import WorkerRecord
from pippy.drivers.report.activity import Activity, SendTimes, activities, label, spent
from pippy.drivers.report.model_names import NAMELESS, ModelNames
from pippy.drivers.report.prediction import Medians, median_seconds, predicted
from pippy.drivers.report.rates import UNKNOWN_SIZE, BatchSize
from pippy.drivers.worker.measure.recorder import clock

Between = tuple[int, int]


@dataclass(frozen=True)
class Traffic:
    """How often one value went from one worker to another in a step, and how many bytes that took.

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
class StepData:
    """A step as it ran. Its times are seconds, from the moment when the first worker began.

    ``workers`` are the names of the program's workers. ``noted`` is what each of them noted, by its own clock. The controller
    sent the step at ``posted`` and had all answers at ``answered``, by its own clock. ``model`` has the names of the user's
    modules, and ``batch`` the size of the mini-batch.
    """

    program: Program
    workers: tuple[str, ...]
    noted: tuple[WorkerRecord, ...]
    posted: float
    answered: float
    model: ModelNames = NAMELESS
    batch: BatchSize = UNKNOWN_SIZE

    @cached_property
    def records(self) -> tuple[WorkerRecord, ...]:
        """What each worker noted, in seconds from when the first began."""
        return tuple(each.shifted(-offset - self.begin) for each, offset in zip(self.noted, self._clocks[0]))

    @cached_property
    def begin(self) -> float:
        """When the first worker began, by the clock of worker 0."""
        return min(each.began - offset for each, offset in zip(self.noted, self._clocks[0]))

    @property
    def held(self) -> list[tuple[Sequence[int], Sequence[int]]]:
        """For each worker the most bytes that it held while each instruction ran, and those after it. The last are those of
        the end of the step. Empty if the step was recorded without ``memory=True``."""
        found = [each.held for each in self.noted]
        return [each for each in found if each is not None] if None not in found else []

    @property
    def held_peaks(self) -> tuple[int, ...]:
        """The most bytes that each worker held."""
        return tuple(max(most) for most, _ in self.held)

    @property
    def clock_errors(self) -> tuple[float, ...]:
        """By how many seconds the times of each worker may be wrong, relative to worker 0. On one host this is 0."""
        return tuple(self._clocks[1][: len(self.noted)])

    @cached_property
    def _clocks(self) -> tuple[list[float], list[float]]:
        controller = len(self.noted)
        ahead: dict[tuple[int, int], float] = {}
        for worker, each in enumerate(self.noted):
            ahead[controller, worker] = each.began - self.posted
            ahead[worker, controller] = self.answered - each.ended
        sent = send_times(self.program, self.noted)
        for worker, (order, each) in enumerate(zip(self.program.orders, self.noted)):
            for at, instruction in enumerate(order):
                if isinstance(instruction, Receive):
                    begun = sent[instruction.value, instruction.microbatch, worker]
                    pair = instruction.source, worker
                    ahead[pair] = min(ahead.get(pair, float("inf")), each.ends[at] - begun)
        return clock_offsets([*(each.clock for each in self.noted), clock()], ahead)

    @cached_property
    def makespan(self) -> float:
        """How long the step took, from when the first worker began until the last worker was done."""
        return max(each.ended for each in self.records)

    @cached_property
    def timeline(self) -> Timeline:
        """When each worker computed what, in the form in which a simulation gives it."""
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

    @property
    def idle(self) -> tuple[float, ...]:
        """The share of the step in which each worker did not compute."""
        computing = (sum(float(each.duration) for each in spans) for spans in self.timeline.spans)
        return tuple(1 - seconds / self.makespan for seconds in computing)

    @cached_property
    def send_times(self) -> SendTimes:
        """When each value began to be sent to each worker."""
        return send_times(self.program, self.records)

    @cached_property
    def activities(self) -> tuple[tuple[Activity, ...], ...]:
        """All that each worker did or waited for, in order, without a gap from 0 to the makespan."""
        return tuple(
            activities(order, record, self.send_times, worker, self.makespan)
            for worker, (order, record) in enumerate(zip(self.program.orders, self.records))
        )

    @cached_property
    def medians(self) -> Medians:
        """The median duration of each kind of pass of each stage."""
        return median_seconds(self.program, self.durations())

    @cached_property
    def predicted(self) -> Simulation:
        """A simulation of the program with the measured medians as costs. Nothing else takes time in it."""
        return predicted(self.program, self.medians)

    def durations(self) -> dict[str, list[float]]:
        """The durations of each pass of each stage, one for each micro-batch, by the name of the pass: "F0", "B3"."""
        found: dict[str, list[float]] = {}
        for spans in self.timeline.spans:
            for span in spans:
                found.setdefault(f"{span.compute.op}{span.compute.stage}", []).append(float(span.duration))
        return found

    def spent(self) -> list[dict[str, float]]:
        """For each worker, the seconds that it spent on each cause. They add up to the length of the step."""
        return [
            {label(cause, peer): seconds for (cause, peer), seconds in spent(each).items()} for each in self.activities
        ]

    def traffic(self) -> list[Traffic]:
        """The bytes that each value took between workers, the largest first."""
        sizes_of: dict[tuple[str, int, int], list[int]] = {}
        for worker, (order, record) in enumerate(zip(self.program.orders, self.noted)):
            for at, size in record.sizes.items():
                send = order[at]
                assert isinstance(send, Send)
                sizes_of.setdefault((send.value, worker, send.to), []).append(size)
        moved = [Traffic(*edge, len(sizes), sum(sizes)) for edge, sizes in sizes_of.items()]
        return sorted(moved, key=lambda each: -each.bytes)

    def between_hosts(self) -> dict[tuple[int, int], int]:
        """The bytes that went from host to host, by the numbers that the program has for hosts."""
        sums: dict[tuple[int, int], int] = {}
        for moved in self.traffic():
            if self.program.hosts and self.program.are_apart(moved.source, moved.to):
                link = self.program.hosts[moved.source], self.program.hosts[moved.to]
                sums[link] = sums.get(link, 0) + moved.bytes
        return dict(sorted(sums.items()))

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """The stages that a worker holds."""
        return self.program.stages_of(worker)

    def holders(self, stage: int) -> str:
        """The workers that hold a stage."""
        return ", ".join(map(self.named, self.program.workers_of(stage)))

    def named(self, worker: int) -> str:
        """The number of a worker, with the name that the user gave it."""
        name = self.workers[worker]
        return f"worker {worker}" if name == f"worker{worker}" else f"{name} (worker {worker})"


def send_times(program: Program, records: Sequence[WorkerRecord]) -> SendTimes:
    """When each value began to be sent to each worker, by the clocks of the records."""
    return {
        (instruction.value, instruction.microbatch, instruction.to): start
        for order, record in zip(program.orders, records)
        for instruction, (start, _) in zip(order, record.spans())
        if isinstance(instruction, Send)
    }


# Finds how far the clocks of several hosts are apart, from the rule that no value arrives before it is sent.
#
# A value goes from worker a to worker b. The clock of b is ahead of a's by at most the time that the value seems to take. In
# training, values go both ways, and so do the messages between controller and workers. So two bounds are known for how far b
# is ahead, and they are a round trip apart. The middle of the two is taken. Workers of one host share a clock.
#
#     a  ──sent 5.0──╲         ╱──arrived 6.2──      a sees      1.2 s  ─╮  so b is ahead by between 2.9 and 4.1:
#                     ╲       ╱                                          │  3.5, give or take 0.6
#     b  ──────arrived 9.1  sent 9.1───────────      b ahead by at most 4.1, and at least 2.9


def clock_offsets(clocks: Sequence[str], ahead: Mapping[Between, float]) -> tuple[list[float], list[float]]:
    """How far each clock is ahead of the first, and by how much that may be wrong.

    ``clocks`` names the clock of each participant. ``ahead[a, b]`` is the most by which b's can be ahead of a's.

    >>> clock_offsets(["one", "one", "other"], {(0, 2): 4.0, (2, 1): -3.0})
    ([0.0, 0.0, 3.5], [0.0, 0.0, 0.5])
    """
    everyone = range(len(clocks))
    most = [[0.0 if clocks[a] == clocks[b] else ahead.get((a, b), inf) for b in everyone] for a in everyone]
    for through in everyone:
        for a in everyone:
            for b in everyone:
                most[a][b] = min(most[a][b], most[a][through] + most[through][b])
    offsets, errors = [], []
    for worker, own in enumerate(clocks):
        highest, lowest = most[0][worker], -most[worker][0]
        if own == clocks[0]:
            highest = lowest = 0.0
        elif isinf(highest) or isinf(lowest):  # messages went in one direction only, or in none
            highest = lowest = next((end for end in (highest, lowest) if not isinf(end)), 0.0)
        offsets.append((highest + lowest) / 2)
        errors.append(max(0.0, (highest - lowest) / 2))
    return offsets, errors
