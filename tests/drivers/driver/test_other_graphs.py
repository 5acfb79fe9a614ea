"""A call that fails a guard goes by another graph of the model: made once, with the same parameters, checked like the first."""

import copy
import os
import signal
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pippy.ir.other_graphs
from pippy import PipelineDriver, PipelineDriver1F1B, cluster, errors, pipe_split, pipeline
from pippy.drivers.batch.divide import divide
from pippy.drivers.protocol.programs import AddGraph
from pippy.drivers.protocol.steps import GraphStep, Step
from pippy.drivers.worker import driver_state
from pippy.drivers.worker.gradients.buffers import StepBuffers
from tests.drivers.models import TwoLayers
from tests.drivers.processes import close_open_cluster
from tests.drivers.thread_cluster import thread_cluster

SCHEDULES = ("1f1b", "fill_drain", "zb_h1", "interleaved_1f1b")


class Asks(nn.Module):
    """Asks how many rows there are, in a stage of values and of inputs, whether there is a mask, and a flag."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.0)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x, mask=None, flag=False):
        if x.shape[0] == 1:
            x = x.unsqueeze(1).squeeze(1)
        hidden = self.first(x).tanh()
        self.steps.add_(1)
        pipe_split()
        hidden = hidden * 1.0 if hidden.shape[0] == 1 else self.drop(hidden)
        if mask is not None:
            hidden = hidden * mask
        return self.last(hidden) * 2 if flag else self.last(hidden)


def batch(rows, with_mask=False, flag=False):
    torch.manual_seed(rows)
    x, target = torch.randn(2, rows, 4, dtype=torch.float64)
    kwargs = {"mask": torch.rand(rows, 4, dtype=torch.float64)} if with_mask else {}
    return (x,), kwargs | ({"flag": True} if flag else {}), target


def plain(model, call):
    """The loss and the gradients of plain PyTorch, in a copy of the model."""
    model, (args, kwargs, target) = copy.deepcopy(model), call
    model.zero_grad()
    loss = nn.functional.mse_loss(model(*args, **kwargs), target)
    loss.backward()
    return loss.detach(), {name: each.grad.clone() for name, each in model.named_parameters()}


def assert_like(driver, expected, loss):
    torch.testing.assert_close(loss, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(driver.gradients(), expected[1], rtol=1e-11, atol=1e-12)
    driver.zero_grad()


def made(cluster, model=None, rows=3, **options):
    model = Asks().double() if model is None else model
    args, kwargs, target = batch(rows)
    pipe = pipeline(model, nn.MSELoss(), example_args=args, example_kwargs={**kwargs, "target": target})
    return model, PipelineDriver(pipe, cluster, **{"schedule": "1f1b", "buffers": "per_microbatch", **options})


CALLS = st.tuples(st.integers(1, 9), st.booleans(), st.booleans(), st.integers(1, 4))


@pytest.mark.parametrize("schedule", SCHEDULES[:3])
@settings(max_examples=6, deadline=None)
@given(calls=st.lists(CALLS, min_size=3, max_size=6))
def test_every_answer_has_the_numbers_of_the_plain_model(schedule, calls):
    model = Asks().double()
    expected = [plain(model, batch(rows, mask, flag)) for rows, mask, flag, _ in calls]
    with thread_cluster(2) as cluster:
        _, driver = made(cluster, model, schedule=schedule)
        for (rows, mask, flag, chunks), right in zip(calls, expected, strict=True):
            args, kwargs, target = batch(rows, mask, flag)
            assert_like(driver, right, driver.run(min(chunks, rows), *args, target, **kwargs))
        counted = driver.state_dict()["steps"]
    assert counted == sum(min(chunks, rows) for rows, *_, chunks in calls)  # a micro-batch that ran again counts once


def test_a_graph_is_traced_and_sent_once(threads, monkeypatch):
    traced, sent = [], Counter()
    graph_for = pippy.ir.other_graphs.graph_for
    monkeypatch.setattr(
        "pippy.drivers.driver.steps.graphs.graph_for", lambda *args: traced.append(1) or graph_for(*args)
    )
    _, driver = made(threads)
    call = driver.commands.call
    monkeypatch.setattr(
        driver.commands, "call", lambda bodies, *rest: sent.update(map(type, bodies.values())) or call(bodies, *rest)
    )
    for rows in (8, 1, 5, 1, 7, 8, 5):
        (x,), _, target = batch(rows)
        driver.run(min(4, rows), x, target)
    assert (len(traced), sent[AddGraph], len(driver.graphs)) == (1, 2, 2)
    counts = [*driver.cluster.session.counts]
    driver.run(4, *batch(5)[0], batch(5)[2])  # four micro-batches, one of two rows, by two graphs
    assert [after - before for before, after in zip(counts, driver.cluster.session.counts, strict=True)][:2] == [1, 1]


def test_training_goes_on_as_in_plain_pytorch(threads):
    model = Asks().double()
    twin = Asks().double()
    twin.load_state_dict(model.state_dict())
    _, driver = made(threads, model)
    ours = driver.instantiate_optimizer(torch.optim.AdamW, lr=0.1)
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.1)
    for rows in (8, 5, 1, 8, 7, 1):
        args, _, target = batch(rows)
        ours.zero_grad()
        loss = driver.run(min(4, rows), *args, target)
        ours.step()
        theirs.zero_grad()
        right = nn.functional.mse_loss(twin(*args), target)
        right.backward()
        assert loss == pytest.approx(float(right.detach()), rel=1e-10)
        theirs.step()
    state = driver.state_dict()
    for name, each in twin.named_parameters():
        torch.testing.assert_close(state[name], each.detach(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("compile", [None, "graphs"])
@pytest.mark.parametrize("train", [True, False])
def test_modes_and_stages_as_graphs(threads, compile, train):
    model, driver = made(threads, compile=compile)
    driver.train(train)
    expected = [plain(model, batch(rows)) for rows in (1, 5)]
    for rows, right in zip((1, 5), expected, strict=True):
        args, _, target = batch(rows)
        assert_like(driver, right, driver.run(min(4, rows), *args, target))


def test_outputs_are_put_together(threads):
    model, driver = made(threads)
    args, _, target = batch(5)
    right = copy.deepcopy(model)(*args).detach()
    loss, outputs = driver.run(4, *args, target, outputs=True)
    torch.testing.assert_close(outputs, right)
    torch.testing.assert_close(loss, nn.functional.mse_loss(right, target))


def test_without_gradients_it_is_compared_as_well(threads):
    model, driver = made(threads)
    args, _, target = batch(5)
    with torch.no_grad():
        torch.testing.assert_close(
            driver.run(4, *args, target), nn.functional.mse_loss(copy.deepcopy(model)(*args), target)
        )
    assert len(driver.steps.first_steps) == 2


class Decides(TwoLayers):
    """What it computes depends on the number of rows."""

    width = 4

    def forward(self, x):
        hidden = self.first(x)
        pipe_split()
        return self.last(hidden) * (2 if len(hidden) > 3 else 1)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("example", [2, 7])
def test_rows_that_decide_are_refused_and_one_microbatch_is_right(threads, example, gradients):
    model, driver = made(threads, Decides().double(), rows=example)
    args, _, target = batch(7)
    with torch.set_grad_enabled(gradients):
        with pytest.raises(errors.MicrobatchError, match="chunks=1") as refused:
            driver.run(3, *args, target)
        loss = driver.run(1, *args, target)
    assert "depends on the number of rows" in str(refused.value)
    assert loss == pytest.approx(float(plain(model, (args, {}, target))[0]))


@pytest.mark.parametrize("of_input", [True, False])
def test_other_numbers_of_rows_are_compared_again(threads, of_input):
    """Of four rows, micro-batches of one give what the whole gives; of seven they do not."""

    class Net(Decides):
        def forward(self, x):
            hidden = self.first(x)
            pipe_split()
            return self.last(hidden) * (2 if (x if of_input else hidden).shape[0] > 5 else 1)

    model, driver = made(threads, Net().double(), rows=2)
    args, _, target = batch(4)
    assert_like(driver, plain(model, (args, {}, target)), driver.run(4, *args, target))
    with pytest.raises(errors.MicrobatchError, match="chunks=1"):
        driver.run(7, *batch(7)[0], batch(7)[2])


class Elsewhere(nn.Module):
    """One row goes through another layer."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.single = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.first(x)
        pipe_split()
        return self.single(hidden) if len(x) == 1 else self.last(hidden)


