"""What travels: a value once to each host, where it is handed on, and one sum of the gradients that a worker makes of a value.

How programs say so, what is proven of them, what it costs, and that the numbers are those of plain PyTorch.
"""

import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from exps import residuals
from exps.tried_models.residual_streams import AttentionResiduals
from pippy import PipelineDriver, pipe_split, pipeline
from pippy.drivers.base.errors import LoweringError
from pippy.drivers.engines.routes import Routes
from pippy.drivers.lowering.flow import RemoteInterpreter
from pippy.drivers.lowering.lower import by_pass, lower, value_sizes
from pippy.drivers.plan import add_communication, make_schedule, parse_program, simulate, validate
from pippy.drivers.plan.cost.held_bytes import PipeBytes, StageBytes, held_bytes
from pippy.drivers.plan.language.edges import Pass
from pippy.drivers.plan.language.errors import ProgramError
from pippy.drivers.plan.language.instructions import Add, Send
from pippy.ir.pipe import compiled_of
from tests.comparisons import assert_gradients, assert_loss
from tests.drivers.plan.graphs import build, edges

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


def lowered(workers, per_worker, chunks=None, name="interleaved_1f1b", pipe=None, hosts=None, **options):
    pipe = pipe or pipeline(AttentionResiduals(workers * per_worker), nn.MSELoss())
    options["stages_per_worker"] = per_worker
    return lower(pipe, replace(make_schedule(name, workers=workers, chunks=chunks or workers, **options), hosts=hosts))


def on_hosts(hosts, workers=4, per_worker=2):
    return lowered(workers, per_worker, hosts=hosts).program


def between_hosts(program, hosts):
    """How many values each phase sends from host to host in a micro-batch."""
    phase = {edge.value: edge.source.phase for edge in program.flow}
    sent = Counter(
        (phase[each.value], hosts[worker], hosts[each.to])
        for worker, order in enumerate(program.orders)
        for each in order
        if isinstance(each, Send) and hosts[worker] != hosts[each.to]
    )
    return {key: count / program.chunks for key, count in sent.items()}


def handed_on(program):
    """The values that workers send which did not make them, as (value, worker, to), of micro-batch 0."""
    maker = {edge.value: program.placement.worker_of[edge.source.stage] for edge in program.flow}
    return {
        (each.value, worker, each.to)
        for worker, order in enumerate(program.orders)
        for each in order
        if isinstance(each, Send) and each.microbatch == 0 and worker != maker[each.value]
    }


# Between hosts


@pytest.mark.parametrize(("workers", "per_worker", "once", "each"), [(4, 2, 6, 12), (4, 4, 14, 28), (6, 2, 9, 27)])
def test_residuals_cross_to_a_host_once(workers, per_worker, once, each):
    """On two hosts. The way back is as it was: each worker sends one gradient."""
    hosts = tuple(worker * 2 // workers for worker in range(workers))
    program, plain = on_hosts(hosts, workers, per_worker), on_hosts(None, workers, per_worker)
    there = [sum(n for (phase, *_), n in between_hosts(its, hosts).items() if phase == "F") for its in (program, plain)]
    back = [sum(n for (phase, *_), n in between_hosts(its, hosts).items() if phase == "B") for its in (program, plain)]
    assert there == [once, each] and back == [each, each]
    known = residuals.formulas_between(workers, per_worker, hosts=2)
    assert list(known.values()) == [once, each]
    sends = [sum(isinstance(its, Send) for order in one.orders for its in order) for one in (program, plain)]
    assert sends[0] == sends[1]  # each worker still gets each value once


def test_each_link_of_four_workers_on_two_hosts():
    hosts = (0, 0, 1, 1)
    assert between_hosts(on_hosts(None), hosts) == {("F", 0, 1): 8, ("F", 1, 0): 4, ("B", 0, 1): 4, ("B", 1, 0): 8}
    assert between_hosts(on_hosts(hosts), hosts) == {("F", 0, 1): 4, ("F", 1, 0): 2, ("B", 0, 1): 4, ("B", 1, 0): 8}


def test_the_text_shows_who_hands_on():
    program = on_hosts((0, 0, 1, 1))
    assert "\nplacement 0 1 2 3 0 1 2 3\nhosts 0 0 1 1\nbackward all\n" in str(program)
    assert list(map(str, program.orders[2]))[:5] == [
        "receive tanh.0 from 0",
        "receive tanh_1.0 from 1",
        "send tanh.0 to 3",
        "send tanh_1.0 to 3",
        "F2.0",
    ]
    assert parse_program(str(program)) == program
    validate(program)


def test_on_one_host_nothing_changes():
    assert Routes.of_host("abcd", "node1").hosts_of([0, 1, 2, 3]) is None
    assert on_hosts((0, 0, 0, 0)).orders == on_hosts(None).orders
    assert "hosts" not in str(on_hosts(None))


def test_workers_with_one_name_of_a_host_are_apart_on_several_machines():
    routes = Routes(tuple("abc"), ("node", "node", "node"), ((0, 1), (2,)), machines=("x", "x", "y"))
    assert routes.hosts_of([0, 1, 2]) == (0, 0, 1)
    assert replace(routes, machines=("x", "x", "x")).hosts_of([0, 1, 2]) is None


# From host to host


class Encoded(nn.Module):
    """Later stages read what the first one gives, which is wide, and take a narrow value from the stage before them."""

    def __init__(self, stages, wide=64):
        super().__init__()
        self.encoder = nn.Linear(4, wide)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(stages - 1))
        self.readers = nn.ModuleList(nn.Linear(wide, 4) for _ in range(stages - 1))

    def forward(self, x):
        wide = self.encoder(x)
        x = torch.tanh(x)
        for layer, reader in zip(self.layers, self.readers):
            pipe_split()
            x = layer(x) + reader(wide)
        return x


