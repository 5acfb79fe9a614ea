"""What validate refuses, case by case, and how it says so."""

import random

import networkx
import pytest

from pippy.drivers.plan import add_communication, make_schedule, simulate, validate
from pippy.drivers.plan.language.edges import Checkpoints, Replicated
from pippy.drivers.plan.language.errors import ArgumentError, ProgramError
from pippy.drivers.plan.language.instructions import Compute, Op
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.proofs.waits import circles
from tests.drivers.plan.graphs import build, edges, marked


def faults(program: Program, buffer: int | None = None) -> list[str]:
    try:
        validate(program, buffer)
    except ProgramError as error:
        assert all(fault in str(error) for fault in error.faults)
        return list(error.faults)
    return []


X_0, LAST = "needs x.0, which is not here yet", "there is no micro-batch 1; the program has 1"
TO_BOTH, NOT_TO_0 = edges("x F0 -> F1 F2"), "x is not needed on worker 0; 1 2 needs it"
SUM = {"edges": (), "replicated": (Replicated("emb.weight", (0, 1)),)}
THERE = "receive gradients of emb.weight from 1 / reduce emb.weight / send sum of emb.weight to 1"
HERE = "send gradients of emb.weight to 0 / receive sum of emb.weight from 0"
BEGUN = "F0.0 / B0.0"
OTHER = f"F1.0 / B1.0 / {HERE}"