def test_what_would_move_is_refused_by_name(threads):
    _, driver = made(threads, Elsewhere().double())
    args, _, target = batch(1)
    with pytest.raises(errors.GuardError, match=r"submod_1 would use 'single\.weight', which no stage has"):
        driver.run(1, *args, target)
    driver.run(2, *batch(4)[0], batch(4)[2])


def test_errors_name_the_rows_of_every_part():
    whole = divide({"x": torch.arange(5)}, chunks=4)
    step = Step(0, True, whole.between(0, 1), (1.0,), then=(GraphStep(1, whole.between(1, 4), (1.0,) * 3),))
    shown = [step.rows_shown(at) for at in range(4)]
    assert shown == ["rows 0 to 1 of 5", "row 2 of 5", "row 3 of 5", "row 4 of 5"]


def test_there_are_eight_graphs_at_most(threads):
    class Sizes(TwoLayers):
        width = 4

        def forward(self, x):
            hidden = self.first(x)
            pipe_split()
            return self.last(hidden) + sum(hidden.shape[0] * 0.0 for _ in range(int(hidden.shape[0])))

    _, driver = made(threads, Sizes().double(), rows=1, check=False)
    for rows in range(1, 9):
        driver.run(1, *batch(rows)[0], batch(rows)[2])
    assert len(driver.graphs) == 8 and str(driver).count("graph ") == 8
    with pytest.raises(errors.StepError, match="has 8 already"):
        driver.run(1, *batch(9)[0], batch(9)[2])
    driver.run(1, *batch(3)[0], batch(3)[2])


