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


def program(name: Any = "1f1b", workers=2, chunks=2, **options):
    return make_schedule(name, workers=workers, chunks=chunks, **options)


def placed(placement: Any, **options):
    return program(placement=placement, **options)


def simulated(**costs: Any):
    return simulate(program(), **costs)


def drawn(step):
    return render_text(simulated(forward=10**5).timeline, step=step)


def one_by_one(placement: Placement, chunks: int) -> WorkerOrders:
    """A schedule of one's own: one micro-batch after the other."""
    orders: list[list[Compute]] = [[] for _ in range(placement.workers)]
    for chunk in range(chunks):
        for op, stages in ((F, range(placement.stages)), (B, reversed(range(placement.stages)))):
            for stage in stages:
                orders[placement.worker_of[stage]].append(Compute(op, stage, chunk))
    return WorkerOrders(orders)


def registered(change: Any = lambda orders: WorkerOrders(orders), name="mine", **options):
    """The program of a schedule of one's own, from what ``change`` makes of its orders."""
    register(name, lambda placement, chunks: change(one_by_one(placement, chunks).orders), **options)
    return program(name)


@pytest.fixture(autouse=True)
def registry():
    """What is registered, which is as before after the test."""
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


def test_a_schedule_of_the_users_own():
    register("alternating", one_by_one, placement="looped")
    assert simulate(program("alternating", workers=3, stages_per_worker=2)).makespan == 3 * 2 * 3