# Programs on a worker for each stage, with what is wrong with them behind arrows.
COMPUTED = [
    "F0.0 / B0.0 | F1.0 / B1.0",
    "F0.0 / I0.0 / W0.0 | F1.0 / B1.0",
    "F0.0 / ← B0.0 is missing | F1.0 / B1.0",
    "F0.0 / I0.0 / ← W0.0 is missing | F1.0 / B1.0",
    "F0.0 / B0.0 | F1.0 / B1.0 / B1.0 ← is computed twice",
    "F0.0 / B0.0 | B1.0 ← comes before F1.0 / F1.0",
    "F0.0 / W0.0 ← comes before I0.0 / I0.0 | F1.0 / B1.0",
    "F0.0 / I0.0 / W0.0 / B0.0 ← is computed in I0.0 already ← is computed in W0.0 already | F1.0 / B1.0",
    "F0.0 / B0.0 / F2.0 ← there is no stage 2; the program has 2 | F1.0 / B1.0",
    f"F0.0 / B0.0 / F0.1 ← {LAST} | F1.0 / B1.0",
    "F0.0 / F1.0 ← stage 1 is on worker 1 / B0.0 | B1.0 ← comes before F1.0 / ← F1.0 is missing",
]
SENT = [  # a value of stage 0 for stage 1
    "F0.0 / send x.0 to 1 / free x.0 | receive x.0 from 0 / F1.0 / free x.0",
    "F0.0 / send x.0 to 1 | receive x.0 from 0 / F1.0",  # without frees
    "F0.0 / free x.0 | receive x.0 from 0 ← is never sent by worker 0 / F1.0 / free x.0",
    f"F0.0 / send x.0 to 1 ← is never received by worker 1 | F1.0 ← {X_0}",
    "F0.0 / send x.0 to 1 / send x.0 to 1 ← is never received by worker 1 | receive x.0 from 0 / F1.0",
    "F0.0 / send x.0 to 1 / send x.0 to 1 | receive x.0 from 0 / receive x.0 from 0 ← was received before / F1.0",
    f"send x.0 to 1 ← {X_0} / F0.0 | receive x.0 from 0 / F1.0",
    f"F0.0 / send x.0 to 1 | F1.0 ← {X_0} / receive x.0 from 0",
    "F0.0 / free x.0 / send x.0 to 1 ← needs x.0, which was freed | receive x.0 from 0 / F1.0 / free x.0",
    "F0.0 / send x.0 to 1 / free x.0 / free x.0 ← needs x.0, which was freed | receive x.0 from 0 / F1.0 / free x.0",
    "F0.0 / send x.0 to 1 / free x.0 | receive x.0 from 0 / F1.0 / ← x.0 is never freed",
    "F0.0 / send x.0 to 1 / send x.0 to 1 / free x.0 | "
    "receive x.0 from 0 / F1.0 / free x.0 / receive x.0 from 0 ← was received before",
    "F0.0 / send x.0 to 1 / send y.0 to 1 ← no edge of the program is called y | "
    "receive x.0 from 0 / receive y.0 from 0 ← no edge of the program is called y / F1.0",
    "F0.0 / send x.0 to 1 / send x.0 to 7 ← x is not needed on worker 7; 1 needs it ← is never received by worker 7 | "
    "receive x.0 from 0 / F1.0",
    "F0.0 / send x.0 to 1 | "
    "receive x.0 from 0 / receive x.0 from 3 ← x is made on worker 0 ← is never sent by worker 3 / F1.0",
    f"F0.0 / send x.0 to 1 / send x.1 to 1 ← {LAST} | receive x.0 from 0 / receive x.1 from 0 ← {LAST} / F1.0",
]
HANDED_ON = [  # a value of stage 0 for stages 1 and 2
    "F0.0 / send x.0 to 1 | receive x.0 from 0 / send x.0 to 2 / F1.0 | receive x.0 from 1 / F2.0",
    f"F0.0 / send x.0 to 1 | send x.0 to 2 ← {X_0} / receive x.0 from 0 / F1.0 | receive x.0 from 1 / F2.0",
    "F0.0 / send x.0 to 1 / free x.0 | "
    "receive x.0 from 0 / F1.0 / free x.0 / send x.0 to 2 ← needs x.0, which was freed | receive x.0 from 1 / F2.0 / free x.0",
    "F0.0 / send x.0 to 1 | receive x.0 from 0 / F1.0 / "
    "send x.0 to 2 ← hands on x.0 after F1.0, which may have changed it | receive x.0 from 1 / F2.0",
    "F0.0 / send x.0 to 3 ← x is not needed on worker 3; 1 2 needs it | "
    f"F1.0 ← {X_0} | receive x.0 from 3 ← x is made on worker 0 / F2.0 ← {X_0} | "
    "receive x.0 from 0 ← x is not needed on worker 3; 1 2 needs it / send x.0 to 2 ← x is made on worker 0 / F3.0",
    "F0.0 / send x.0 to 1 / send x.0 to 2 | receive x.0 from 0 / send x.0 to 1 ← x is not needed on worker 1; 1 2 needs it "
    "← is never received by worker 1 / F1.0 | receive x.0 from 0 / F2.0",
    f"F0.0 / send x.0 to 1 / send x.0 to 2 / receive x.0 from 1 ← {NOT_TO_0} | "
    f"receive x.0 from 0 / send x.0 to 0 ← {NOT_TO_0} / F1.0 | receive x.0 from 0 / F2.0",
    "F0.0 / send x.0 to 1 / send x.0 to 2 | receive x.0 from 0 / send x.0 to 2 / F1.0 | "
    "receive x.0 from 0 / receive x.0 from 1 ← was received before / F2.0",
]
ADDED_UP = [  # gradients of two copies
    f"{BEGUN} / {THERE} | {OTHER}",
    f"F0.0 / I0.0 / W0.0 / {THERE} | {OTHER}",
    f"{BEGUN} / {THERE.replace(' /', ' ← is never sent by worker 1 /', 1)} | "
    "F1.0 / B1.0 / receive sum of emb.weight from 0 / ← send gradients of emb.weight to 0 is missing",
    f"F0.0 / {THERE.replace('reduce emb.weight', 'reduce emb.weight ← comes before B0.0')} / B0.0 | {OTHER}",
    f"{BEGUN} / reduce emb.weight ← comes before receive gradients of emb.weight from 1 / "
    f"receive gradients of emb.weight from 1 / send sum of emb.weight to 1 | {OTHER}",
    f"{BEGUN} / {THERE} / reduce emb.weight ← comes twice | {OTHER}",
    f"{BEGUN} / {THERE} | F1.0 / {HERE.replace(' /', ' ← comes before B1.0 / B1.0 /', 1)}",
    f"{BEGUN} / receive gradients of emb.weight from 1 / "
    f"send sum of emb.weight to 1 ← comes before reduce emb.weight / reduce emb.weight | {OTHER}",
    f"{BEGUN} / {THERE} / reduce other ← the program has no sum other | {OTHER}",
    f"{BEGUN} / {THERE} | {OTHER} / reduce emb.weight ← does not belong to the sum of emb.weight on worker 0",
]
KEPT = "the forward kept its inputs only"
AGAIN = [  # forwards of two micro-batches run again
    f"F0.0 / F0.1 / B0.0 ← comes before R0.0: {KEPT} / R0.1 / B0.1 / ← R0.0 is missing",
    "F0.0 / F0.1 / R0.0 / R0.0 ← is computed twice / B0.0 / R0.1 / B0.1",
    f"F0.0 / F0.1 / B0.0 ← comes before R0.0: {KEPT} / R0.0 ← is computed in B0.0 already / R0.1 / B0.1",
    "F0.0 / R0.1 ← comes before F0.1 / F0.1 / R0.0 / B0.0 / B0.1",
    "F0.0 / F0.1 / R0.0 / B0.0 / R0.1 / I0.1 / R0.1 ← is computed twice ← is computed in I0.1 already / W0.1",
]
READ = "whose keys and values it reads: slices of a sequence go forward in order"
GIVES = "which gives gradients of its keys and values: slices of a sequence go backward from the last to the first"
SLICES = [  # two rows of two slices
    "F0.0 / F0.1 / F0.2 / F0.3 / B0.1 / B0.0 / B0.3 / B0.2",
    "F0.0 / F0.2 / F0.1 / F0.3 / B0.1 / B0.0 / B0.3 / B0.2",
    f"F0.1 ← comes before F0.0, {READ} / F0.0 / F0.2 / F0.3 / B0.1 / B0.0 / B0.3 / B0.2",
    f"F0.0 / F0.1 / F0.2 / F0.3 / B0.1 / B0.0 / B0.2 ← comes before B0.3, {GIVES} / B0.3",
    f"F0.0 / F0.1 / F0.2 / F0.3 / I0.0 ← comes before I0.1, {GIVES} / W0.0 / I0.1 / W0.1 / B0.3 / B0.2",
]
ONE_WAY = {"backward": (), "edges": edges("x F0 -> F1")}
MARKED = [
    *((text, {}) for text in COMPUTED),
    *((text, ONE_WAY) for text in SENT),
    *((text, {"backward": (), "edges": TO_BOTH}) for text in HANDED_ON),
    *((text, SUM) for text in ADDED_UP),
    *((text, {"chunks": 2, "checkpoints": (Checkpoints(0, (0, 1)),)}) for text in AGAIN),
    *((text, {"chunks": 4, "slices": 2}) for text in SLICES),
    (
        "F0.0 / F0.1 / R0.0 / B0.0 / R0.1 ← has nothing to compute again: F0.1 keeps what the backward needs / B0.1",
        {"chunks": 2, "checkpoints": (Checkpoints(0, (0,)),)},
    ),
]


