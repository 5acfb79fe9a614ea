"""Wrong arguments are refused, and what the errors say to write works."""

from typing import Any

import pytest

from pippy.drivers.plan import (
    add_communication,
    make_schedule,
    parse_program,
    register,
    render_text,
    simulate,
    validate,
)
from pippy.drivers.plan.language.edges import Replicated
from pippy.drivers.plan.language.errors import (
    ArgumentError,
    PlacementError,
    ProgramError,
    ScheduleError,
    UnknownScheduleError,
)
from pippy.drivers.plan.language.instructions import Compute
from pippy.drivers.plan.language.placement import Placement, make_placement
from pippy.drivers.plan.orders.registry import REGISTRY
from pippy.drivers.plan.orders.schedule import B, F, WorkerOrders


@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize("size", [0, -3, 1.5, "4", None, True])
@pytest.mark.parametrize("argument", ["workers", "chunks", "stages_per_worker"])
def test_sizes_are_whole_numbers_of_at_least_1(name, argument, size):
    sizes = {"workers": 2, "chunks": 2, "stages_per_worker": 2} | {argument: size}
    if (argument, size) == ("stages_per_worker", None):
        return  # the schedule's own
    with pytest.raises(ArgumentError, match=rf"{argument}={size!r}"):
        make_schedule(name, **sizes)


def test_an_unknown_schedule():
    with pytest.raises(
        UnknownScheduleError, match=r"there is no schedule called 'gpipe'; take one of fill_drain, 1f1b"
    ):
        make_schedule("gpipe", workers=2, chunks=2)


def test_an_unknown_option():
    with pytest.raises(ArgumentError, match=r"memory=3: 1f1b takes no options"):
        make_schedule("1f1b", workers=2, chunks=2, memory=3)
    with pytest.raises(ArgumentError, match=r"cost=3: list takes costs, memory, halves, edges"):
        make_schedule("list", workers=2, chunks=2, cost=3)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ("spiral", "placement 'spiral' is unknown; take one of linear, looped, v, or a dict"),
        ([0, 1], "placement [0, 1] is unknown; take one of linear, looped, v, or a dict"),
        (1, "placement 1 is unknown"),
        ({}, "the placement () holds no stage"),
        ({0: 0, 2: 1}, "stage 1 has no worker in placement {0: 0, 2: 1}; number the stages from 0 without holes"),
        ({1: 0, 2: 1}, "stage 0 has no worker"),
        ({0: 0, 1: 2}, "worker 1 holds no stage in placement 0 2"),
        ({0: 1, 1: 1}, "worker 0 holds no stage in placement 1 1"),
        ({0: 0, 1: -1}, "-1 is no worker's number in placement 0 -1"),
        ({0: 0, 1: "1"}, "'1' is no worker's number"),
        ({0: 0, 1: 0}, "placement 0 0 is for 1 workers, not for workers=2"),
        ({0: 0, 1: 1, 2: 2}, "placement 0 1 2 is for 3 workers, not for workers=2"),
    ],
)
def test_a_placement_that_cannot_be(placement, message):
    with pytest.raises(PlacementError) as caught:
        make_schedule("1f1b", workers=2, chunks=2, placement=placement)
    assert message in str(caught.value)


def test_stages_per_worker_that_do_not_fit():
    with pytest.raises(ArgumentError, match=r"stages_per_worker=\[1, 2, 1\] has 3 entries for workers=2"):
        make_schedule("1f1b", workers=2, chunks=2, stages_per_worker=[1, 2, 1])
    with pytest.raises(ArgumentError, match=r"stages_per_worker=0 must be a whole number"):
        make_schedule("1f1b", workers=2, chunks=2, stages_per_worker=[1, 0])
    with pytest.raises(PlacementError, match=r"placement 0 1 does not hold stages_per_worker=2"):
        make_schedule("1f1b", workers=2, chunks=2, stages_per_worker=2, placement={0: 0, 1: 1})


def test_unequal_stages():
    assert str(make_placement(3, [1, 3, 2], "linear")) == "0 1 1 1 2 2"
    assert str(make_placement(3, [1, 3, 2], "looped")) == "0 1 2 1 2 1"
    assert str(make_placement(3, [1, 3, 2], "v")) == "0 1 2 2 1 1"


@pytest.mark.parametrize("name", ["zb_v", "v_half", "v_min", "dualpipe_v"])
@pytest.mark.parametrize("placement", ["linear", "looped", {0: 0, 1: 1}, {0: 0, 1: 0, 2: 1, 3: 1}])
def test_v_shaped_schedules_refuse_other_placements(name, placement):
    with pytest.raises(
        PlacementError, match=rf"{name} needs a V-shaped placement .* such as 0 1 1 0, not 0 .*take inter"
    ):
        make_schedule(name, workers=2, chunks=2, placement=placement)


