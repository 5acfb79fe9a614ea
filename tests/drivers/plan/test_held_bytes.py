"""What is held is counted a second time here: with a set of all that the table of values and the runs of stages have."""

import random

import pytest

from pippy.drivers.plan import add_communication, make_schedule
from pippy.drivers.plan.cost.held_bytes import Held, ModelInput, PipeBytes, StageBytes, held_bytes, lowered_program
from pippy.drivers.plan.language.edges import Edge, Pass, Replicated
from pippy.drivers.plan.language.instructions import Add, Compute, Free, Receive
from pippy.drivers.plan.orders.registry import REGISTRY
from tests.drivers.plan.graphs import build, with_random_graph


def size_of(program, sizes, thing):
    names = program.summands[thing[1]] if thing[0] == "sum" else [thing[-2]]
    return max(sizes.values[name] for name in names)


def held_after(program, sizes, worker):
    """The bytes that are held after each instruction: those of all different things that something has."""
    table, runs, deferred, graded = set(), {}, set(), set()
    found = []
    for each in program.orders[worker]:
        match each:
            case Receive(value, m, _):
                table.add((value, m))
            case Free(value, m):
                table -= {(value, m), ("sum", value, m)}
            case Add(value, m, into):
                table -= {(value, m), (into, m)}
                table.add(("sum", into, m))
            case Compute(op, stage, m):
                takes = {(edge.value, m) for edge in program.flow if Pass("F", stage) in edge.targets}
                gives = {(edge.value, m) for edge in program.flow if edge.source == Pass("F", stage)}
                own = {each for each in gives if each[0] in sizes.stages[stage].kept_outputs}
                needed = {each for each in takes if each[0] not in sizes.stages[stage].freed_inputs}
                if op == "F":
                    table |= gives
                if stage in program.backward:
                    again = (stage, m) in program.checkpointed
                    own = {("again", *each) for each in own} if again else own
                    if op == "F" and again:
                        runs[stage, m] = takes | {("before", stage, m)}
                    elif op in "FR":
                        runs[stage, m] = needed | own | {("graph", stage, m)}
                    elif op == "W":
                        deferred.remove((stage, m))
                    else:
                        del runs[stage, m]
                        table |= {(edge.value, m) for edge in program.flow if edge.source == Pass("B", stage)}
                        if op == "I":
                            deferred.add((stage, m))
                        graded.add((stage, "early"))
                    if op in "BW":
                        graded.add((stage, "late"))
        things = table.union(*runs.values())
        held = sum(size_of(program, sizes, thing) for thing in things if thing[0] not in ("before", "graph"))
        for what, name in (("before", "repeating"), ("graph", "kept")):
            held += sum(getattr(sizes.stages[thing[1]], name) for thing in things if thing[0] == what)
        held += sum(sizes.stages[stage].deferred for stage, _ in deferred)
        for stage, when in graded:
            early = sizes.stages[stage].early_gradients
            held += early if when == "early" else sizes.stages[stage].gradients - early
        found.append(held)
    return found


@pytest.mark.parametrize("name", [name for name, entry in REGISTRY.items() if entry.training])
@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
def test_all_that_something_has_is_counted_once(name, checkpoint):
    rng = random.Random(f"{name} {checkpoint}")
    program = make_schedule(name, workers=2, chunks=4, checkpoint=checkpoint)
    lowered = add_communication(with_random_graph(program, rng))
    number = lambda: rng.randrange(1, 100)  # noqa: E731

    def stage_bytes(stage):
        takes = frozenset(edge.value for edge in lowered.flow if Pass("F", stage) in edge.targets if rng.random() < 0.3)
        gives = frozenset(edge.value for edge in lowered.flow if edge.source == Pass("F", stage) if rng.random() < 0.5)
        return StageBytes(0, 99, 0, number(), gives, takes, number(), number(), early_gradients=number())

    stages = tuple(map(stage_bytes, range(lowered.stages)))
    sizes = PipeBytes(stages, {edge.value: number() for edge in lowered.flow})
    for worker, found in enumerate(held_bytes(lowered, sizes)):
        again = held_after(lowered, sizes, worker)
        assert list(found.after) == [*again, again[-1]], worker
        assert found.peak.total == max(found.most) and found.most[found.at] == found.peak.total


def test_a_peak_by_kind():
    """By hand. The peak of worker 1 is while B1.0 runs: the input of micro-batch 0 is there, and all that it keeps."""
    program = make_schedule("1f1b", workers=2, chunks=2)
    first = StageBytes(1000, 1000, 2000, kept=50, forward=70, first_backward=9)
    last = StageBytes(100, 100, kept=40, forward=45, backward=21, first_backward=131, results=1)
    given = ModelInput("x", bytes=3, total=6, stages=(0,))
    sizes = PipeBytes((first, last), {"activation_0": 5, "gradient_0": 7}, inputs=(given,))
    one, other = held_bytes(program, sizes)
    # F0.0 leaves its output and what is kept; F0.1 takes 70 for a while; then B0.0 brings the gradients, which stay
    assert one.peak == Held(parameters=1000, gradients=1000, optimizer=2000, kept=50, inputs=6, values=7)
    assert other.peak == Held(parameters=100, kept=40, inputs=5, working=131)
    assert str(add_communication(program).orders[1][other.at]) == "B1.0"
    assert other.after[-1] == 202  # parameters, gradients, and two results


@pytest.mark.parametrize("stay", [True, False])
def test_inputs_of_the_model_are_there_from_the_start(stay):
    program = make_schedule("fill_drain", workers=1, chunks=4)
    given = ModelInput("x", bytes=3, total=12, stages=(0,))
    (found,) = held_bytes(program, PipeBytes((StageBytes(kept=1),), inputs=(given,), inputs_stay=stay))
    assert found.peak.total == 12 + 4 and found.after[-1] == (12 if stay else 0)


def test_an_output_that_is_a_parameter_counts_where_it_was_sent():
    program = build("F0.0, B0.0 | F1.0, B1.0", (0, 1)).for_graph(
        [Edge("weight", Pass("F", 0), (Pass("F", 1),)), Edge("grad", Pass("B", 1), (Pass("B", 0),))]
    )
    sizes = PipeBytes((StageBytes(parameters=8), StageBytes()), {"weight": 8, "grad": 8}, owned=frozenset(["weight"]))
    one, other = held_bytes(program, sizes)
    assert (one.peak.total, other.peak.total) == (16, 8)


def test_gradients_of_copies_are_added_up_at_the_end():
    """The first worker holds another's gradients while it adds them to its own. Others take the sum for what they have sent."""
    for workers in (2, 3):
        program = make_schedule("1f1b", workers=workers, chunks=1)
        program = program.for_graph(program.flow, replicated=[Replicated("emb", tuple(range(workers)))])
        stage = StageBytes(parameters=10, gradients=10)
        one, *others = held_bytes(program, PipeBytes((stage,) * workers, replicated={"emb": 10}))
        assert one.peak == Held(parameters=10, gradients=10, working=10)
        assert str(lowered_program(program).orders[0][one.at]) == "receive gradients of emb from 1"
        assert {each.peak for each in others} == {Held(parameters=10, gradients=10)}