@pytest.mark.parametrize(("text", "options"), MARKED)
def test_what_is_wrong_with_a_program(text, options):
    orders, found = marked(text)
    assert sorted(faults(build(orders, tuple(range(orders.count("|") + 1)), **options))) == sorted(found)


def test_negative_numbers_address_nothing():
    program = build("F0.0, B0.0", (0,))
    wrong = program.with_orders([[*program.orders[0], Compute(Op.FORWARD, -1, 0), Compute(Op.FORWARD, 0, -1)]])
    assert faults(wrong) == [
        "worker 0, F-1.0: there is no stage -1; the program has 1",
        "worker 0, F0.-1: there is no micro-batch -1; the program has 1",
    ]


def test_a_stage_without_a_backward_has_none():
    assert faults(build("F0.0 | F1.0, B1.0", (0, 1), backward=(1,))) == []
    assert faults(build("F0.0, B0.0", (0,), backward=())) == ["worker 0, B0.0: stage 0 has no backward"]


def test_the_stated_memory_is_kept():
    program = build("F0.0, F0.1, B0.0, B0.1", (0,), chunks=2, memory=(1,))
    assert faults(program) == ["worker 0 holds 2 stage-micro-batches at its peak; the stated limit is 1"]
    assert faults(build("F0.0, B0.0, F0.1, B0.1", (0,), chunks=2, memory=(1,))) == []


def test_a_weight_half_holds_its_micro_batch():
    orders = "F0.0, I0.0, F0.1, I0.1, W0.0, W0.1"
    assert faults(build(orders, (0,), chunks=2, memory=(2,))) == []
    assert len(faults(build(orders, (0,), chunks=2, memory=(1,)))) == 1


