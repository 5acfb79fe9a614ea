"""The executor: one call of a stage, waiting, queues of messages, and a new instruction."""

import copy
import os
import random
import re
import signal
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pippy import Pipe, PipelineDriver, PipelineDriver1F1B, pipe_split, pipeline
from pippy.drivers.base.errors import WorkerLostError
from pippy.drivers.engines.local.local_cluster import local_cluster
from pippy.drivers.lowering import lower
from pippy.drivers.lowering.flow import Work
from pippy.drivers.plan import add_communication, make_schedule, parse_program, simulate, validate
from pippy.drivers.plan.language.edges import Pass, produced_by
from pippy.drivers.plan.language.errors import ProgramError
from pippy.drivers.plan.language.instructions import (
    KINDS,
    Add,
    Compute,
    Free,
    Instruction,
    Kind,
    Op,
    Receive,
    Send,
    own_value,
)
from pippy.drivers.plan.language.scanner import Form
from pippy.drivers.worker import executor, handlers
from pippy.drivers.worker.executor import BINDERS
from pippy.drivers.worker.out_of_order import ComputationQueues
from tests.comparisons import assert_gradients, update
from tests.drivers.models import Chain
from tests.drivers.plan.graphs import with_random_graph
from tests.drivers.plan.test_properties import programs
from tests.drivers.processes import stop, within
from tests.drivers.thread_cluster import thread_cluster


