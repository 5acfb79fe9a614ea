"""A step: where its stages are, what is sent for it, and the outputs that it gives beside the loss."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import (
    Pipe,
    PipelineDriver,
    PipelineDriver1F1B,
    PipelineDriverFillDrain,
    PipelineDriverInterleaved1F1B,
    Sum,
    pipe_split,
    pipeline,
)
from pippy.drivers.base.errors import DriverError, MicrobatchError
from pippy.drivers.driver.steps.arrangement import Arrangement, Arrangements, WorkersToGoOnWith
from pippy.drivers.driver.steps.prepared_step import prepare
from pippy.drivers.driver.steps.programs import RequestedSchedule
from pippy.drivers.protocol.steps import Step, StepReturning
from pippy.drivers.wire.pickling import pickle_message
from pippy.ir.base.surroundings import Surroundings
from pippy.ir.pipe import compiled_of
from tests.drivers.models import Chain, TwoLayers

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")

X, SKIPPED, TARGET = torch.randn(7, 4), torch.randn(7, 4), torch.randn(7, 4)


class Model(TwoLayers):
    """An input for each stage."""

    width = 4

    def forward(self, x, skipped):
        x = self.first(x)
        pipe_split()
        return self.last(x + skipped)


@pytest.fixture
def driver(threads):
    return PipelineDriver1F1B(pipeline(Model(), nn.MSELoss()), threads, check=False)


def prepared(driver, outputs=None, trains=True, told=None, **how):
    with torch.set_grad_enabled(trains):
        call = driver.steps.request(Surroundings.current(), 3, (X, SKIPPED, TARGET), {}, outputs)
        sent, results = driver.programs.next(3, trains), driver.steps.results(call, None)
    message = call.message(sent, results.weights, reduce=False)
    for name, value in how.items():
        object.__setattr__(message, name, value)
    counts = list(driver.cluster.session.counts)
    found = prepare(call, message, [sent], results, driver.ranks, driver.steps.datasets, told)
    assert driver.cluster.session.counts == counts  # nothing was sent
    return found


def test_each_worker_is_given_the_inputs_of_its_stages_and_all_have_the_rest_alike(driver):
    first, last = (step for _, step in sorted(prepared(driver, probe_outputs=True).items()))
    assert first.inputs.arguments.keys() == {"x"} and last.inputs.arguments.keys() == {"skipped", "target"}
    assert first.weights == last.weights == pytest.approx((3 / 7, 2 / 7, 2 / 7))
    assert first.program == last.program and first.trains and last.trains and first.probe_outputs and last.probe_outputs
    assert first.flags is last.flags is None and first.hooks is last.hooks is None


def test_flags_go_to_those_whose_stages_they_are(driver):
    flags = driver.placed.flags()
    first, last = (step for _, step in sorted(prepared(driver, told=(flags, {})).items()))
    assert first.flags == flags[0] and last.flags == flags[1] and "submod_0" in first.flags and "submod_1" in last.flags


@pytest.mark.parametrize("outputs, count", [(None, None), (False, 1), (True, 2)])
def test_values_are_returned_by_those_who_make_them(driver, outputs, count):
    first, last = (step for _, step in sorted(prepared(driver, outputs).items()))
    if count is None:
        assert not isinstance(last, StepReturning)
    else:
        assert first.returns == {} and len(last.returns) == count


def test_without_gradients_no_step_trains(driver):
    assert not any(step.trains for step in prepared(driver, trains=False).values())


# With which workers a recovery goes on, of those that are left.


def arrangements(replicas, own, stages=2):
    compiled = compiled_of(Pipe.from_sequential(nn.Sequential(*(nn.Linear(2, 2) for _ in range(stages)))))
    schedule = RequestedSchedule("1f1b", {}, stages, replicas=replicas)
    return Arrangements(compiled, schedule, own, single_loss=False, mask=False)


@pytest.mark.parametrize(
    ("own", "replicas", "asked", "lost", "chosen"),
    [
        ([0, 1, 2, 3], 2, {"replicas": 1}, {0}, [2, 3]),
        ([0, 1, 2, 3], 2, {"replicas": 1}, {3}, [0, 1]),
        ([0, 1, 2, 3], 2, {"replicas": 1}, {1, 2}, [0, 3]),
        ([0, 1, 2, 3], 2, {"replicas": 1, "workers": 1}, {0}, [2]),
        ([0, 1, 2, 3], 2, {"workers": 2}, {0}, [2, 3]),
        ([0, 1, 2, 3], 2, {}, {0}, [0, 1, 2, 3]),
        ([0, 1, 2, 3, 4, 5], 3, {"replicas": 2}, {1}, [2, 3, 4, 5]),
        ([0, 1, 2, 3, 4, 5], 3, {"replicas": 2}, {1, 2}, [4, 5, 0, 3]),
        ([4, 1], 1, {"workers": 1}, {4}, [1]),
        ([4, 1], 1, {"workers": 1}, set(), [4]),
        ([4, 1], 1, {"workers": 2}, {4}, [4, 1]),
        ([4, 1], 1, {"workers": [2, 0]}, {0}, [2, 0]),
    ],
)
def test_whole_replicas_stay_and_then_come_workers_that_are_there(own, replicas, asked, lost, chosen):
    made = arrangements(replicas, own)
    assert WorkersToGoOnWith(**asked).chosen(made.first, own, lost) == chosen


@pytest.mark.parametrize(
    ("own", "replicas", "lost", "left"),
    [
        ([0, 1, 2, 3], 2, {1}, [2, 3]),
        ([0, 1, 2, 3], 2, {1, 2}, [0, 3]),
        ([0, 1, 2, 3], 2, {1, 2, 3}, [0]),
        ([0, 1, 2], 3, {1}, [0, 2]),
        ([0, 1, 2, 3, 4, 5], 3, {1}, [2, 3, 4, 5]),
        ([0, 1], 1, {0}, [1]),
    ],
)
def test_what_is_left_makes_as_many_replicas_as_it_can_or_one_pipeline(own, replicas, lost, left):
    made = arrangements(replicas, own)
    found, warning = made.next(made.first, made.left(made.first, lost), None, lost)
    assert list(found.ranks) == left and not warning
    assert found.schedule.replicas == max(1, len(left) // made.first.placement.workers)


def test_nothing_goes_on_without_workers():
    made = arrangements(1, [0, 1])
    with pytest.raises(DriverError, match="none of the driver's workers is left"):
        made.left(made.first, {0, 1})


def test_workers_that_were_named_are_the_drivers_own_from_then_on():
    made = arrangements(1, [0, 1])
    with pytest.raises(DriverError, match="3 workers are asked for, and the driver was made for 2"):
        made.next(made.first, WorkersToGoOnWith(workers=3), None, ())
    named, _ = made.next(made.first, WorkersToGoOnWith(workers=[1, 3]), None, {0})
    made.note(named, None)
    assert isinstance(named, Arrangement) and named.ranks == (1, 3)
    assert made.next(named, WorkersToGoOnWith(workers=2), None, {0, 1})[0].ranks == (0, 3)


# `driver.run(..., outputs=True)`: the loss, and the model's outputs merged, from one step; `outputs=False`: the loss alone.


class Several(nn.Module):
    """Four stages. The outputs come from the first, the middle and the last; an input is among them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        first = torch.tanh(self.layers[0](x))
        pipe_split()
        middle = torch.tanh(self.layers[1](first))
        pipe_split()
        y = torch.tanh(self.layers[2](middle))
        pipe_split()
        return {"y": self.layers[3](y), "hidden": [first, (middle, "text")], "x": x}


