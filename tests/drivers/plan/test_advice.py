"""What a message about schedules says to do gives a program that is right. Messages that only name what is known are not
here.
"""

import pytest

from pippy.drivers.plan import make_schedule, register, render_text, simulate, validate
from pippy.drivers.plan.language.errors import ScheduleError
from pippy.drivers.plan.language.instructions import Compute
from pippy.drivers.plan.orders.registry import REGISTRY
from pippy.drivers.plan.orders.schedule import B, F, WorkerOrders


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