class Skip(nn.Module):
    """Of four stages on two workers, both of the second take the same value of the first."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        used_later = self.layers[0](x)
        pipe_split()
        x = self.layers[1](used_later)
        pipe_split()
        x = self.layers[2](x)
        pipe_split()
        return self.layers[3](x) + used_later * x.sigmoid()


@pytest.fixture
def two():
    with thread_cluster(2) as cluster:
        yield cluster


@pytest.mark.usefixtures("in_float64", "seeded")
def test_a_value_that_two_stages_of_a_worker_take_is_counted_once_in_each(two):
    model = Skip()
    plain = copy.deepcopy(model)
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    driver = PipelineDriver(pipeline(model, nn.MSELoss()), two, schedule="interleaved_1f1b")
    driver.run(4, x, target)
    nn.MSELoss()(plain(x), target).backward()
    assert_gradients(driver, plain)


def test_what_one_call_alone_takes_is_no_copy_of_a_leaf(two, monkeypatch):
    detached = []
    inner = handlers.as_leaf
    monkeypatch.setattr(handlers, "as_leaf", lambda value: detached.append(value) or inner(value))
    driver = PipelineDriver(pipeline(Chain(2), nn.MSELoss()), two, check=False)
    driver.run(4, torch.randn(8, 8), torch.randn(8, 8))
    # for each micro-batch: the input of the model, and for the loss the target and the output, which was made on its worker
    assert len(detached) == 4 * 3


def test_only_what_was_received_and_is_taken_once_is_a_calls_own():
    def forward(stage, *takes):
        return Pass("F", stage), (Work("F", stage, f"submod_{stage}", 0, takes, (f"out{stage}",)),)

    work = dict([forward(1, "once", "twice", "here"), forward(3, "twice", "again", "again")])
    work[Pass("B", 1)] = (Work("B", 1, "submod_1", 0, (("gradient",),), ("other",)),)
    order = [Receive(name, 0, 0) for name in ("once", "twice", "again", "gradient")]
    program = SimpleNamespace(work=work, order=order)
    assert executor._received_for_one_call(program) == {"once"}


# What a worker says that it waits for: each instruction that waits names it, in a step and outside of one.


def do_until_worker_3_is_lost(workers, act, said):
    """Do something while worker 3 has stopped, in a thread. A worker waits for it, and says for what; then it is killed."""
    errors = []

    def run():
        try:
            act()
        except WorkerLostError as error:
            errors.append(error)

    stop(workers.session.workers[3].pid)
    thread, end = threading.Thread(target=run), time.monotonic() + 60
    thread.start()
    while not re.search(said, dump := workers.dump(0.3)):
        assert time.monotonic() < end, dump
    os.kill(workers.session.workers[3].pid, signal.SIGKILL)
    with within(5.0):
        thread.join()
    assert len(errors) == 1 and "worker3" in str(errors[0])


@pytest.mark.parametrize(
    ("updates", "act", "said"),
    [
        (
            0,
            lambda driver, optimizer: optimizer.step(),
            r"worker 1 .*: command (\d+), OptimizerStep, instruction \d+ of \d+: receive gradients of stage 1 part 0 from 3; "
            r"waits for gradients of stage 1 part 0 of step \1, from worker 3",
        ),
        (
            1,
            lambda driver, optimizer: optimizer.step(),
            r"worker 1 .*: command (\d+), OptimizerStep, instruction 2 of 2: receive parameters of stage 1 part 1 from 3; "
            r"waits for parameters of stage 1 part 1 of step \1, from worker 3",
        ),
        (
            1,
            lambda driver, optimizer: (driver.zero_grad(), driver.protect()),
            r"worker 0 .*: command (\d+), KeepState, instruction 2 of 2: receive state of worker 3 from 3; "
            r"waits for state of worker 3 of step \1, from worker 3",
        ),
    ],
    ids=["gradients", "parameters", "state"],
)
def test_a_worker_names_what_it_waits_for(alone, updates, act, said):
    """Before its first update a driver does not know which step is the last before it: `step` adds up gradients."""
    pipe = Pipe.from_sequential(nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))), nn.MSELoss())
    with local_cluster(4, threads=1) as workers:
        driver = PipelineDriver1F1B(pipe, workers, replicas=2)
        optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1, divide_state=True)
        for _ in range(updates):
            driver.run(4, torch.ones(8, 4), torch.ones(8, 4))
            update(optimizer)
        driver.run(4, torch.ones(8, 4), torch.ones(8, 4))
        do_until_worker_3_is_lost(workers, lambda: act(driver, optimizer), said)


# Whatever `ComputationQueues` allows to choose, every worker ends its program, in the orders on which the numbers depend.


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


# The table of instructions is whole, and one more instruction is added by the recipe of docs/changing.md.


@dataclass(frozen=True, slots=True)
class Weigh(Instruction):
    """Note how many bytes a value has."""

    value: str
    microbatch: int


def with_weighing(program):
    """The pass that emits the new instruction: before each send."""
    return program.with_orders(
        [
            new
            for each in order
            for new in ([Weigh(each.value, each.microbatch), each] if isinstance(each, Send) else [each])
        ]
        for order in program.orders
    )


@pytest.fixture
def weighed(monkeypatch):
    """The bytes of each value that was weighed. The instruction is there as long as a test runs."""
    found = {}

    def weigh(step, key):
        found[key] = step.values[key].nbytes

    monkeypatch.setitem(KINDS, Weigh, Kind(Form("weigh {value}.{microbatch}"), takes=own_value))
    monkeypatch.setitem(BINDERS, Weigh, lambda bound, each: (weigh, (own_value(each),)))
    monkeypatch.setattr(
        lower, "add_communication", lambda *given, **named: with_weighing(add_communication(*given, **named))
    )
    return found


def test_each_kind_has_a_handler():
    in_steps = {key for key, kind in KINDS.items() if kind.exchange is None or kind.exchange.in_steps}
    assert BINDERS.keys() == in_steps
    assert {key for key in KINDS if isinstance(key, Op)} == set(Op)


@pytest.mark.usefixtures("weighed")
def test_a_new_instruction_is_written_read_proven_and_simulated():
    plain = add_communication(make_schedule("1f1b", workers=2, chunks=2))
    program = with_weighing(plain)
    assert "  weigh activation_0.1\n  send activation_0.1 to 1\n" in str(program)
    assert parse_program(str(program)) == program
    validate(program)
    assert simulate(program).timeline == simulate(plain).timeline
    late = replace(program, orders=((*program.orders[0], Weigh("activation_0", 1)), program.orders[1]))
    with pytest.raises(ProgramError, match=r"weigh activation_0\.1: needs activation_0\.1, which was freed"):
        validate(late)


@pytest.mark.parametrize("out_of_order", [False, True])
@pytest.mark.usefixtures("in_float64", "seeded")
def test_a_new_instruction_runs(weighed, out_of_order):
    model = Chain(3)
    plain = copy.deepcopy(model)
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    with thread_cluster(3) as cluster:
        driver = PipelineDriver1F1B(pipeline(model, nn.MSELoss()), cluster, check=False, out_of_order=out_of_order)
        driver.run(4, x, target)
        nn.MSELoss()(plain(x), target).backward()
        assert_gradients(driver, plain)
    # 2 activations and 2 gradients for each of 4 micro-batches, of 2 rows of 8 numbers of 8 bytes
    assert len(weighed) == 4 * 4 and set(weighed.values()) == {2 * 8 * 8}