@pytest.mark.parametrize("name", ["zb_v", "v_half", "v_min"])
def test_v_shaped_schedules_take_any_numbering_of_the_workers(name):
    assert make_schedule(name, workers=2, chunks=3, placement={0: 1, 1: 0, 2: 0, 3: 1}).peak_live == (4, 4)


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2"])
def test_zero_bubble_schedules_refuse_workers_with_several_runs(name):
    with pytest.raises(
        PlacementError, match=rf"{name} needs one run of adjacent stages .* not placement 0 1 0 1; take 1f1b"
    ):
        make_schedule(name, workers=2, chunks=2, stages_per_worker=2, placement="looped")


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"forward": -1.0}, "forward=-1.0 must be a number of at least 0"),
        ({"forward": float("nan")}, "forward=nan must be a number"),
        ({"backward_input": float("inf")}, "backward_input=inf must be a number"),
        ({"backward_weight": "1"}, "backward_weight='1' must be a number"),
        ({"forward": True}, "forward=True must be a number"),
        ({"forward": [1.0]}, "forward=[1.0] has 1 costs for 2 stages"),
        ({"forward": [1.0, -2.0]}, "forward=-2.0 must be a number of at least 0"),
        ({"backward": {0: 1.0}}, "backward={0: 1.0} has no cost for stage 1"),
        ({"latency": {"activation_0": 1.0}}, "has no entry for edge gradient_0"),
        ({"size": -1}, "size=-1 must be a number of at least 0"),
        ({"bandwidth": 0}, "bandwidth=0 must be above zero"),
    ],
)
def test_costs_that_cannot_be(costs, message):
    with pytest.raises(ArgumentError) as caught:
        simulate(make_schedule("1f1b", workers=2, chunks=2), **costs)
    assert message in str(caught.value)


@pytest.fixture
def scratch():
    before = set(REGISTRY)
    yield
    for name in set(REGISTRY) - before:
        del REGISTRY[name]


def alternating(placement: Placement, chunks: int) -> WorkerOrders:
    """Every micro-batch by itself."""
    orders: list[list[Compute]] = [[] for _ in range(placement.workers)]
    for chunk in range(chunks):
        for op, stages in ((F, range(placement.stages)), (B, reversed(range(placement.stages)))):
            for stage in stages:
                orders[placement.worker_of[stage]].append(Compute(op, stage, chunk))
    return WorkerOrders(orders)


def no_plan(placement: Placement, chunks: int) -> Any:
    return alternating(placement, chunks).orders


def test_a_schedule_of_the_users_own(scratch):
    register("alternating", alternating, placement="looped")
    program = make_schedule("alternating", workers=3, chunks=2, stages_per_worker=2)
    assert simulate(program).makespan == 3 * 2 * 3
    with pytest.raises(ArgumentError, match="there is a schedule called 'alternating' already"):
        register("alternating", alternating)


def test_a_schedule_that_returns_what_cannot_run(scratch):
    register(
        "half", lambda placement, chunks: WorkerOrders([order[:2] for order in alternating(placement, chunks).orders])
    )
    register(
        "backwards",
        lambda placement, chunks: WorkerOrders([order[::-1] for order in alternating(placement, chunks).orders]),
    )
    register("modest", lambda placement, chunks: WorkerOrders(alternating(placement, chunks).orders, memory=[0, 0]))
    register("none", no_plan)
    register("short", lambda placement, chunks: WorkerOrders(alternating(placement, chunks).orders[:1]))
    with pytest.raises(
        ProgramError, match=r"program half cannot run: 4 faults\n- worker 0, at the end: F0\.1 is missing"
    ):
        make_schedule("half", workers=2, chunks=2)
    with pytest.raises(ProgramError, match=r"worker 0, B0\.1: comes before F0\.1"):
        make_schedule("backwards", workers=2, chunks=2)
    with pytest.raises(ProgramError, match=r"worker 1 holds 1 stage-micro-batches at its peak; the stated limit is 0"):
        make_schedule("modest", workers=2, chunks=2)
    with pytest.raises(ArgumentError, match=r"schedule none returned \[\[Compute.*; it must return a WorkerOrders"):
        make_schedule("none", workers=2, chunks=2)
    with pytest.raises(ArgumentError, match=r"orders of 1 workers for placement 0 1"):
        make_schedule("short", workers=2, chunks=2)


def test_every_error_of_the_library_has_one_base():
    for error in (ArgumentError, PlacementError, ProgramError, UnknownScheduleError):
        assert issubclass(error, ScheduleError)


def wrong(value: Any) -> Any:
    """A value of a type that the caller should not have passed."""
    return value


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: make_schedule(wrong(["1f1b"]), workers=2, chunks=2), "name=['1f1b'] is a list"),
        (lambda: make_schedule("list", workers=2, chunks=2, costs=3), "costs=3 is a int; give Costs("),
        (lambda: simulate(wrong("text")), "program='text' is a str"),
        (lambda: validate(wrong(None)), "program=None is a NoneType"),
        (lambda: add_communication(wrong(7)), "program=7 is a int"),
        (lambda: parse_program(wrong(b"pippy")), "text=b'pippy' is a bytes"),
        (lambda: register("mine", wrong(3)), "schedule=3 is a int"),
        (lambda: register(wrong(3), wrong(print)), "name=3 is a int"),
    ],
)
def test_a_value_of_a_wrong_kind_is_refused_by_its_name(call, words):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert words in str(caught.value)


