"""Where workers are on several hosts, a value goes once to each host and is handed on there: programs, and their costs."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from exps import residuals
from exps.tried_models.residual_streams import AttentionResiduals
from pippy import pipe_split, pipeline
from pippy.drivers.engines.routes import Routes
from pippy.drivers.lowering.flow import RemoteInterpreter
from pippy.drivers.lowering.lower import by_pass, lower, value_sizes
from pippy.drivers.plan import add_communication, make_schedule, parse_program, simulate, validate
from pippy.drivers.plan.cost.held_bytes import PipeBytes, StageBytes, held_bytes
from pippy.drivers.plan.language.instructions import Send
from pippy.ir.pipe import compiled_of
from tests.drivers.plan.graphs import build, edges

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


def lowered(hosts, workers=4, per_worker=2, chunks=None, name="interleaved_1f1b", pipe=None):
    pipe = pipe or pipeline(AttentionResiduals(workers * per_worker), nn.MSELoss())
    schedule = make_schedule(name, workers=workers, chunks=chunks or workers, stages_per_worker=per_worker)
    return lower(pipe, replace(schedule, hosts=hosts)).program


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


# Transfers between hosts


@pytest.mark.parametrize(("workers", "per_worker", "once", "each"), [(4, 2, 6, 12), (4, 4, 14, 28), (6, 2, 9, 27)])
def test_residuals_cross_to_a_host_once(workers, per_worker, once, each):
    """On two hosts. The way back is as it was: each worker sends one gradient."""
    hosts = tuple(worker * 2 // workers for worker in range(workers))
    program, plain = lowered(hosts, workers, per_worker), lowered(None, workers, per_worker)
    there = [sum(n for (phase, *_), n in between_hosts(its, hosts).items() if phase == "F") for its in (program, plain)]
    back = [sum(n for (phase, *_), n in between_hosts(its, hosts).items() if phase == "B") for its in (program, plain)]
    assert there == [once, each] and back == [each, each]
    known = residuals.formulas_between(workers, per_worker, hosts=2)
    assert list(known.values()) == [once, each]
    sends = [sum(isinstance(its, Send) for order in one.orders for its in order) for one in (program, plain)]
    assert sends[0] == sends[1]  # each worker still gets each value once


def test_each_link_of_four_workers_on_two_hosts():
    hosts = (0, 0, 1, 1)
    assert between_hosts(lowered(None), hosts) == {("F", 0, 1): 8, ("F", 1, 0): 4, ("B", 0, 1): 4, ("B", 1, 0): 8}
    assert between_hosts(lowered(hosts), hosts) == {("F", 0, 1): 4, ("F", 1, 0): 2, ("B", 0, 1): 4, ("B", 1, 0): 8}


def test_the_text_shows_who_hands_on():
    program = lowered((0, 0, 1, 1))
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
    assert lowered((0, 0, 0, 0)).orders == lowered(None).orders
    assert "hosts" not in str(lowered(None))


def test_workers_with_one_name_of_a_host_are_apart_on_several_machines():
    routes = Routes(tuple("abc"), ("node", "node", "node"), ((0, 1), (2,)), machines=("x", "x", "y"))
    assert routes.hosts_of([0, 1, 2]) == (0, 0, 1)
    assert replace(routes, reasons={2: "no memory"}, machines=("x", "x", "x")).hosts_of([0, 1, 2]) is None


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
    sizes = PipeBytes((StageBytes(),) * 8, dict.fromkeys((edge.value for edge in lowered(None).flow), 8))
    one, other = (held_bytes(lowered(hosts), sizes) for hosts in ((0, 0, 1, 1), None))
    assert [each.peak.total for each in one] == [each.peak.total for each in other]
    order = lowered((0, 0, 1, 1)).orders[2]
    at = [str(each) for each in order].index("send tanh.0 to 3")
    assert one[2].after[at] == one[2].after[at - 1] == 16  # it and another value have come, and none is freed yet
