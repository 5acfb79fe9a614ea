"""Gradients of one value that stages of a worker make are added there: one leaves the worker, and the order never changes."""

import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from exps.tried_models.residual_streams import AttentionResiduals
from pippy import PipelineDriver, pipe_split, pipeline
from pippy.drivers.base.errors import LoweringError
from pippy.drivers.lowering.lower import lower
from pippy.drivers.plan import add_communication, make_schedule, parse_program, simulate, validate
from pippy.drivers.plan.cost.held_bytes import PipeBytes, StageBytes, held_bytes
from pippy.drivers.plan.language.edges import Pass
from pippy.drivers.plan.language.errors import ProgramError
from pippy.drivers.plan.language.instructions import Add, Send
from tests.comparisons import assert_gradients, assert_loss
from tests.drivers.plan.graphs import build, edges

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


def assert_same_bits(one, other):
    assert all(gradient is other[name] is None or torch.equal(gradient, other[name]) for name, gradient in one.items())


def lowered(workers, per_worker, chunks=None, name="interleaved_1f1b", pipe=None, **options):
    pipe = pipe or pipeline(AttentionResiduals(workers * per_worker), nn.MSELoss())
    options["stages_per_worker"] = per_worker
    return lower(pipe, make_schedule(name, workers=workers, chunks=chunks or workers, **options))


def sends(program):
    """How many values each phase sends in a micro-batch."""
    phase = {edge.value: edge.source.phase for edge in program.flow}
    sent = Counter(phase[each.value] for order in program.orders for each in order if isinstance(each, Send))
    return {key: count / program.chunks for key, count in sent.items()}


def without_sums(program):
    """The program as it was before there were sums: each stage sends its gradient."""
    return add_communication(replace(program, added=()))


# Transfers


@pytest.mark.parametrize(
    ("workers", "per_worker", "there", "one_by_one"), [(4, 2, 18, 24), (4, 4, 42, 96), (2, 2, 3, 4), (3, 1, 3, 3)]
)
def test_the_way_back_has_as_many_transfers_as_the_way_there(workers, per_worker, there, one_by_one):
    """Of residuals by attention, each stage reads all earlier ones."""
    program = lowered(workers, per_worker).program
    formula = workers * (workers - 1) // 2 + (per_worker - 1) * workers * (workers - 1)
    assert sends(program) == {"F": there, "B": there} and formula == there
    assert sends(without_sums(program)) == {"F": there, "B": one_by_one}
    assert ("  add " in str(program)) == (per_worker > 1)


@pytest.mark.parametrize(("name", "workers"), [("zb_v", 3), ("v_min", 2), ("looped_bfs", 2), ("dualpipe_v", 2)])
@pytest.mark.parametrize("layers", [1, 2])
def test_so_it_is_on_other_placements(name, workers, layers):
    pipe = pipeline(AttentionResiduals(workers * 2, layers, full=True), nn.MSELoss())
    there = sends(lowered(workers, 2, 2 * workers, name, pipe).program)
    assert there["F"] == there["B"]


