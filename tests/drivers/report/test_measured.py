"""The costs that are read off recorded steps are those that the steps were made with."""

import pytest

from pippy.drivers.plan import add_communication, make_schedule
from pippy.drivers.plan.language.instructions import Compute
from pippy.drivers.plan.passes.rewrites import in_halves
from pippy.drivers.report.step_data import measured_costs
from tests.drivers.synthetic_steps import stepped

SECONDS = {"F": (1.0, 2.0, 3.0), "B": (4.0, 5.0, 9.0), "I": (1.5, 2.5, 3.5), "W": (0.5, 0.25, 0.75)}
FLIGHT = 0.125


def cost(instruction):
    return SECONDS[str(instruction.op)][instruction.stage] if isinstance(instruction, Compute) else 0.0


def test_the_costs_are_the_medians_of_whole_backwards_and_halves():
    plain = make_schedule("1f1b", workers=3, chunks=5)
    steps = [stepped(add_communication(each), cost, flight=FLIGHT) for each in (plain, plain, in_halves(plain))]
    costs = measured_costs(steps)
    for measured, made in (
        (costs.forward, "F"),
        (costs.backward, "B"),
        (costs.backward_input, "I"),
        (costs.backward_weight, "W"),
    ):
        assert measured == pytest.approx(SECONDS[made])
    assert set(costs.latency) == {edge.value for edge in steps[0].program.flow}
    # a value that its receiver did not wait for costs it nothing, so a latency may be less than the flight
    assert all(-1e-9 <= latency <= FLIGHT + 1e-9 for latency in costs.latency.values())
    assert max(costs.latency.values()) == pytest.approx(FLIGHT)