def loss_of_y(output, target):
    return F.mse_loss(output["y"], target) + output["hidden"][0].square().mean()


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


DRIVERS = {
    "1f1b": (PipelineDriver1F1B, {}),
    "single loss": (PipelineDriverFillDrain, {"single_loss": True}),
    "interleaved": (PipelineDriverInterleaved1F1B, {"world_size": 2}),
    "zb_h1, out of order": (PipelineDriver, {"schedule": "zb_h1", "out_of_order": True}),
    "auto": (PipelineDriver, {"schedule": "auto"}),
    "mask": (PipelineDriver1F1B, {"_debug_mask_minibatches": True}),
}


@pytest.mark.parametrize("kind", DRIVERS)
def test_the_loss_and_the_outputs_of_one_step(threads, kind):
    model, x, target = Several(), torch.randn(7, 8), torch.randn(7, 8)
    driver_class, options = DRIVERS[kind]
    driver = driver_class(pipeline(copy.deepcopy(model), loss_of_y), threads, **options)
    output = model(x)
    expected = loss_of_y(output, target)
    expected.backward()
    for chunks in (4, 1, 4) if kind != "auto" else (4,) * 8:
        driver.zero_grad()
        with driver.record() as recording:
            found = driver.run(chunks, x, target, outputs=True)
        loss, outputs = found
        same(loss, expected.detach())
        assert found.loss is loss and list(outputs) == ["y", "hidden", "x"]
        assert outputs["hidden"][1][1] == "text"
        for mine, plain in [
            (outputs["y"], output["y"]),
            (outputs["hidden"][0], output["hidden"][0]),
            (outputs["hidden"][1][0], output["hidden"][1][0]),
            (outputs["x"], x),
        ]:
            same(mine, plain.detach())
            assert not mine.requires_grad
        for name, gradient in driver.gradients().items():
            same(gradient, model.get_parameter(name).grad)
        same(driver.run(chunks, x, target), expected.detach())
        assert len(recording.steps) == 1
    with torch.no_grad():
        step = driver.run_async(3, x, target, outputs=True)
        same(step.result().loss, expected.detach())
        same(step.result().outputs["y"], output["y"].detach())


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class ReturnsLoss(nn.Module):
    """As a model of transformers: a container of the loss and the logits, from the last stage."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(8, 8), nn.Linear(8, 64), kind

    def forward(self, x, labels):
        x = torch.tanh(self.first(x))
        pipe_split()
        logits = self.last(x)
        loss = F.cross_entropy(logits, labels)
        return self.kind(loss=loss, logits=logits)


def parts(output):
    return (output["loss"], output["logits"]) if isinstance(output, dict) else (output.loss, output.logits)


def watched(session, monkeypatch):
    """The bodies of the commands, and what their calls hold, of a cluster of threads."""
    seen = []
    send = session.send

    def watch(worker, message):
        seen.append((message.body, send(worker, message)))
        return seen[-1][1]

    monkeypatch.setattr(session, "send", watch)
    return seen


def size(pickled):
    """How many bytes a message takes."""
    return len(pickled.data) + sum(tensor.nbytes for tensor in pickled.tensors)


@pytest.mark.parametrize("kind", [dict, Output])
def test_a_loss_that_the_model_returns(threads, monkeypatch, kind):
    model, x, labels = ReturnsLoss(kind), torch.randn(40, 8), torch.randint(64, (40,))
    pipe = pipeline(copy.deepcopy(model), output_loss_value_spec="loss")
    driver = PipelineDriver(pipe, threads, schedule="zb_h1", loss_reduction="mean")
    loss, logits = parts(model(x, labels))
    loss.backward()
    driver.run(4, x, labels)
    seen = watched(threads.session, monkeypatch)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            driver.zero_grad()
            usual = driver.run(4, x, labels)
            found, outputs = driver.run(4, x, labels, outputs=True)
            alone = driver.run(4, x, labels, outputs=False)
        for each, its in [parts(usual), parts(outputs)]:
            same(each, loss.detach())
            same(its, logits.detach())
        assert type(outputs) is kind
        same(found, loss.detach())
        same(alone, loss.detach())
        if grad:
            same(driver.get_grad("first.weight"), 3 * model.first.weight.grad)
    answers = [size(call.future.value()) for body, call in seen if isinstance(body, Step)][1::2]
    assert [answer > logits.nbytes for answer in answers] == [True, True, False] * 2, "the logits stay on their worker"
    assert answers[2] < 1000


def test_a_step_without_outputs_sends_what_it_did(threads, monkeypatch):
    driver = PipelineDriver1F1B(pipeline(Chain(3), nn.MSELoss()), threads)
    x, target = torch.randn(40, 8), torch.randn(40, 8)
    driver.run(4, x, target)
    seen = watched(threads.session, monkeypatch)
    driver.run(4, x, target)
    driver.run(4, x, target, outputs=True)
    driver.run(4, x, target)
    sizes = [(size(pickle_message(body)), size(call.future.value())) for body, call in seen]
    assert len(sizes) == 9, "one message to each worker, and no program"
    assert sizes[:3] == sizes[6:] and all(type(body) is Step for body, _ in seen[:3] + seen[6:])
    assert all(answer < 1000 for _, answer in sizes[:3])
    assert [answer > x.nbytes for _, answer in sizes[3:6]] == [False, False, True]
    for (plain, _), (asked, _) in zip(sizes, sizes[3:6]):
        assert asked - plain < 100


def test_specs_are_for_the_outputs(threads):
    def loss_fn(output, target):
        return F.cross_entropy(output[0], target)

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            x = torch.tanh(self.a(x))
            pipe_split()
            y = self.b(x)
            return y, (y > 0).sum()

    model, x, labels = Counts(), torch.randn(7, 8), torch.randint(3, (7,))
    labels[:3] = -100  # nothing counts in the first micro-batch
    y, positive = model(x)
    pipe = pipeline(copy.deepcopy(model), loss_fn)

    def counted(target):
        return int((target != -100).sum())

    driver = PipelineDriver1F1B(pipe, threads, loss_reduction=counted)
    with pytest.raises(MicrobatchError, match=r"output_spec=\(None, Sum\(\)\)|output_spec=\[None, Sum\(\)\]"):
        driver.run(3, x, labels, outputs=True)
    assert driver.get_grad("a.weight") is None, "nothing is adopted"
    driver = PipelineDriver1F1B(pipe, threads, loss_reduction=counted, output_spec=(None, Sum()))
    loss, outputs = driver.run(3, x, labels, outputs=True)
    same(loss, loss_fn((y, positive), labels).detach())
    same(outputs[0], y.detach())
    assert outputs[1] == positive
    same(driver.run(3, x, labels), loss)


def test_a_pipe_without_a_loss(threads):
    driver = PipelineDriver1F1B(pipeline(Chain(2)), threads)
    x = torch.randn(6, 8)
    loss, outputs = driver.run(2, x, outputs=True)
    assert loss is None
    same(outputs, driver.run(2, x))
    before = list(threads.session.counts)
    with pytest.raises(DriverError, match=r"outputs=False on a Pipe without a loss.*leave it out"):
        driver.run(2, x, outputs=False)
    assert threads.session.counts == before


class Named(Chain):
    """Its forward has an argument of that name."""

    def forward(self, x, outputs=None):
        x = self.layers[0](x)
        pipe_split()
        return self.layers[1](x) * outputs


def test_a_model_with_an_argument_of_that_name(threads):
    x, scale = torch.randn(6, 8), torch.randn(6, 8)
    model = Named(2)
    driver = PipelineDriver1F1B(pipeline(copy.deepcopy(model), nn.MSELoss()), threads)
    same(driver.run(2, x, outputs=scale, target=x), F.mse_loss(model(x, scale), x).detach())
    loss, outputs = driver.run(2, x, scale, x, outputs=True)
    same(outputs, model(x, scale).detach())
    with pytest.raises(
        DriverError,
        match=r"outputs=True is ambiguous, because the model has an argument 'outputs' too; give .* by position",
    ):
        driver.run(2, x, target=x, outputs=True)
    with pytest.raises(DriverError, match=r"outputs=float64\[6, 8\]: give True"):
        PipelineDriver1F1B(pipeline(Chain(2), nn.MSELoss()), threads).run(2, x, x, outputs=scale)