class TwoUses(nn.Module):
    """The last stage reads a value of the first one itself, and so does the loss."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = torch.tanh(self.first(x))
        pipe_split()
        return self.second(y), y


def loss_of_both(output, target):
    return nn.functional.mse_loss(output[0], target) + output[1].square().mean()


def test_a_stage_and_the_loss_send_one_gradient():
    program = lowered(2, 1, 2, "1f1b", pipeline(TwoUses(), loss_of_both)).program
    assert program.added and sends(program) == {"F": 1, "B": 1}


# The text, and what it says


def test_the_text_shows_the_order_of_the_sum():
    program = lowered(2, 3, 2).program
    first = "tanh_grad_from_submod_5", "tanh_grad_from_submod_4", "tanh_grad_from_submod_3", "tanh_grad_from_submod_2"
    assert program.added[-1] == (*first, "tanh_grad_from_submod_1")
    mine = [str(each) for each in program.orders[1] if "tanh_grad" in str(each) and ".0" in str(each)]
    assert mine == [
        "add tanh_grad_from_submod_3.0 to tanh_grad_from_submod_5",
        "add tanh_grad_from_submod_1.0 to tanh_grad_from_submod_5",
        "send tanh_grad_from_submod_5.0 to 0",
        "free tanh_grad_from_submod_5.0",
    ]
    assert "add tanh_grad_from_submod_2.0 to tanh_grad_from_submod_4" in map(str, program.orders[0])
    assert parse_program(str(program)) == program


def test_a_gradient_is_added_when_those_before_it_are_made():
    """The first stage that reads the value comes first in its backward here, and last in the sum."""
    text = "edge x F0 -> F1 F2"
    program = build("F0.0, B0.0 | F1.0, F2.0, B1.0, B2.0", (0, 1, 1)).for_graph(
        edges(text.removeprefix("edge "), "g2 B2 -> B0", "g1 B1 -> B0"), added=[("g2", "g1")]
    )
    order = [str(each) for each in add_communication(program).orders[1]]
    assert order[-5:] == ["B1.0", "B2.0", "add g1.0 to g2", "send g2.0 to 0", "free g2.0"]


WRONG = {
    "dropped": (["add g1.0 to g3"], [], "send g3.0 to 0: comes before add g1.0 to g3"),
    "doubled": (["add g1.0 to g3"], ["add g1.0 to g3"] * 2, "add g1.0 to g3: needs g1.0, which was freed"),
    "behind the send": (
        ["add g1.0 to g3", "send g3.0 to 0"],
        ["send g3.0 to 0", "add g1.0 to g3"],
        "send g3.0 to 0: comes before add g1.0 to g3",
    ),
    "before it is made": (
        ["B1.0", "add g1.0 to g3"],
        ["add g1.0 to g3", "B1.0"],
        "add g1.0 to g3: needs g1.0, which is not here yet",
    ),
    "in another order": (
        ["add g2.0 to g3", "B1.0", "add g1.0 to g3"],
        ["B1.0", "add g1.0 to g3", "add g2.0 to g3"],
        "add g1.0 to g3: comes before add g2.0 to g3",
    ),
    "to another": (["add g1.0 to g3"], ["add g1.0 to g2"], "g1 is no part of the sum g2 on this worker"),
    "sent by itself": (["add g1.0 to g3"], ["send g1.0 to 0", "free g1.0"], "g1 is not needed on worker 0"),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_sum_is_refused(how):
    given = ["g3 B3 -> B0", "g2 B2 -> B0", "g1 B1 -> B0"]
    program = build("F0.0, B0.0 | F1.0, F2.0, F3.0, B3.0, B2.0, B1.0", (0, 1, 1, 1)).for_graph(
        edges("x F0 -> F1 F2 F3", *given), added=[("g3", "g2", "g1")]
    )
    text = str(add_communication(program))
    validate(parse_program(text))
    lines, others, message = WRONG[how]
    before, after = ("".join(f"  {line}\n" for line in each) for each in (lines, others))
    assert text.count(before) == 1
    with pytest.raises(ProgramError) as caught:
        validate(parse_program(text.replace(before, after)))
    assert message in str(caught.value)


# What it costs


def test_sums_are_simulated_and_counted():
    """By hand. The wire to worker 0 takes 10 for each value, and it waits for one gradient in place of two."""
    given = edges("x F0 -> F1 F2", "g2 B2 -> B0", "g1 B1 -> B0")
    program = build("F0.0, B0.0 | F1.0, F2.0, B2.0, B1.0", (0, 1, 1)).for_graph(given, added=[("g2", "g1")])
    costs = {"forward": [1, 1, 1], "backward": [1, 1, 1], "size": {"x": 1, "g2": 10, "g1": 10}}
    # B2 ends at 5, B1 at 6
    assert simulate(program, **costs).makespan == 6 + 10 + 1
    assert simulate(replace(program, added=()), **costs).makespan == 5 + 10 + 10 + 1
    sizes = PipeBytes((StageBytes(),) * 3, {"x": 1, "g2": 100, "g1": 100})
    one, other = (held_bytes(each, sizes)[1] for each in (program, replace(program, added=())))
    order = [str(each) for each in add_communication(program).orders[1]]
    assert one.after[order.index("add g1.0 to g2")] == 100  # the sum alone
    assert one.most[order.index("add g1.0 to g2")] == 300  # beside the two
    assert other.peak.total == 101  # each left as soon as it was made; one of them and x


def test_a_worker_holds_one_gradient_and_not_all_of_them():
    """Of the values of stage 0, which stay on its worker, all gradients were held until its backward."""
    program = lowered(1, 6, 1).program
    sizes = PipeBytes((StageBytes(),) * 6, {edge.value: edge.source.phase == "B" for edge in program.flow})
    # stage 5 gives 5 gradients, and each later one adds its own to those
    assert held_bytes(program, sizes)[0].peak.total < held_bytes(without_sums(program), sizes)[0].peak.total


# On workers

DRIVERS = [  # the schedule, how many workers have how many stages each, and what else
    ("interleaved_1f1b", 2, 2, {}),
    ("looped_bfs", 2, 3, {"checkpoint": "always"}),
    ("zb_v", 2, 2, {}),
    ("v_min", 4, 2, {}),
    ("dualpipe_v", 2, 2, {"checkpoint": "except_last"}),
    ("zb_h1", 3, 1, {}),
    ("interleaved_1f1b", 2, 2, {"out_of_order": True}),
    ("interleaved_1f1b", 2, 2, {"replicas": 2}),
    ("looped_bfs", 2, 2, {"single_loss": True}),
]


@pytest.mark.parametrize(("schedule", "workers", "per_worker", "options"), DRIVERS)
def test_a_step_is_that_of_plain_pytorch_and_its_bits_repeat(threads, schedule, workers, per_worker, options):
    model = AttentionResiduals(workers * per_worker, layers=2)
    plain = copy.deepcopy(model)
    x, target = torch.randn(15, 8), torch.randn(15, 8)  # micro-batches of 4 and 3 rows
    pipe = pipeline(model, nn.MSELoss())
    size = workers * options.get("replicas", 1)
    driver = PipelineDriver(pipe, threads, schedule=schedule, world_size=size, check=False, **options)
    loss = driver.run(4, x, target)
    assert any(isinstance(each, Add) for order in driver.program(4).orders for each in order) == (per_worker > 1)
    assert_loss(loss, nn.functional.mse_loss(plain(x), target), rtol=1e-12, atol=0)
    assert_gradients(driver, plain, rtol=1e-10, atol=1e-14)
    found = driver.gradients()
    driver.zero_grad()
    driver.run(4, x, target)
    assert_same_bits(found, driver.gradients())
    driver.close()


def test_the_schedule_changes_no_bit(threads):
    """Only where the stages are can change one."""
    model, x, target = AttentionResiduals(6), torch.randn(8, 8), torch.randn(8, 8)
    found = []
    for schedule, options in [
        ("interleaved_1f1b", {}),
        ("looped_bfs", {}),
        ("interleaved_1f1b", {"out_of_order": True}),
    ]:
        pipe = pipeline(copy.deepcopy(model), nn.MSELoss())
        driver = PipelineDriver(pipe, threads, schedule=schedule, world_size=2, check=False, **options)
        driver.run(4, x, target)
        found.append(driver.gradients())
        driver.close()
    for each in found[1:]:
        assert_same_bits(found[0], each)


class SomeWithout(nn.Module):
    """Stages 1 and 3 read a value, and its gradient from stage 3 is None, or both are."""

    def __init__(self, both):
        super().__init__()
        self.layers, self.both = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), both

    def forward(self, x):
        y = self.layers[0](x)
        pipe_split()
        z = self.layers[1](y.detach() if self.both else y)
        pipe_split()
        z = self.layers[2](z)
        pipe_split()
        return self.layers[3](z) + y.detach()


@pytest.mark.parametrize("both", [False, True])
def test_readers_without_a_gradient_add_nothing(threads, both):
    model = SomeWithout(both)
    plain, x, target = copy.deepcopy(model), torch.randn(6, 4), torch.randn(6, 4)
    pipe = pipeline(model, nn.MSELoss())
    driver = PipelineDriver(pipe, threads, schedule="interleaved_1f1b", world_size=2, check=False)
    driver.run(2, x, target)
    nn.functional.mse_loss(plain(x), target).backward()
    assert_gradients(driver, plain, rtol=1e-10, atol=1e-14)
    driver.close()


# Programs that were saved


def test_a_program_from_before_there_were_sums_is_lowered_as_it_is():
    torch.manual_seed(0)
    pipe = pipeline(AttentionResiduals(4), nn.MSELoss())
    new = lowered(2, 2, pipe=pipe)
    old = parse_program(str(without_sums(new.program)))
    assert "added" not in str(old) and lower(pipe, old).program == old
    three = "tanh_grad_from_submod_3", "tanh_grad_from_submod_2", "tanh_grad_from_submod_1"
    assert [each.work[Pass("B", 0)][0].takes for each in (lower(pipe, old), new)] == [(three,), (three[:2],)]


def test_a_program_whose_sums_are_of_another_pipe_is_refused():
    pipe = pipeline(AttentionResiduals(4), nn.MSELoss())
    program = lowered(2, 2, pipe=pipe).program
    turned = replace(program, added=tuple(values[::-1] for values in program.added))
    with pytest.raises(LoweringError, match=r"added tanh_grad_from_submod_1 .*only in the program"):
        lower(pipe, add_communication(turned))