def forward_only(hosts, example=True):
    pipe = pipeline(Encoded(len(hosts)), example_args=(torch.randn(3, 4),) if example else None)
    return lower(pipe, replace(make_schedule("forward_only", workers=len(hosts), chunks=8), hosts=hosts)).program


def test_hosts_hand_on_what_one_would_have_to_send_to_all():
    program = forward_only((0, 1, 2, 3))
    assert handed_on(program) == {("encoder", 1, 2), ("encoder", 2, 3)}
    plain = add_communication(replace(program, hosts=None))
    assert handed_on(plain) == set()
    size = {edge.value: 64 if edge.value == "encoder" else 4 for edge in program.flow}
    times = [
        simulate(replace(each, hosts=program.hosts), size=size, bandwidth=16).makespan for each in (program, plain)
    ]
    assert times[0] < 0.5 * times[1]


def test_it_is_bytes_that_count_where_they_are_known():
    """Host 0 makes the wide value, host 1 four narrow ones; so host 1 hands it on if bytes count, and not if values do."""
    narrow = [f"n{number} F1 -> F2" for number in range(4)]
    program = make_schedule("forward_only", workers=3, chunks=1).for_graph(edges("wide F0 -> F1 F2", *narrow))
    program = replace(program, hosts=(0, 1, 2))
    sizes = {"wide": 100, **{f"n{number}": 1 for number in range(4)}}
    assert handed_on(add_communication(program)) == set()
    assert handed_on(add_communication(program, sizes=sizes)) == {("wide", 1, 2)}
    del sizes["n3"]  # bytes and values are not compared
    assert handed_on(add_communication(program, sizes=sizes)) == set()


def test_the_bytes_are_those_of_the_example():
    assert handed_on(forward_only((0, 1, 2, 2))) == {("encoder", 2, 3), ("encoder", 1, 2)}
    compiled = pipeline(Encoded(3), example_args=(torch.randn(3, 4),))
    assert lower(compiled, make_schedule("1f1b", workers=3, chunks=1)).program.hosts is None


def test_the_bytes_of_all_values_and_gradients_are_known_with_an_example():
    """Also of one that the loss alone takes from an earlier stage."""

    class Aside(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 6), nn.Linear(4, 4)

        def forward(self, x):
            aside, y = self.first(x), torch.relu(x * 2)
            pipe_split()
            return self.second(y), aside

    x = torch.randn(3, 4)
    pipe = pipeline(Aside(), lambda given, target: (given[0] - target).sum() + given[1].sum(), example_args=(x, x))
    interpreter = RemoteInterpreter(compiled_of(pipe))
    work = by_pass(interpreter.run_until(lambda node: node.op == "output"), training=True)
    sizes = value_sizes(interpreter, work)
    program = lower(pipe, make_schedule("1f1b", workers=2, chunks=1)).program
    found = {edge.value: sizes[edge.value] for edge in program.flow}
    values = {"first": 3 * 6 * 8, "relu": 3 * 4 * 8}
    assert found == {**values, "first_grad_from__loss": values["first"], "relu_grad_from_submod_1": values["relu"]}