class Scaled(Asks):
    """A number of the script's is a constant of its graphs."""

    def __init__(self):
        super().__init__()
        self.scale = 2.0

    def forward(self, x):
        hidden = self.first(x) * self.scale
        pipe_split()
        return self.last(hidden * 1.0 if hidden.shape[0] == 1 else hidden)


def test_a_number_that_the_script_changes_is_followed_or_refused_in_every_graph(threads):
    model, driver = made(threads, Scaled().double())
    for scale in (2.0, 3.0):
        model.scale = scale
        right = plain(model, batch(1))
        try:
            loss = driver.run(1, *batch(1)[0], batch(1)[2])
        except errors.PippyError as error:
            assert "scale" in str(error) and scale == 3.0
        else:
            assert_like(driver, right, loss)


def test_one_object_twice_is_another_call(threads):
    class Same(TwoLayers):
        width = 4

        def forward(self, x, y):
            hidden = self.first(x) * (2 if x is y else 1) + y
            pipe_split()
            return self.last(hidden)

    (x,), _, target = batch(4)
    other = x + 1
    model = Same().double()
    pipe = pipeline(model, nn.MSELoss(), example_args=(x, other, target))
    driver = PipelineDriver1F1B(pipe, threads, world_size=2, check=False)  # the witness is given copies, which are two
    for call in ((x, other), (x, x), (x, other), (other, other)):
        assert_like(driver, plain(model, (call, {}, target)), driver.run(2, *call, target))
    assert len(driver.graphs) == 2


def test_a_constant_that_was_asked_for_makes_no_graph(threads):
    args, _, target = batch(4)
    pipe = pipeline(Asks().double(), nn.MSELoss(), concrete_args={"flag": True}, example_args=(*args, target))
    driver = PipelineDriver1F1B(pipe, threads, world_size=2, buffers="per_microbatch")
    for _ in range(2):
        with pytest.raises(errors.GuardError, match="'flag' is False"):
            driver.run(2, *args, target, flag=False)
    assert len(driver.graphs) == 1


def test_a_change_of_the_script_makes_other_graphs_anew(threads):
    model, driver = made(threads)
    driver.run(1, *batch(1)[0], batch(1)[2])
    driver.zero_grad()
    model.drop.p = 0.5
    model.eval()
    right = plain(model, batch(1))
    assert_like(driver, right, driver.run(1, *batch(1)[0], batch(1)[2]))


def test_the_number_of_a_graph_that_is_used_again_holds_the_latest_stages_alone(threads, monkeypatch):
    """Workers held the stages of each graph that had had the number, and looked for buffers in all of them."""
    noted = []

    class Noting(StepBuffers):
        def __init__(self, stages):
            super().__init__(stages)
            noted.append(self)

    monkeypatch.setattr(driver_state, "StepBuffers", Noting)
    model, driver = made(threads, buffers=None)
    model.eval()
    for p in (0.0, 0.1, 0.2):
        model.drop.p = p
        driver.run(2, *batch(2)[0], batch(2)[2])
        assert len(driver.graphs) == 2
    assert [len(each.stages) for each in noted] == [2, 2]
    (its,) = (each for each in noted if each.changing)
    ((call, (steps,)),) = its.changing.items()
    owners = [dict(stages[call].named_modules()).values() for stages in its.stages.values()]
    assert steps.name == "steps" and len(steps.owners) == 2
    assert all(any(module is each for each in own) for (module, _), own in zip(steps.owners, owners))


def test_a_step_that_runs_again_draws_what_it_would_have_drawn(threads):
    class Draws(Asks):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            hidden = nn.functional.dropout(self.first(x), 0.5, self.training)
            pipe_split()
            return self.last(hidden * 1.0 if hidden.shape[0] == 1 else hidden)

    losses = []
    for known in (False, True):
        torch.manual_seed(3)
        _, driver = made(threads, Draws().double(), check=False, keyed_random=7)
        if known:
            driver.graphs[0].asks_in_stages  # noqa: B018
            with torch.no_grad():
                driver.run(1, *batch(1)[0], batch(1)[2])  # steps without gradients are numbered apart
        losses.append(driver.run(1, *batch(1)[0], batch(1)[2]))
    assert losses[0] == losses[1]


def test_recovery_sends_it_again(tmp_path):
    close_open_cluster()
    with cluster(2, threads=1) as workers:
        model, driver = made(workers)
        right = plain(model, batch(5))
        driver.save(tmp_path, step=0)
        assert_like(driver, right, driver.run(4, *batch(5)[0], batch(5)[2]))
        os.kill(workers.session.workers[1].pid, signal.SIGKILL)
        with pytest.raises(errors.WorkerLostError):
            driver.run(4, *batch(5)[0], batch(5)[2])
        driver.recover()
        assert_like(driver, right, driver.run(4, *batch(5)[0], batch(5)[2]))


def test_a_copy_of_a_pipe_has_no_model_to_trace(threads):
    args, _, target = batch(3)
    pipe = copy.deepcopy(pipeline(Asks().double(), nn.MSELoss(), example_args=(*args, target)))
    driver = PipelineDriver1F1B(pipe, threads)
    with pytest.raises(errors.PippyError, match="no model that it could trace"):
        driver.run(1, *batch(1)[0], batch(1)[2])
