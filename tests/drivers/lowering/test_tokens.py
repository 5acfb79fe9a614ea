"""The programs that make tokens: their text, and what is proven of them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from pippy import PipelineDriver1F1B, PipelineDriverInterleaved1F1B, pipeline
from pippy.drivers.plan import add_communication, make_schedule, parse_program, render_text, simulate, validate
from pippy.drivers.plan.language.errors import ProgramError
from pippy.drivers.plan.language.instructions import Op, Receive, Send
from tests.drivers.thread_cluster import thread_cluster

WORDS = 11
PROMPT = """\
pippy program 1
schedule prompt
workers 2
stages 2
chunks 2
placement 0 1
backward none
memory 1 1
edge token C1 -> F0
edge values_of_0_for_1 F0 -> F1
edge logits F1 -> C1
communication explicit
worker 0
  F0.0
  send values_of_0_for_1.0 to 1
  free values_of_0_for_1.0
  F0.1
  send values_of_0_for_1.1 to 1
  free values_of_0_for_1.1
worker 1
  receive values_of_0_for_1.0 from 0
  F1.0
  free values_of_0_for_1.0
  C1.0
  send token.0 to 0
  free logits.0
  free token.0
  receive values_of_0_for_1.1 from 0
  F1.1
  free values_of_0_for_1.1
  C1.1
  send token.1 to 0
  free logits.1
  free token.1
