"""The costs of passes and transfers, measured in recorded steps. Other programs are simulated with them."""

from collections.abc import Mapping, Sequence
from statistics import median

from pippy.drivers.plan.cost.costs import Costs
from pippy.drivers.plan.language.instructions import Op, Receive
from pippy.drivers.report.prediction import median_seconds
from pippy.drivers.report.step_data import StepData


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