# Calls that are refused, by their errors, each with words of the message, and if these say what to write, with that: it works.
# Messages that only name what is known are not followed by a call.
REFUSED: dict[type[ScheduleError], list[tuple[Any, ...]]] = {
    UnknownScheduleError: [
        (lambda: program("gpipe"), "there is no schedule called 'gpipe'; take one of fill_drain, 1f1b"),
    ],
    ArgumentError: [
        (lambda: program(memory=3), "memory=3: 1f1b takes no options"),
        (lambda: program("list", cost=3), "cost=3: list takes costs, memory, halves, edges"),
        (
            lambda: program(stages_per_worker=[1, 2, 1]),
            "stages_per_worker=[1, 2, 1] has 3 entries for workers=2; give one number for all workers, or one each",
            lambda: [program(stages_per_worker=n) for n in (2, [1, 2])],
        ),
        (lambda: program(stages_per_worker=[1, 0]), "stages_per_worker=0 must be a whole number"),
        (
            lambda: program("list", memory=[2]),
            "give one, or one each",
            lambda: [program("list", memory=each) for each in (2, [2, 1])],
        ),
        (
            lambda: program("list", stages_per_worker=2, memory=1),
            "give it at least 2",
            lambda: program("list", stages_per_worker=2, memory=2),
        ),
        (lambda: simulated(forward=-1.0), "forward=-1.0 must be a number of at least 0"),
        (lambda: simulated(forward=float("nan")), "forward=nan must be a number"),
        (lambda: simulated(backward_input=float("inf")), "backward_input=inf must be a number"),
        (lambda: simulated(backward_weight="1"), "backward_weight='1' must be a number"),
        (lambda: simulated(forward=True), "forward=True must be a number"),
        (
            lambda: simulated(forward=[1.0]),
            "forward=[1.0] has 1 costs for 2 stages; give one for each",
            lambda: simulated(forward=[1, 2]),
        ),
        (lambda: simulated(forward=[1.0, -2.0]), "forward=-2.0 must be a number of at least 0"),
        (
            lambda: simulated(backward={0: 1.0}),
            "backward={0: 1.0} has no cost for stage 1; give one for each stage",
            lambda: simulated(backward={0: 1, 1: 2}),
        ),
        (lambda: simulated(latency={"activation_0": 1.0}), "has no entry for edge gradient_0"),
        (lambda: simulated(size=-1), "size=-1 must be a number of at least 0"),
        (lambda: simulated(bandwidth=0), "bandwidth=0 must be above zero", lambda: simulated(bandwidth=1)),
        (lambda: drawn(step=1), "pass a longer step", lambda: drawn(step=10**4)),
        (
            lambda: register("1f1b", one_by_one),
            "there is a schedule called '1f1b' already; take another name",
            registered,
        ),
        (
            lambda: registered(lambda orders: orders),
            "schedule mine returned [[Compute(op=<Op.FORWARD: 'F'>, stage=0, microbatch=0), C...; it must return a",
            lambda: registered(name="other"),
        ),
        (lambda: registered(lambda orders: WorkerOrders(orders[:1])), "orders of 1 workers for placement 0 1"),
        (lambda: program(["1f1b"]), "name=['1f1b'] is a list"),
        (lambda: program("list", costs=3), "costs=3 is a int; give Costs("),
        *(
            (lambda call=call, given=given: call(given), words)
            for call, given, words in (
                (simulate, "text", "program='text' is a str"),
                (validate, None, "program=None is a NoneType"),
                (add_communication, 7, "program=7 is a int"),
                (parse_program, b"pippy", "text=b'pippy' is a bytes"),
                (lambda given: register("mine", given), 3, "schedule=3 is a int"),
                (lambda given: register(given, one_by_one), 3, "name=3 is a int"),
            )
        ),
    ],
    PlacementError: [
        (
            lambda: placed("spiral"),
            "placement 'spiral' is unknown; take one of linear, looped, v, or a dict",
            lambda: [placed(each) for each in ("linear", "looped", "v", {0: 1, 1: 0})],
        ),
        (lambda: placed([0, 1]), "placement [0, 1] is unknown; take one of linear, looped, v, or a dict"),
        (lambda: placed(1), "placement 1 is unknown"),
        (lambda: placed({}), "the placement () holds no stage"),
        (
            lambda: placed({0: 0, 2: 1}),
            "stage 1 has no worker in placement {0: 0, 2: 1}; number the stages from 0 without holes",
            lambda: placed({0: 0, 1: 1}),
        ),
        (lambda: placed({1: 0, 2: 1}), "stage 0 has no worker"),
        (
            lambda: placed({0: 0, 1: 2}),
            "worker 1 holds no stage in placement 0 2; give it one, or number the workers without holes",
            lambda: placed({0: 0, 1: 1}),
        ),
        (lambda: placed({0: 0, 1: 10**9}), "worker 1 holds no stage"),
        (lambda: placed({0: 1, 1: 1}), "worker 0 holds no stage in placement 1 1"),
        (lambda: placed({0: 0, 1: -1}), "-1 is no worker's number in placement 0 -1"),
        (lambda: placed({0: 0, 1: "1"}), "'1' is no worker's number"),
        (lambda: placed({0: 0, 1: 0}), "placement 0 0 is for 1 workers, not for workers=2"),
        (lambda: placed({0: 0, 1: 1, 2: 2}), "placement 0 1 2 is for 3 workers, not for workers=2"),
        (
            lambda: placed({0: 0, 1: 1}, stages_per_worker=2),
            "placement 0 1 does not hold stages_per_worker=2; leave stages_per_worker out",
            lambda: placed({0: 0, 1: 1}),
        ),
        (
            lambda: program("zb_v", placement="looped", stages_per_worker=2),
            "such as 0 1 1 0",
            lambda: program("zb_v", placement={0: 0, 1: 1, 2: 1, 3: 0}),
        ),
        (
            lambda: program("zb_v", placement="looped"),
            "pass stages_per_worker=2 and leave the placement out",
            lambda: program("zb_v", stages_per_worker=2),
        ),
        (
            lambda: program("dualpipe_v", placement="looped"),
            "or take interleaved_1f1b, which works on any",
            lambda: program("interleaved_1f1b", placement="looped"),
        ),
        (
            lambda: program("zb_h1", placement={0: 0, 1: 1, 2: 0}),
            "not placement 0 1 0; take 1f1b, which works on any placement",
            lambda: placed({0: 0, 1: 1, 2: 0}),
        ),
        *(
            (
                lambda name=name: program(name, placement="looped", stages_per_worker=2),
                f"{name} needs one run of adjacent stages",
                lambda name=name: program(name, placement="linear", stages_per_worker=2),
            )
            for name in ("zb_h1", "zb_h2")
        ),
    ],
    ProgramError: [
        (
            lambda: registered(lambda orders: WorkerOrders([order[:2] for order in orders])),
            "program mine cannot run: 4 faults\n- worker 0, at the end: F0.1 is missing",
        ),
        (
            lambda: registered(lambda orders: WorkerOrders([order[::-1] for order in orders])),
            "worker 0, B0.1: comes before F0.1",
        ),
        (
            lambda: registered(lambda orders: WorkerOrders(orders, memory=[0, 0])),
            "worker 1 holds 1 stage-micro-batches at its peak; the stated limit is 0",
        ),
        (lambda: add_communication(program().with_orders([program().orders[0][:1], program().orders[1]])), "B0.0"),
    ],
}


@pytest.mark.parametrize(("error", "row"), [(error, row) for error, rows in REFUSED.items() for row in rows])
def test_what_is_refused_and_that_what_the_message_says_works(error, row):
    fails, words, *advised = row
    assert issubclass(error, ScheduleError)
    with pytest.raises(error) as caught:
        fails()
    assert words in str(caught.value)
    for made in (call() for call in advised):
        for each in made if isinstance(made, list) else [made]:
            if hasattr(each, "orders"):
                validate(each)