def test_communication_in_a_program_that_implies_it():
    program = build("F0.0, free x.0", (0,), backward=())
    implied = Program("test", program.placement, 1, program.orders, ())
    (fault,) = faults(implied)
    assert fault == "worker 0, free x.0: is not a computation, and the program says that communication is implied"


def test_a_circular_wait_is_drawn_as_a_chain():
    program = build("F0.1, F0.0, B0.0, B0.1 | F1.0, B1.0, F1.1, B1.1", (0, 1), chunks=2)
    assert faults(program) == []
    program = build("F0.0, B0.0, F0.1, B0.1 | F1.1, F1.0, B1.0, B1.1", (0, 1), chunks=2)
    with pytest.raises(ProgramError) as caught:
        validate(program)
    assert caught.value.faults == (
        "circular wait:\n"
        "    worker 0 at B0.0 waits for worker 1 to do B1.0\n"
        "    worker 1 at F1.1 waits for worker 0 to do F0.1",
    )
    assert str(caught.value).endswith(
        "worker 0\n"
        "  F0.0\n"
        "  B0.0    <-- waits for B1.0 on worker 1\n"
        "  F0.1\n"
        "  B0.1\n"
        "worker 1\n"
        "  F1.1    <-- waits for F0.1 on worker 0\n"
        "  F1.0\n"
        "  B1.0\n"
        "  B1.1"
    )


def test_two_circles_are_two_faults():
    orders = "F0.0, B0.0, F0.1, B0.1 | F1.1, F1.0, B1.0, B1.1 | F2.0, B2.0, F2.1, B2.1 | F3.1, F3.0, B3.0, B3.1"
    pairs = edges("a F0 -> F1", "b B1 -> B0", "c F2 -> F3", "d B3 -> B2")
    assert len(faults(build(orders, (0, 1, 2, 3), chunks=2, edges=pairs))) == 2


def test_a_skip_is_waited_for():
    skip = edges("x F0 -> F1", "y F1 -> F2", "s F0 -> F2")
    assert faults(build("F0.0, F2.0 | F1.0", (0, 1, 0), backward=(), edges=skip)) == []
    assert faults(build("F2.0, F0.0 | F1.0", (0, 1, 0), backward=(), edges=skip)) != []


def test_receives_follow_the_order_of_their_channel():
    orders = "F0.0, send x.0 to 1, F0.1, send x.1 to 1 | receive x.1 from 0, receive x.0 from 0, F1.0, F1.1"
    program = build(orders, (0, 1), chunks=2, backward=(), edges=edges("x F0 -> F1"))
    assert faults(program) == ["worker 1, receive x.1 from 0: comes out of order: worker 0 sends x.0 first"]


def test_a_channel_with_few_slots_jams():
    both = edges("x F0 -> F1", "y F2 -> F3")
    orders = (
        "F0.0, send x.0 to 1, F0.1, send x.1 to 1, receive y.0 from 1, F3.0, receive y.1 from 1, F3.1 | "
        "F2.0, send y.0 to 0, F2.1, send y.1 to 0, receive x.0 from 0, F1.0, receive x.1 from 0, F1.1"
    )
    program = build(orders, (0, 1, 1, 0), chunks=2, backward=(), edges=both)
    assert faults(program) == faults(program, buffer=2) == []
    assert faults(program, buffer=1) == [
        "circular wait:\n"
        "    worker 0 at send x.1 to 1 waits for worker 1 to do receive x.0 from 0\n"
        "    worker 1 at send y.1 to 0 waits for worker 0 to do receive y.0 from 1"
    ]


