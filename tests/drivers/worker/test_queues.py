"""Whatever `ComputationQueues` allows to choose, every worker ends its program, in the orders on which the numbers depend."""

import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pippy.drivers.plan import add_communication, make_schedule
from pippy.drivers.plan.language.edges import produced_by
from pippy.drivers.plan.language.instructions import Add, Compute, Free, Op, Receive, Send
from pippy.drivers.worker.out_of_order import ComputationQueues
from tests.drivers.plan.graphs import with_random_graph
from tests.drivers.plan.test_properties import programs

randoms = st.integers(0, 1 << 32).map(random.Random)


def queues_of(program, limit=None, gathers=None):
    """The queues of all workers of a lowered program."""
    takes, gives = defaultdict(list), defaultdict(list)
    for edge in program.flow:
        gives[edge.source].append(edge.value)
        for target in edge.targets if edge.value not in program.sum_of else ():
            takes[target].append(edge.value)
    return [
        ComputationQueues(
            order,
            program.backward,
            lambda each: takes.get(produced_by(each), ()),
            lambda each: gives.get(produced_by(each), ()),
            limit,
            gathers,
        )
        for order in program.orders
    ]


class Run:
    """All workers of a step. Values arrive when the dice say, and of what is allowed, the dice choose."""

    def __init__(self, program, queues, dice):
        self.program, self.queues, self.dice = program, queues, dice
        self.sent, self.arrived = [], set()
        self.held = [set() for _ in queues]
        makers = {edge.value: edge.source.stage for edge in program.flow}
        self.lacking = [
            {
                (value, microbatch): list(summands[1:])
                for value, summands in program.summands.items()
                for microbatch in range(program.chunks)
                if program.home(makers[value], microbatch) == worker
            }
            for worker in range(program.workers)
        ]
        self.done = [[] for _ in queues]
        for each in queues:
            each.begin()

    def finish(self):
        while any(each.left for each in self.queues):
            choices = [(worker, at) for worker, each in enumerate(self.queues) for at in self.possible(worker, each)]
            assert choices or self.sent, "all workers wait, and nothing is on its way"
            pick = self.dice.randrange(len(choices) + len(self.sent))
            if pick < len(choices):
                worker, at = choices[pick]
                for receive in self.queues[worker].awaited(at):
                    self.do(worker, receive)
                self.do(worker, at)
            else:
                self.arrived.add(self.sent.pop(pick - len(choices)))
        for worker, each in enumerate(self.queues):
            while rest := each.rest():
                self.do(worker, rest[0])

    def possible(self, worker, queues):
        order = self.program.orders[worker]
        if queues.left:
            head = next(at for at, each in enumerate(order) if isinstance(each, Compute) and not queues._done[at])
            assert head == queues.head() == queues.open()[0], "the head can be done whenever its values are here"
        for at in queues.open():
            if all((order[r].value, order[r].microbatch, worker) in self.arrived for r in queues.awaited(at)):
                yield at

    def do(self, worker, at):
        instruction = self.program.orders[worker][at]
        held = self.held[worker]
        match instruction:
            case Compute():
                done = produced_by(instruction)
                for edge in self.program.flow:
                    value = edge.value, instruction.microbatch
                    taken = done in edge.targets and edge.value not in self.program.sum_of
                    assert not taken or value in held, f"{instruction} has no {value}"
                    assert not taken or value not in self.lacking[worker], f"{value} is not whole"
                    if done == edge.source:
                        held.add(value)
            case Send(value, microbatch, to):
                assert (value, microbatch) in held and (value, microbatch) not in self.lacking[worker]
                self.sent.append((value, microbatch, to))
            case Receive(value, microbatch, _):
                assert (value, microbatch, worker) in self.arrived
                held.add((value, microbatch))
            case Free(value, microbatch):
                held.remove((value, microbatch))
            case Add(value, microbatch, into):
                held.remove((value, microbatch))
                lacking = self.lacking[worker][into, microbatch]
                assert (into, microbatch) in held and lacking.pop(0) == value
                if not lacking:
                    del self.lacking[worker][into, microbatch]
        self.done[worker].append(instruction)
        for follower in self.queues[worker].done(at):
            self.do(worker, follower)
        assert self.queues[worker].live <= self.queues[worker].limit


def kinds(instructions, stages):
    """The orders that the numbers hang on."""
    found = [[each for each in instructions if isinstance(each, Compute) and each.op == Op.FORWARD]]
    for stage in stages:
        own = [each for each in instructions if isinstance(each, Compute) and each.stage == stage]
        found.append([each for each in own if each.op in (Op.BACKWARD, Op.BACKWARD_INPUT)])
        found.append([each for each in own if each.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)])
    return found


@settings(max_examples=20)
@given(programs(largest=6), randoms, st.sampled_from([None, 0, 2, 50]), st.booleans())
def test_any_allowed_order_ends_as_it_should(program, dice, more, chain):
    lowered = add_communication(program if chain else with_random_graph(program, dice))
    limit = None if more is None else max(lowered.peak_live) + more
    queues = queues_of(lowered, limit)
    for _ in range(2):  # the second step begins anew
        run = Run(lowered, queues, dice)
        run.finish()
        for order, done, held in zip(lowered.orders, run.done, run.held):
            assert sorted(map(str, done)) == sorted(map(str, order)) and not held
            assert kinds(done, range(lowered.stages)) == kinds(order, range(lowered.stages))
    assert [each.peak for each in queues] == list(lowered.peak_live)


class Blind(random.Random):
    """Takes what is furthest in the program."""

    def randrange(self, stop):
        return stop - 1


@pytest.mark.parametrize("workers, chunks", [(2, 4), (4, 8)])
def test_overtaking_happens(workers, chunks):
    """Else the tests above would hold for the program's own order alone."""
    program = add_communication(make_schedule("fill_drain", workers=workers, chunks=chunks))
    run = Run(program, queues_of(program), Blind())
    run.finish()
    assert [each for each in run.done[-1] if isinstance(each, Compute)] != list(program.computations[-1])


def test_a_loss_over_all_micro_batches_waits_for_all():
    """Backwards of the last stage could begin at once, were the loss not one for the whole mini-batch."""
    program = add_communication(make_schedule("fill_drain", workers=2, chunks=3))
    for gathers, expected in ((1, ["F1.0", "F1.1", "F1.2"]), (None, ["F1.0", "B1.0", "F1.1"])):
        queues = queues_of(program, gathers=gathers)[1]
        done = []
        while queues.left:
            at = queues.open()[-1]
            for receive in queues.awaited(at):
                queues.done(receive)
            done.append(str(program.orders[1][at]))
            queues.done(at)
        assert done[:3] == expected


def test_more_memory_lets_forwards_run_ahead():
    program = add_communication(make_schedule("1f1b", workers=4, chunks=8))
    for limit, ahead in ((None, 4), (6, 6), (50, 8)):
        queues = queues_of(program, limit)[0]
        while forwards := [at for at in queues.open() if program.orders[0][at].op == Op.FORWARD]:
            queues.done(forwards[0])
        assert queues.live == ahead
