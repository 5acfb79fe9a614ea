"""What passes and transfers cost, from recorded steps: medians over their micro-batches, to simulate other programs with."""

from collections.abc import Mapping, Sequence
from statistics import median

from pippy.drivers.recording.prediction import median_seconds
from pippy.drivers.recording.record import RecordedStep
from pippy.drivers.schedules.programs.instructions import Op, Receive, Send
from pippy.drivers.schedules.simulation.costs import Costs


def measured_costs(steps: Sequence[RecordedStep]) -> Costs:
    """The costs of every stage and edge, in seconds. Some of the steps should have whole backwards, and some halves.

    A stage's loss is part of it. An edge's latency is what its receiver waits for after the sender has begun to send: how
    long the value is on its way, and the receiver wakes up and unpacks it. An edge within a worker is given the median of
    the others, for programs that place its ends apart.
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
        latency=_for_all([edge.value for edge in program.flow], transfers),
    )


def _for_all(values: Sequence[str], transfers: Mapping[str, Sequence[float]]) -> dict[str, float]:
    found = {value: median(seconds) for value, seconds in transfers.items()}
    usual = median(found.values()) if found else 0.0
    return {value: found.get(value, usual) for value in values}


def transfer_seconds(step: RecordedStep) -> dict[str, list[float]]:
    """How long its receivers waited for each value after it began to be sent, over the micro-batches."""
    sent: dict[tuple[str, int, int], float] = {}
    spans = [record.spans() for record in step.records]
    for order, its in zip(step.program.orders, spans):
        for instruction, (start, _) in zip(order, its):
            if isinstance(instruction, Send):
                sent[instruction.value, instruction.microbatch, instruction.to] = start
    found: dict[str, list[float]] = {}
    for worker, (order, its) in enumerate(zip(step.program.orders, spans)):
        for instruction, (start, end) in zip(order, its):
            if isinstance(instruction, Receive):
                begun = sent[instruction.value, instruction.microbatch, worker]
                found.setdefault(instruction.value, []).append(max(0.0, end - max(start, begun)))
    return found