"""
TOKEN_OF_WORKER_0 = """\
receive token.0 from 1
F0.0
send values_of_0_for_1.0 to 1
free values_of_0_for_1.0
free token.0
receive token.1 from 1
F0.1
send values_of_0_for_1.1 to 1
free values_of_0_for_1.1
free token.1"""


class Model(nn.Module):
    """A language model of which each layer takes two values. Some are called as those of programs are."""

    def __init__(self, layers):
        super().__init__()
        self.words, self.token = nn.Embedding(WORDS, 4), nn.Linear(4, 4)
        self.layers, self.logits = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers)), nn.Linear(4, WORDS)

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=False):
        x, kept = self.token(self.words(input_ids)), None
        for layer in self.layers:
            x, kept = layer(x) if kept is None else layer(x) + kept, x
        return (self.logits(x + kept),)


@pytest.fixture(scope="module")
def threads():
    with thread_cluster(3) as cluster:
        yield cluster


def driver_of(threads, split, driver=PipelineDriver1F1B, **options):
    torch.manual_seed(0)
    ids = torch.arange(6).reshape(2, 3)
    model = Model(layers=4)
    return model, driver(pipeline(model, split=split, example_kwargs={"input_ids": ids}), threads, **options)


def test_the_texts(threads):
    _, driver = driver_of(threads, ["layers.2"])
    prompt, token = driver.generation_programs(2)
    assert str(prompt) == PROMPT
    assert "\n".join(map(str, token.orders[0])) == TOKEN_OF_WORKER_0
    assert token.orders[1] == prompt.orders[1]
    assert "edge logits F1 -> C1\ncontinues\ncommunication explicit\n" in str(token)
    assert [parse_program(str(each)) for each in (prompt, token)] == [prompt, token]


@pytest.mark.parametrize("options", [{"all_ranks": [2, 0]}, {"placement": {0: 1, 1: 0}, "world_size": 2}])
def test_workers_have_the_numbers_that_they_have_in_training(threads, options):
    _, driver = driver_of(threads, ["layers.2"], **options)
    for program in driver.generation_programs(1):
        assert program.placement == driver.program(1).placement
    made = driver.generate(torch.tensor([[1, 2], [3, 4]]), max_new_tokens=3, eos_token_id=[])
    assert torch.equal(
        made, driver_of(threads, ["layers.2"])[1].generate(made[:, :2], max_new_tokens=3, eos_token_id=[])
    )


def greedy(model, ids, length):
    """The most likely tokens, each from all that come before it."""
    for _ in range(length):
        ids = torch.cat((ids, model(ids)[0][:, -1:].argmax(dim=-1)), dim=1)
    return ids


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_stages_whose_values_are_called_as_those_of_programs(threads, chunks):
    """Here no layer looks at other positions, so that a token needs no cache."""
    given = {"world_size": 2}, {"world_size": 1}, {}, {}
    splits = ["layers.1", "layers.2", "logits"], ["layers.2"], ["layers.1", "layers.3"], ["layers.0"]
    kinds = PipelineDriverInterleaved1F1B, PipelineDriverInterleaved1F1B, PipelineDriver1F1B, PipelineDriver1F1B
    ids = torch.tensor([[1, 2], [3, 4], [5, 6]])
    for options, split, kind in zip(given, splits, kinds, strict=True):
        model, driver = driver_of(threads, split, kind, **options)
        made = driver.generate(ids, max_new_tokens=4, eos_token_id=[], chunks=chunks)
        assert torch.equal(made, greedy(model, ids, 4))
        assert not any(worker.context.transport.received.values for worker in threads.engine.workers)


@pytest.fixture(scope="module", params=[[["layers.2"], {}], [["layers.1", "layers.2", "logits"], {"world_size": 2}]])
def programs(request, threads):
    split, options = request.param
    kind = PipelineDriverInterleaved1F1B if options else PipelineDriver1F1B
    return driver_of(threads, split, kind, **options)[1].generation_programs(2)


def without(program, worker, at):
    order = program.orders[worker]
    return program.with_orders([*program.orders[:worker], order[:at] + order[at + 1 :], *program.orders[worker + 1 :]])


def test_no_instruction_can_be_left_out(programs):
    for program in programs:
        validate(program)
        validate(replace(program, orders=program.computations, lowered=False))  # a token is waited for in the next run
        for worker, order in enumerate(program.orders):
            for at, each in enumerate(order):
                what = str(each) if each.kind.phase else f"{each.value}.{each.microbatch}"
                with pytest.raises(ProgramError, match=what):
                    validate(without(program, worker, at))


def test_a_token_that_is_not_sent_or_sent_twice_is_named(programs):
    for program in programs:
        (name,) = program.going_on
        send = Send(name, microbatch=1, to=0)
        worker, order = next((worker, order) for worker, order in enumerate(program.orders) if send in order)
        at = order.index(send)
        with pytest.raises(ProgramError, match=rf"{name}\.1, for the next run, is never sent to worker 0"):
            validate(without(program, worker, at))
        twice = [*program.orders]
        twice[worker] = (*order[:at], send, *order[at:])
        with pytest.raises(ProgramError, match=rf"{name}\.1, for the next run, is sent twice to worker 0"):
            validate(program.with_orders(twice))


def test_a_token_that_no_run_before_has_chosen_is_refused(programs):
    prompt, token = programs
    (name,) = token.going_on
    with pytest.raises(ProgramError, match=rf"receive {name}\.0 from 1: no run before has chosen {name}\.0"):
        validate(replace(token, continues=False))
    with pytest.raises(ProgramError, match=rf"F0\.0: needs {name}\.0, which is not here yet"):
        validate(replace(prompt, continues=True))


def test_a_circular_wait_is_found(threads):
    """The first worker asks for what comes back to it before it has sent anything."""
    split = ["layers.1", "layers.2", "logits"]
    _, driver = driver_of(threads, split, PipelineDriverInterleaved1F1B, world_size=2)
    for program in driver.generation_programs(2):
        first = program.orders[0]
        back = next(each for each in first if isinstance(each, Receive) and each.value not in program.going_on)
        late = [back, *(each for each in first if each != back)]
        with pytest.raises(ProgramError, match=rf"circular wait:\n.*worker 0 at {back} waits for worker 1"):
            validate(program.with_orders([late, program.orders[1]]))


def test_the_programs_are_simulated_as_those_of_other_forwards(programs):
    """To choose takes no time, and what the run before has chosen is there."""
    for program in programs:
        plain = make_schedule("forward_only", workers=2, chunks=2, placement=program.placement)
        assert simulate(program).makespan == simulate(plain).makespan
        assert render_text(program) == render_text(plain)


def test_nothing_is_chosen_without_an_edge():
    plain = make_schedule("forward_only", workers=2, chunks=1)
    orders = [plain.orders[0], (*plain.orders[1], replace(plain.orders[1][0], op=Op.CHOOSE))]
    with pytest.raises(ProgramError, match=r"C1\.0: the program has no edge from it"):
        add_communication(plain.with_orders(orders))


def test_tokens_are_sent_as_soon_as_they_are_chosen(programs):
    for program in programs:
        for order in program.orders:
            for at, each in enumerate(order):
                if isinstance(each, Send) and each.value in program.going_on:
                    assert str(order[at - 1]) == f"C{program.stages - 1}.{each.microbatch}"