WAITS = {
    "F1.0, F0.0, B1.0, B0.0": ({"placement": (0, 0)}, ["worker 0 at F1.0 waits for worker 0 to do F0.0"]),
    "F0.0 | receive x.0 from 2, send x.0 to 2, F1.0 | receive x.0 from 1, send x.0 to 1, F2.0": (
        {"backward": (), "edges": TO_BOTH},
        [
            "worker 1 at receive x.0 from 2 waits for worker 2 to do send x.0 to 1",
            "worker 2 at receive x.0 from 1 waits for worker 1 to do send x.0 to 2",
        ],
    ),
    "receive y.0 from 1, F0.0, send x.0 to 1, F2.0 | receive x.0 from 0, F1.0, send y.0 to 0": (
        {"placement": (0, 1, 0), "backward": (), "edges": edges("x F0 -> F1", "y F1 -> F2")},
        [
            "worker 0 at receive y.0 from 1 waits for worker 1 to do send y.0 to 0",
            "worker 1 at receive x.0 from 0 waits for worker 0 to do send x.0 to 1",
        ],
    ),
    f"{BEGUN} / {THERE} | F1.0 / B1.0 / receive sum of emb.weight from 0 / send gradients of emb.weight to 0": (
        SUM,
        [
            "worker 0 at receive gradients of emb.weight from 1 waits for worker 1 to do send gradients of emb.weight to 0",
            "worker 1 at receive sum of emb.weight from 0 waits for worker 0 to do send sum of emb.weight to 1",
        ],
    ),
    "receive gradients of emb.weight from 1 / F0.0 / send x.0 to 1 / B0.0 / reduce emb.weight / send sum of emb.weight to 1 | "
    f"receive x.0 from 0 / {OTHER}": (
        SUM | {"edges": edges("x F0 -> F1")},
        [
            "worker 0 at receive gradients of emb.weight from 1 waits for worker 1 to do send gradients of emb.weight to 0",
            "worker 1 at receive x.0 from 0 waits for worker 0 to do send x.0 to 1",
        ],
    ),
}


@pytest.mark.parametrize("orders", WAITS)
def test_a_circular_wait_is_refused(orders):
    options, chain = WAITS[orders]
    given = {"placement": tuple(range(orders.count("|") + 1)), **options}
    assert faults(build(orders.replace(" /", ","), **given)) == ["\n    ".join(["circular wait:", *chain])]


def test_a_simulation_waits_for_gradients_and_sums():
    """Worker 0 computes when worker 1 has done all. What it waits for behind its computations is drain."""
    early = "receive gradients of emb.weight from 1, F0.0, B0.0, reduce emb.weight, send sum of emb.weight to 1"
    result = simulate(build(f"{early} | {OTHER}".replace(" /", ","), (0, 1), **SUM))
    assert [(each.start, each.end) for each in result.timeline.spans[0]] == [(3, 4), (4, 6)]
    assert [(each.fill, each.drain, each.waiting) for each in result.idle_parts] == [(3, 0, {}), (0, 3, {})]


def test_all_faults_are_in_one_error():
    program = make_schedule("1f1b", workers=4, chunks=8)
    found = faults(program.with_orders(order[1:] for order in program.orders))
    assert len([fault for fault in found if "is missing" in fault]) == 4
    assert len([fault for fault in found if "comes before" in fault]) == 4


def test_a_long_program_is_shown_around_its_faults():
    program = make_schedule("1f1b", workers=8, chunks=64)
    with pytest.raises(ProgramError) as caught:
        validate(program.with_orders([program.orders[0][:-1], *program.orders[1:]]))
    text = str(caught.value)
    assert "(end)    <-- B0.63 is missing" in text
    assert "  ..." in text
    assert len(text.splitlines()) < 60


@pytest.mark.parametrize("buffer", [0, -1, 1.5, True])
def test_a_buffer_that_cannot_be_is_refused(buffer):
    with pytest.raises(ArgumentError, match=r"buffer=.* must be a whole number of at least 1"):
        validate(make_schedule("1f1b", workers=1, chunks=1), buffer)


NEEDED = {"1f1b": 1, "eager_1f1b": 1, "interleaved_1f1b": 1, "zb_v": 2, "v_half": 1, "v_min": 1, "dualpipe_v": 2}


@pytest.mark.parametrize(("name", "buffer"), NEEDED.items())
def test_what_channels_the_schedules_need(name, buffer):
    stages = 2 if name == "interleaved_1f1b" else None
    validate(add_communication(make_schedule(name, workers=4, chunks=12, stages_per_worker=stages)), buffer)


def test_the_circles_are_those_that_a_library_of_graphs_finds():
    for seed in range(300):
        draw = random.Random(seed)
        waits = {worker: draw.randrange(9) for worker in range(draw.randint(1, 8)) if draw.random() < 0.9}
        graph = networkx.DiGraph(waits.items())
        knots = [sorted(knot) for knot in networkx.strongly_connected_components(graph) if graph.subgraph(knot).edges]
        found = list(circles(waits))
        assert sorted(map(sorted, found)) == sorted(knots)
        assert all(waits[one] == other for circle in found for one, other in zip(circle, circle[1:] + circle[:1]))
