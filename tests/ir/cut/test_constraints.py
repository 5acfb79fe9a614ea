"""One answer to where a model may be cut: what no constraint forbids gives the numbers of the plain model, and what one forbids
is refused for its reason.

There is one difference, on purpose: a stage may change a value that it was given, if nobody else relies on the change. The
balancer avoids the copy that this takes; the splitter allows it to those who mark it by hand.
"""

import copy
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from pippy import MultiUseParameterConfig, Pipe, PippyWarning
from pippy.ir.base.errors import SharedParameterError, SplitError
from pippy.ir.compile import compile_traced
from pippy.ir.cut.constraints import Constraint, constraints
from pippy.ir.cut.uses import mark, marks, operations
from pippy.ir.request import Request
from pippy.ir.trace.trace import trace
from tests.comparisons import assert_same, assert_same_state, fresh_inputs, twin
from tests.test_random_models import WIDTH, Random, steps
from tests.zoo import exhibits

pytestmark = pytest.mark.usefixtures("in_float64")
CONFIGS = [*MultiUseParameterConfig, None]


def cut_before(number):
    """For `Pipe.from_tracing`: one cut, and no other mark."""

    def cut(traced):
        for node in marks(traced):
            traced.graph.erase_node(node)
        mark(traced, [operations(traced)[number]])

    return cut


def check_cut(traced, number, count, found, config, inputs):
    """Cut once, in front of one of so many operations. Says whether that was possible."""
    plain, traced = twin(traced.model), copy.deepcopy(traced)
    stages = [int(index >= number) for index in range(count)]
    violated = [each for each in found if each.is_cut(stages)]
    refusals = [str(refusal) for each in violated if (refusal := each.refusal(stages))]
    try:
        request = Request(multi_use_param_spec=config, output_loss_value_spec=False, cut=cut_before(number))
        pipe = Pipe(traced, compile_traced(traced, request))
    except (SplitError, SharedParameterError) as error:
        assert str(error) == refusals[0]
        return False
    assert not refusals
    assert all("in place" in each.why for each in violated)  # the one difference
    assert pipe.num_stages == 2
    for seed in (0, 1):
        theirs, mine = fresh_inputs(inputs), fresh_inputs(inputs)
        torch.manual_seed(seed)
        expected = plain(*theirs)
        torch.manual_seed(seed)
        assert_same(pipe(*mine), expected, f"outputs of the model that is cut before operation {number}")
    assert_same_state(pipe, plain)
    return not violated


@pytest.mark.filterwarnings("ignore::pippy.PippyWarning")
@pytest.mark.parametrize("name", exhibits)
def test_every_cut_of_the_zoo(name):
    for config in CONFIGS if name.startswith(("Tied", "Shared")) else CONFIGS[:1]:
        torch.manual_seed(0)
        model = exhibits[name]()
        traced = trace(model)
        found = constraints(traced, config)
        count = len(operations(traced))
        for number in spread(count):
            check_cut(traced, number, count, found, config, model.inputs())


def spread(count, most=16):
    """Places among so many operations: all, or as many as that, from the first to the last."""
    return sorted({1 + at * (count - 2) // (most - 1) for at in range(most)}) if count - 1 > most else range(1, count)


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(steps, st.lists(st.integers(0, 30), min_size=1, max_size=4), st.sampled_from(CONFIGS), st.data())
def test_every_cut_of_random_models(program, outputs, config, data):
    torch.manual_seed(0)
    model = Random(program, outputs).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PippyWarning)
        traced = trace(model)
        count = len(operations(traced))
        number = data.draw(st.integers(1, count)) if count > 1 else 0
        if 0 < number < count:
            check_cut(traced, number, count, constraints(traced, config), config, (torch.randn(3, WIDTH),))


def accepted_cuts(model, inputs, config=None):
    """The cuts that are possible, each checked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PippyWarning)
        traced = trace(model)
        found = constraints(traced, config)
        count = len(operations(traced))
        numbers = range(1, count)
        return [number for number in numbers if check_cut(traced, number, count, found, config, inputs)]


class ChangesABufferThroughAView(nn.Module):
    def __init__(self):
        super().__init__()
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(1, 2))

    def forward(self, x):
        flat = self.count.view(2)
        x = torch.relu(x)
        flat.add_(1)
        return x + flat


def test_a_buffer_that_is_changed_through_a_view_of_another_stage():
    """The later stage changed a copy, and the buffer stayed as it was."""
    assert accepted_cuts(ChangesABufferThroughAView(), (torch.ones(3, 2),)) == [3]
    with pytest.raises(SharedParameterError, match="'count' is changed in place in submod_1"):
        Pipe.from_tracing(ChangesABufferThroughAView(), cut=cut_before(2))


class ReadsStatistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        return torch.relu(self.norm(x)) + self.norm.running_mean


def test_statistics_that_another_stage_reads():
    """This was refused only when it ran."""
    assert accepted_cuts(ReadsStatistics(), (torch.randn(3, 2),)) == []
    with pytest.raises(SharedParameterError, match=r"'norm\.running_mean' is changed by a module at each call"):
        Pipe.from_tracing(ReadsStatistics(), cut=cut_before(1))


def test_a_constraint_of_the_balancer_alone_refuses_nothing():
    constraint = Constraint(0, 2, "0 to 2 are one layer")
    assert constraint.is_cut([0, 0, 1])
    assert constraint.refusal([0, 0, 1]) is None