def test_an_incomplete_program_is_refused_before_it_is_lowered():
    program = make_schedule("1f1b", workers=2, chunks=2)
    with pytest.raises(ProgramError, match=r"B0\.0"):
        add_communication(program.with_orders([program.orders[0][:1], program.orders[1]]))


def test_a_typing_error_in_a_placement_costs_nothing():
    with pytest.raises(PlacementError, match="worker 1 holds no stage"):
        make_schedule("1f1b", workers=2, chunks=2, placement={0: 0, 1: 10**9})


def test_a_replicated_parameter_needs_a_stage():
    with pytest.raises(ArgumentError, match="no stage has a copy"):
        make_schedule("1f1b", workers=2, chunks=2).for_graph(edges=(), replicated=(Replicated("w", ()),))


# What a message about schedules says to do gives a program that is right. Messages that only name what is known are not


def program(name="1f1b", workers=2, chunks=2, **options):
    return make_schedule(name, workers=workers, chunks=chunks, **options)


def simulated(**costs):
    return simulate(program(), **costs)


def one_by_one(placement, chunks):
    """A schedule of one's own: one micro-batch after the other."""
    stages = range(placement.stages)
    orders = [[] for _ in range(placement.workers)]
    for microbatch in range(chunks):
        for op, order in ((F, stages), (B, reversed(stages))):
            for stage in order:
                orders[placement.worker_of[stage]].append(Compute(op, stage, microbatch))
    return WorkerOrders(orders)


ROWS = [
    (
        "such as 0 1 1 0",
        lambda: program("zb_v", placement="looped", stages_per_worker=2),
        lambda: program("zb_v", placement={0: 0, 1: 1, 2: 1, 3: 0}),
    ),
    (
        "pass stages_per_worker=2 and leave the placement out",
        lambda: program("zb_v", placement="looped"),
        lambda: program("zb_v", stages_per_worker=2),
    ),
    (
        "or take interleaved_1f1b, which works on any",
        lambda: program("dualpipe_v", placement="looped"),
        lambda: program("interleaved_1f1b", placement="looped"),
    ),
    (
        "take 1f1b, which works on any placement",
        lambda: program("zb_h1", placement={0: 0, 1: 1, 2: 0}),
        lambda: program("1f1b", placement={0: 0, 1: 1, 2: 0}),
    ),
    (
        "or placement='linear'",
        lambda: program("zb_h1", placement="looped", stages_per_worker=2),
        lambda: program("zb_h1", placement="linear", stages_per_worker=2),
    ),
    (
        "give one number for all workers, or one each",
        lambda: program(stages_per_worker=[1, 2, 1]),
        lambda: [program(stages_per_worker=n) for n in (2, [1, 2])],
    ),
    (
        "leave stages_per_worker out",
        lambda: program(placement={0: 0, 1: 1}, stages_per_worker=2),
        lambda: program(placement={0: 0, 1: 1}),
    ),
    (
        "number the stages from 0 without holes",
        lambda: program(placement={0: 0, 2: 1}),
        lambda: program(placement={0: 0, 1: 1}),
    ),
    (
        "or number the workers without holes",
        lambda: program(placement={0: 0, 1: 2}),
        lambda: program(placement={0: 0, 1: 1}),
    ),
    (
        "take one of linear, looped, v, or a dict",
        lambda: program(placement="spiral"),
        lambda: [program(placement=each) for each in ("linear", "looped", "v", {0: 1, 1: 0})],
    ),
    (
        "give one, or one each",
        lambda: program("list", memory=[2]),
        lambda: [program("list", memory=each) for each in (2, [2, 1])],
    ),
    (
        "give it at least 2",
        lambda: program("list", stages_per_worker=2, memory=1),
        lambda: program("list", stages_per_worker=2, memory=2),
    ),
    ("give one for each stage", lambda: simulated(forward={0: 1}), lambda: simulated(forward={0: 1, 1: 2})),
    ("give one for each", lambda: simulated(forward=[1]), lambda: simulated(forward=[1, 2])),
    ("must be above zero", lambda: simulated(bandwidth=0), lambda: simulated(bandwidth=1)),
    ("pass a longer step", lambda: drawn(step=1), lambda: drawn(step=10**4)),
    ("take another name", lambda: register("1f1b", one_by_one), lambda: registered(one_by_one)),
    ("it must return a WorkerOrders", lambda: registered(lambda placement, chunks: []), lambda: registered(one_by_one)),
]


def drawn(step):
    return render_text(simulated(forward=10**5).timeline, step=step)


def registered(schedule):
    """The program of a schedule of one's own."""
    name = f"test_advice_{len(REGISTRY)}"
    register(name, schedule)
    return program(name)


@pytest.fixture
def registry():
    """What is registered, which is as before after the test."""
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(("words", "fails", "advised"), ROWS, ids=[row[0] for row in ROWS])
def test_what_a_message_says_works(words, fails, advised):
    with pytest.raises(ScheduleError) as caught:
        fails()
    assert words in str(caught.value)
    made = advised()
    for each in made if isinstance(made, list) else [made]:
        if hasattr(each, "orders"):
            validate(each)