def test_the_one_that_needs_it_first_gets_it():
    """Stage 1 is on the last worker, so that one hands the value on, also where others have lower numbers."""
    program = build("F0.0 | F3.0 | F2.0 | F1.0", (0, 3, 2, 1), backward=(), hosts=(0, 1, 1, 1)).for_graph(
        edges("x F0 -> F1 F2 F3", "y F1 -> F2", "z F2 -> F3")
    )
    assert handed_on(add_communication(program)) == {("x", 3, 1), ("x", 3, 2)}


def test_replicas_are_each_on_hosts_of_their_own():
    schedule = make_schedule("1f1b", workers=3, chunks=4, replicas=2)
    pipe = pipeline(AttentionResiduals(3), nn.MSELoss())
    program = lower(pipe, replace(schedule, hosts=(0, 1, 1, 2, 2, 3))).program
    sends = {
        (each.value, each.microbatch, worker, each.to)
        for worker, order in enumerate(program.orders)
        for each in order
        if isinstance(each, Send) and each.value == "tanh"
    }
    assert {each for each in sends if each[1] == 0} == {("tanh", 0, 0, 1), ("tanh", 0, 1, 2)}
    assert {each for each in sends if each[1] == 2} == {("tanh", 2, 3, 4), ("tanh", 2, 3, 5)}


# What it costs


def test_a_line_between_hosts_is_simulated_by_hand():
    """x takes 10 to another host. Sent by its maker, it takes the line twice; handed on, stage 2 has it when stage 1 has."""
    program = build("F0.0 | F1.0 | F2.0", (0, 1, 2), backward=(), edges=edges("x F0 -> F1 F2"), hosts=(0, 1, 1))
    plain = add_communication(replace(program, hosts=None))
    costs = {"forward": [1, 1, 1], "size": 10, "latency": 3}
    assert simulate(program, **costs).makespan == 1 + 10 + 3 + 1
    assert simulate(replace(plain, hosts=program.hosts), **costs).makespan == 1 + 10 + 10 + 3 + 1
    assert simulate(plain, **costs).makespan == 1 + 10 + 3 + 1  # channels of their own, on one host


def test_values_of_two_workers_come_onto_a_line_as_they_are_sent():
    """Both workers of host 0 send a value after each unit of time, and none waits for the three of the other one."""
    program = make_schedule("forward_only", workers=3, chunks=3).for_graph(edges("x F0 -> F2", "y F1 -> F2"))
    spans = simulate(replace(program, hosts=(0, 0, 1)), forward=[1, 1, 1], size=10).timeline.spans
    assert [each.start for each in spans[2]] == [1 + 20, 1 + 40, 1 + 60]


def test_a_host_takes_one_value_at_a_time():
    program = build(
        "F0.0 | F1.0 | F2.0", (0, 1, 2), backward=(), edges=edges("x F0 -> F2", "y F1 -> F2"), hosts=(0, 1, 2)
    )
    assert simulate(program, forward=[1, 1, 1], size=10).makespan == 1 + 10 + 10 + 1


def test_the_worker_that_hands_on_holds_the_value_as_before():
    sizes = PipeBytes((StageBytes(),) * 8, dict.fromkeys((edge.value for edge in on_hosts(None).flow), 8))
    one, other = (held_bytes(on_hosts(hosts), sizes) for hosts in ((0, 0, 1, 1), None))
    assert [each.peak.total for each in one] == [each.peak.total for each in other]
    order = on_hosts((0, 0, 1, 1)).orders[2]
    at = [str(each) for each in order].index("send tanh.0 to 3")
    assert one[2].after[at] == one[2].after[at - 1] == 16  # it and another value have come, and none is freed yet


# Gradients of one value that stages of a worker make are added there


def assert_same_bits(one, other):
    assert all(gradient is other[name] is None or torch.equal(gradient, other[name]) for name, gradient in one.items())


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
