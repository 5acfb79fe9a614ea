"""The data of a recorded step, and what is computed from it: times on one clock, activities, medians, traffic, costs.

The workers note when each of their instructions ends, and send that with the answer of the step. Everything else is computed
here, in the controller, when it is asked for. What draws or describes a step is a function over this data, in a file of its
own: drawings.py, findings.py, page.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isinf
from statistics import fmean, median

import torch
from torch import nn

from pippy.drivers.batch.division import Division
from pippy.drivers.plan.cost.simulate import Costs, Simulation, Span, Timeline, simulate_with
from pippy.drivers.plan.language.instructions import Compute, Op, Receive, Send
from pippy.drivers.plan.language.program import Program
from pippy.drivers.protocol.steps import WorkerRecord
from pippy.drivers.report.activity import Activity, SendTimes, activities, label, spent
from pippy.drivers.report.model_names import NAMELESS, ModelNames
from pippy.drivers.worker.measure.recorder import clock
from pippy.ir.record.compiled import Compiled

# How long a step would take if only its computations took time: a simulation with the measured medians of each stage.
#
# The costs are medians, so one computation that lost its core for some milliseconds does not change them.


Medians = dict[Op, list[float]]  # of each kind of pass, the seconds of each stage


def median_seconds(program: Program, durations: Mapping[str, Sequence[float]]) -> Medians:
    """The median duration of each pass of each stage, and 0 where a stage has no such pass.

    >>> from pippy.drivers.plan import make_schedule
    >>> median_seconds(make_schedule("forward_only", workers=2, chunks=2), {"F0": [2.0, 9.0, 1.0], "F1": [1.0]})[Op.FORWARD]
    [2.0, 1.0]
    """
    return {op: [median(durations.get(f"{op}{stage}", [0.0])) for stage in range(program.stages)] for op in Op}


def predicted(program: Program, medians: Medians) -> Simulation:
    """Simulate a program whose passes take these times."""
    forward, again, whole, inputs, weights, _ = (medians[op] for op in Op)
    return simulate_with(program, Costs(forward, inputs, weights, whole, recompute=again))


def evened(medians: Medians) -> Medians:
    """The medians if all stages took the same time, and their sum stayed as it is.

    >>> evened({Op.FORWARD: [1.0, 3.0]})
    {<Op.FORWARD: 'F'>: [2.0, 2.0]}
    """
    return {op: [fmean(seconds)] * len(seconds) for op, seconds in medians.items()}


# How many samples and tokens a step takes, and how many that makes per second.


TOKEN_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class BatchSize:
    """The rows of a mini-batch, and its tokens. None where there are none, or where they are not known.

    Tokens are the elements of the first input that has whole numbers in two dimensions, if the model has an `nn.Embedding`.

    >>> BatchSize(32, 512).per_second(0.5)
    '64 samples/s · 1,024 tokens/s'
    """

    samples: int | None = None
    tokens: int | None = None

    def per_second(self, seconds: float) -> str:
        """Both as text, if a step takes this long; empty if nothing is known."""
        counts = {"samples/s": self.samples, "tokens/s": self.tokens}
        return " · ".join(f"{_rounded(count / seconds)} {unit}" for unit, count in counts.items() if count and seconds)


UNKNOWN_SIZE = BatchSize()


def batch_size(division: Division, compiled: Compiled) -> BatchSize:
    """The size of a mini-batch that is divided into micro-batches."""
    samples = division.rows
    if not any(isinstance(module, nn.Embedding) for module in compiled.split_gm.modules()):
        return BatchSize(samples)
    inputs = [name for name in division.arguments if name != compiled.target_name]
    tensors = [tensor for name in inputs for tensor in division.whole(name)]
    tokens = (each.numel() for each in tensors if each.dtype in TOKEN_DTYPES and each.dim() == 2)
    return BatchSize(samples, next(tokens, None))


def _rounded(number: float) -> str:
    """
    >>> _rounded(0.1234), _rounded(12345.6)
    ('0.123', '12,346')
    """
    return f"{number:,.0f}" if number >= 99.95 else f"{number:.3g}"


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
    def stage_seconds(self) -> list[float]:
        """How long the passes of each stage take together, for one micro-batch: medians."""
        return [sum(seconds[stage] for seconds in self.medians.values()) for stage in range(self.program.stages)]

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


# The costs of passes and transfers, measured in recorded steps. Other programs are simulated with them.


def measured_costs(steps: Sequence[StepData]) -> Costs:
    """The costs of every stage and edge, in seconds: medians over all micro-batches of the steps.

    Some of the steps should have whole backwards, and some halves. A forward that was not computed again would take as long as
    it did. The loss counts as part of its stage. The latency of an
    edge is the time for which its receiver waits after the sender has begun to send: the value is on its way, the receiver
    wakes up and unpacks it. An edge within a worker gets the median of the others, because another program may place its ends
    on two workers.
    """
    durations: dict[str, list[float]] = {}
    transfers: dict[str, list[float]] = {}
    for step in steps:
        for name, seconds in step.durations().items():
            durations.setdefault(name, []).extend(seconds)
        for value, seconds in transfer_seconds(step).items():
            transfers.setdefault(value, []).extend(seconds)
    program = steps[-1].program
    medians = median_seconds(program, durations)
    return Costs(
        medians[Op.FORWARD],
        medians[Op.BACKWARD_INPUT],
        medians[Op.BACKWARD_WEIGHT],
        medians[Op.BACKWARD],
        recompute=[again or first for first, again in zip(medians[Op.FORWARD], medians[Op.RECOMPUTE])],
        latency=_for_all([edge.value for edge in program.flow], transfers),
    )


def _for_all(values: Sequence[str], transfers: Mapping[str, Sequence[float]]) -> dict[str, float]:
    found = {value: median(seconds) for value, seconds in transfers.items()}
    usual = median(found.values()) if found else 0.0
    return {value: found.get(value, usual) for value in values}


def transfer_seconds(step: StepData) -> dict[str, list[float]]:
    """For each value, how long its receivers waited after it began to be sent: one number for each micro-batch."""
    waits: dict[str, list[float]] = {}
    for worker, (order, record) in enumerate(zip(step.program.orders, step.records)):
        for instruction, (start, end) in zip(order, record.spans()):
            if isinstance(instruction, Receive):
                begun = step.send_times[instruction.value, instruction.microbatch, worker]
                waits.setdefault(instruction.value, []).append(max(0.0, end - max(start, begun)))
    return waits
