"""Forwards that keep their inputs only: the same bits as without, and what is kept, counted, refused and said on the way."""

import copy
import gc
import random
import time
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pippy
from pippy import MicroBatches, MultiUseParameterConfig, pipe_split, pipeline
from pippy.drivers.base.errors import StepError
from pippy.drivers.driver.drivers import PipelineDriver, PipelineDriver1F1B, PipelineDriverFillDrain
from pippy.drivers.lowering.lower import lower
from pippy.drivers.plan import add_communication, make_schedule, parse_program
from pippy.drivers.plan.language.errors import ArgumentError
from pippy.ir.base.trees import map_tensors
from tests.comparisons import Beside, assert_bits
from tests.drivers.models import Chain, TiedLanguage, TwoLayers, cross_entropy, tokens
from tests.drivers.test_driver import build
from tests.drivers.test_kinds_of_models import Checkpointed
from tests.zoo import exhibits

pytestmark = [
    pytest.mark.usefixtures("in_float64", "seeded"),
    pytest.mark.filterwarnings("ignore:a mark after the model's last operation"),
]


def outcome(pipe, cluster, given, chunks=4, steps=2, **options):
    """Some steps: the losses, the gradients, and the state. Stages draw what comes next, so that it must be put back."""
    options = {"check": False, "keyed_random": False, **options}
    if "single_loss" not in options:
        options["loss_reduction"] = "sum"
    driver = PipelineDriver(pipe, cluster, **options)
    losses = []
    for _ in range(steps):
        torch.manual_seed(4)
        step = driver.run_async(chunks, *given)
        losses.append(step.result())
        counted = list(driver.program(chunks).peak_live)
        assert "out_of_order" in options or [step.peak_live[rank] for rank in driver.ranks] == counted
    found = losses, driver.gradients(), driver.state_dict(), torch.rand(1)
    driver.close()
    return found


def compare(pipe, cluster, given, checkpoint="always", **options):
    """The bits are those without recompute."""
    plain = outcome(pipe, cluster, given, **options)
    mine = outcome(pipe, cluster, given, checkpoint=checkpoint, **options)
    assert all(map(torch.equal, mine[0], plain[0]))
    assert_bits(mine[1], plain[1])
    assert_bits(mine[2], plain[2])
    return mine, plain


@pytest.mark.parametrize("name", [each for each in exhibits if exhibits[each].draws])
def test_what_draws_draws_the_same_again(threads, name):
    """On one worker. The rest of the zoo is computed again in test_driver.py."""
    number = list(exhibits).index(name)
    model, pipe = build(name, list(MultiUseParameterConfig)[number % 2])
    microbatches = [map_tensors(torch.Tensor.detach, model.inputs()) for _ in range(3)]
    given = [*(MicroBatches(list(same)) for same in zip(*microbatches)), MicroBatches([model.target()] * 3)]
    for schedule, checkpoint in (("1f1b", "always"), ("zb_h1", {0: "always"})):
        compare(pipe, threads, given, checkpoint, chunks=3, steps=1, schedule=schedule, world_size=1)


class Layer(nn.Module):
    """A leaf with all that a forward may change: it is kept whole, because it looks at numbers."""

    def __init__(self, width=8):
        super().__init__()
        self.linear, self.norm, self.calls, self.seen = nn.Linear(width, width), nn.BatchNorm1d(width), 0, []
        self.register_buffer("count", torch.zeros(()))
        self.generator, self.python = torch.Generator().manual_seed(3), random.Random(3)

    def forward(self, x):
        self.calls += 1
        self.seen.append(len(x))
        self.count += 1
        self.python.random()
        noise = torch.rand(x.shape, generator=self.generator) + random.random() + self.python.random() + self.calls
        if float(self.count) > 0:
            x = F.dropout(self.linear(x)) * noise
        return self.norm(x) + self.count.clone() * len(self.seen)


class Layers(nn.Module):
    def __init__(self, kind=Layer, stages=2):
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList(kind() for _ in range(stages))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for index, layer in enumerate(self.layers):
            if index or len(self.layers) == 1:
                pipe_split()
            x = layer(x)
        return x


class Leaves(pippy.PipeTracer):
    def is_leaf_module(self, module, name):
        return name.startswith("layers.") or super().is_leaf_module(module, name)


def as_pipe(model, loss=None):
    return pipeline(model, loss or nn.MSELoss(), tracer=Leaves())


@pytest.mark.parametrize("schedule", ["fill_drain", "zb_h1"])
def test_what_a_layer_draws_counts_and_keeps_is_as_in_the_first_run(threads, schedule):
    """On one worker: the threads of this process have one random state."""
    random.seed(2)
    x, target = torch.randn(9, 8), torch.randn(9, 8)
    pipe, states = as_pipe(Layers()), []
    for checkpoint in ("never", "always", "except_last"):
        random.seed(2)
        options = {"schedule": schedule, "checkpoint": checkpoint, "keyed_random": False}
        driver = PipelineDriver(pipe, threads, world_size=1, check=False, **options)
        torch.manual_seed(4)
        losses = [driver.run(3, x, target) for _ in range(3)]
        (modules,) = [worker.drivers[driver.number].modules for worker in threads.engine.workers[:1]]
        layers = [each for module in modules.values() for each in module.modules() if type(each).__name__ == "Layer"]
        states.append((losses, driver.gradients(), driver.state_dict(), torch.rand(1), random.random()))
        assert [(layer.calls, layer.seen) for layer in layers] == [(9, [3] * 9)] * 2
        driver.close()
    for losses, gradients, state, *drawn in states[1:]:
        assert all(map(torch.equal, losses, states[0][0]))
        assert_bits(gradients, states[0][1])
        assert_bits(state, states[0][2])
        assert drawn == list(states[0][3:])


NOTES: list[tuple[bool, bool, int]] = []


class Noting(TwoLayers):
    """Notes each forward, and how much of what autograd saved in all forwards so far is alive when it begins."""

    alive: weakref.WeakSet["Box"] = weakref.WeakSet()

    def forward(self, x):
        gc.collect()
        NOTES.append((pippy.is_checkpointing(), pippy.is_recomputing(), len(self.alive)))
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda box: box.tensor):
            return torch.tanh(self.last(torch.tanh(self.first(x))))

    def pack(self, tensor):
        box = Box()
        box.tensor = tensor.detach()  # a result holds the node that saved it
        self.alive.add(box)
        return box


class Box:
    pass


def notes_of(pipe, cluster, chunks=4, **options):
    driver = PipelineDriver(pipe, cluster, world_size=1, schedule="fill_drain", check=False, **options)
    NOTES.clear()
    driver.run(chunks, torch.randn(8, 8), torch.randn(8, 8))
    driver.close()
    return list(NOTES)


def test_nothing_is_kept_of_a_graph_and_each_forward_runs_once_more(threads):
    pipe = as_pipe(Layers(Noting, stages=1))
    kept = notes_of(pipe, threads)
    one = kept[1][2]
    assert kept == [(False, False, number * one) for number in range(4)] and one > 3
    assert notes_of(pipe, threads, checkpoint="always") == [(True, False, 0)] * 4 + [(False, True, 0)] * 4
    assert notes_of(pipe, threads, checkpoint="except_last") == [
        *[(True, False, 0)] * 3,
        (False, False, 0),
        *[(False, True, one)] * 3,
    ]
    with torch.no_grad():
        assert notes_of(pipe, threads, checkpoint="always") == [(False, False, 0)] * 4


RUNS = [
    (MultiUseParameterConfig.TRANSMIT, "1f1b", "always"),
    (MultiUseParameterConfig.REPLICATE, "zb_h1", {0: "always", 1: "except_last", 3: "always"}),
]


@pytest.mark.parametrize(("config", "schedule", "checkpoint"), RUNS)
def test_training_follows_plain_pytorch(cluster, config, schedule, checkpoint):
    """With processes, and steps sent ahead."""
    pipe = {"multi_use_param_spec": config}
    both = Beside(cluster, TiedLanguage(), cross_entropy, pipe=pipe, schedule=schedule, checkpoint=checkpoint)
    both.optimize(torch.optim.Adam, lr=1e-2)
    steps, expected = [], []
    for _ in range(3):
        x, target = tokens()
        steps.append(both.driver.run_async(3, x, target))
        expected.append(cross_entropy(both.plain(x), target))
        expected[-1].backward()
        both.update()
    for step, loss in zip(steps, expected):
        torch.testing.assert_close(step.result(), loss.detach(), rtol=1e-9, atol=0)
    both.same_state()


class Aside(TwoLayers):
    """The loss does not depend on the first stage."""

    def forward(self, x, target):
        y = self.first(x)
        pipe_split()
        return {"loss": F.mse_loss(self.last(x), target), "aside": y}


def test_a_program_that_computes_again_what_has_no_backward(threads):
    pipe = pipeline(Aside(), output_loss_value_spec={"loss": True, "aside": False})
    given = torch.randn(4, 8), torch.randn(4, 8)
    driver = PipelineDriver1F1B(pipe, threads, checkpoint="always", loss_reduction="mean")
    loss, text = driver.run(2, *given)["loss"], str(driver.program(2))
    assert "checkpoint 1 0-1" in text and "R0" not in text
    text = text.replace("backward 1\n", "backward all\n").replace("memory 1 1\n", "memory unlimited\n")
    text = text.replace("checkpoint 1", "checkpoint 0 0-1\ncheckpoint 1")
    text = text.replace("worker 1\n", "  R0.0\n  B0.0\n  R0.1\n  B0.1\nworker 1\n")
    by_hand = PipelineDriver(pipe, threads, schedule=parse_program(text), loss_reduction="mean")
    assert torch.equal(by_hand.run(2, *given)["loss"], loss)
    by_hand.close()


def test_no_message_more_and_each_value_once(threads):
    """The workers send the same values as without recompute."""
    pipe, sent = pipeline(TiedLanguage(), cross_entropy), []
    given = tokens(6)
    for checkpoint in ("never", "always"):
        driver = PipelineDriver1F1B(pipe, threads, checkpoint=checkpoint)
        driver.run(3, *given)
        counts, transports = list(threads.session.counts), [each.context.transport for each in threads.engine.workers]
        before = [{to: (each.values, each.bytes) for to, each in transport.sent.items()} for transport in transports]
        driver.run(3, *given)
        assert [now - was for now, was in zip(threads.session.counts, counts)] == [1] * 4
        sent.append(
            [
                {to: (now.values - was[to][0], now.bytes - was[to][1]) for to, now in transport.sent.items()}
                for transport, was in zip(transports, before)
            ]
        )
        driver.close()
    assert sent[0] == sent[1]


class Changing(nn.Module):
    """Changes what it is given, in some calls: in place, in its own memory, in a list, in a dict."""

    def __init__(self):
        super().__init__()
        self.linear, self.always = nn.Linear(8, 8), True
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x, mask, given):
        if self.always or float(mask.sum()) > 4:
            mask.mul_(2)
            self.total += x.detach().sum(0)
        given.pop("other")
        given["scale"] = given["scale"] * 2
        return self.linear(x) * mask * given["scale"] + self.total.clone()


class Changed(nn.Module):
    def __init__(self, always=True):
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList([Changing()])
        self.layers[0].always = always

    def forward(self, x, mask):
        y, mask = torch.tanh(self.first(x)), mask + 0.0
        given = {"scale": mask + 1, "other": mask}
        pipe_split()
        return self.layers[0](y, mask, given)


@pytest.mark.parametrize("always", [True, False])
def test_a_stage_that_changes_its_inputs_in_place(threads, always):
    """Where it does so in some micro-batches only, the graph of these is kept the first time."""
    masks = torch.tensor([1.0] * 4 + [0.0] * 4 + [3.0] * 4).unsqueeze(1).expand(12, 8).contiguous() / 8
    x, target = torch.randn(12, 8), torch.randn(12, 8)
    for workers in (1, 2):
        model = Changed(always)
        compare(as_pipe(model), threads, (x, masks, target), "always", chunks=3, world_size=workers)


FAILS: list[bool] = []


class Failing(nn.Module):
    def forward(self, x):
        if FAILS and pippy.is_recomputing():
            raise ArithmeticError("no second time")
        return x * 2


def test_a_step_that_fails_where_it_computes_again(threads):
    given = torch.randn(4, 8), torch.randn(4, 8)
    driver = PipelineDriver1F1B(as_pipe(Layers(Failing, 4)), threads, checkpoint="always")
    loss, gradients = driver.run(2, *given), driver.gradients()
    FAILS.append(True)
    with pytest.raises(StepError, match=r"forward of submod_\d failed: ArithmeticError: no second time") as caught:
        driver.run(2, *given)
    FAILS.clear()
    assert caught.value.failure.instruction.startswith("R")
    assert_bits(driver.gradients(), gradients)
    driver.zero_grad()
    assert torch.equal(driver.run(2, *given), loss)
    assert_bits(driver.gradients(), gradients)


class Clock(nn.Module):
    def forward(self, x):
        return x * time.monotonic()


def test_a_stage_that_cannot_be_repeated_is_refused(threads):
    pipe = as_pipe(Layers(Clock, 2))
    given = torch.randn(4, 8), torch.randn(4, 8)
    driver = PipelineDriver1F1B(pipe, threads, checkpoint={1: "always"}, check=False)
    advice = r"returns something else .* on a clock, a file.* leave stage 1 out of checkpoint=, in a dict of the other stages"
    with pytest.raises(StepError, match=advice):
        driver.run(2, *given)
    driver.close()
    driver = PipelineDriver1F1B(
        as_pipe(nn.Sequential(nn.Linear(8, 8), Layers(Clock, 2))), threads, checkpoint={}, check=False
    )
    driver.run(2, *given)


class Doubles(nn.Module):
    """Changes its input, which is a view of what another stage was given."""

    def forward(self, x):
        with torch.no_grad():
            x.mul_(2)
        return x + 1


class ViewChanged(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.layers = nn.Linear(8, 8), nn.Linear(8, 8), nn.ModuleList([Doubles()])
        self.shift = nn.Parameter(torch.randn(8))

    def forward(self, x):
        y = torch.tanh(self.first(x)).detach()
        pipe_split()
        y, shift = y.view(-1, 2, 4), torch.tanh(self.shift)
        pipe_split()
        return self.last(self.layers[0](y).flatten(1) + shift)


def test_an_input_that_another_stage_changes_is_refused_where_both_have_it(threads):
    given, pipe = (torch.randn(4, 8), torch.randn(4, 8)), as_pipe(ViewChanged())
    compare(pipe, threads, given, "always", chunks=2, world_size=3)
    driver = PipelineDriver1F1B(pipe, threads, world_size=1, checkpoint="always")
    advice = "leave stage 1 out of checkpoint=, in a dict of the other stages"
    with pytest.raises(StepError, match=rf"another stage has changed an input of submod_1 in place.*{advice}"):
        driver.run(2, *given)
    driver.close()
    compare(pipe, threads, given, {0: "always", 2: "always"}, chunks=2, world_size=1)


def test_the_outputs_beside_the_loss_and_a_recording(threads):
    given, model = (torch.randn(8, 8), torch.randn(8, 8)), Chain(2)
    driver = PipelineDriver1F1B(pipeline(model, nn.MSELoss()), threads, checkpoint="always")
    with driver.record() as recording:
        found = driver.run(2, *given, outputs=True)
    torch.testing.assert_close(found.outputs, model(given[0]).detach())
    assert "R1" in recording.steps[-1].durations()


def test_unknown_modes_and_stages_are_refused_before_anything_is_sent(threads):
    pipe = pipeline(Chain(2), nn.MSELoss())
    counts = list(threads.session.counts)
    for given, message in (("often", "'often' is no mode"), ({2: "always"}, "there is no stage 2"), (True, "no mode")):
        for kind in (PipelineDriver, PipelineDriver1F1B, PipelineDriverFillDrain, pippy.PipelineDriverInterleaved1F1B):
            with pytest.raises(ArgumentError, match=message):
                kind(pipe, threads, checkpoint=given)
    lowered = add_communication(make_schedule("1f1b", workers=2, chunks=2))
    with pytest.raises(ArgumentError, match="the program already has its sends; leave checkpoint out"):
        PipelineDriver(pipe, threads, schedule=lowered, checkpoint="always")
    assert list(threads.session.counts) == counts


def test_a_program_of_the_users_own(threads):
    """With R in it, or without; R after the receive too."""
    given, found = (torch.randn(8, 8), torch.randn(8, 8)), []
    pipe = pipeline(Chain(3), nn.MSELoss())
    edges = lower(pipe, make_schedule("1f1b", workers=3, chunks=4)).program.flow
    for checkpoint in ("never", "always"):
        program = make_schedule("1f1b", workers=3, chunks=4, checkpoint=checkpoint)
        for schedule in (program, add_communication(program.for_graph(edges), early_recompute=False)):
            driver = PipelineDriver(pipe, threads, schedule=schedule)
            found.append((driver.run(4, *given), driver.gradients()))
            driver.close()
    for loss, gradients in found[1:]:
        assert torch.equal(loss, found[0][0])
        assert_bits(gradients, found[0][1])


class Clamping(nn.Module):
    """Changes its weight before it uses it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.5)
        return x * self.weight


def dropping():
    """Nothing of it is compiled twice, and dropout drops the same."""
    first = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout())
    return nn.Sequential(first, nn.Sequential(nn.Tanh(), nn.Linear(8, 8)))


def checkpointed(reentrant):
    return pipeline(Checkpointed(reentrant, width=8), nn.MSELoss())


def spread(output, target):
    return (output - target).std()


COMPARED = {
    "one loss": (lambda: pipeline(Chain(3), spread), {"schedule": "fill_drain", "single_loss": True}),
    "one loss, except the last": (
        lambda: pipeline(Chain(3), spread),
        {"schedule": "fill_drain", "single_loss": True, "checkpoint": "except_last"},
    ),
    "out of order": (lambda: pipeline(Chain(3), nn.MSELoss()), {"schedule": "zb_h1", "out_of_order": True}),
    "out of order, at most 4": (
        lambda: pipeline(Chain(3), nn.MSELoss()),
        {"schedule": "fill_drain", "out_of_order": 4},
    ),
    "compiled stages": (
        lambda: pippy.Pipe.from_sequential(dropping(), nn.MSELoss()),
        {"world_size": 1, "compile": {"backend": "aot_eager"}},
    ),
    "parts that torch checkpoints": (lambda: checkpointed(False), {"schedule": "zb_h1"}),
    "such parts, reentrant": (lambda: checkpointed(True), {"schedule": "zb_h1"}),
    "a forward that changes its weight": (lambda: as_pipe(Layers(Clamping)), {"chunks": 1}),
}


@pytest.mark.parametrize("name", COMPARED)
def test_the_bits_are_those_without(threads, name):
    make, options = COMPARED[name]
    compare(make(), threads, (torch.randn(12, 8), torch.randn(12, 8)), steps=3, **options)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_autocast_around_the_step(threads, schedule):
    """The forward is computed again with the same casts."""
    given = torch.randn(2, 8, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        compare(pipeline(Chain(2).float(), nn.MSELoss()), threads, given, schedule=schedule)


CALLS: list[str] = []


def test_forward_hooks_are_called_in_both_forwards_and_those_of_the_backward_once(threads):
    given, called = (torch.randn(4, 8), torch.randn(4, 8)), []
    layer = Layers()
    layer.layers[1].register_forward_hook(note_forward)
    layer.layers[1].register_full_backward_hook(note_backward)
    for checkpoint in ("never", "always"):
        options = {"checkpoint": checkpoint, "check": False}
        driver = PipelineDriver1F1B(as_pipe(copy.deepcopy(layer)), threads, world_size=1, **options)
        CALLS.clear()
        driver.run(2, *given)
        called.append("".join(CALLS))
        driver.close()
    assert called == ["FBFB", "FFBFFB"]


def note_forward(module, inputs, output):
    CALLS.append("F")


def note_backward(module, gradients, given):
    CALLS.append("B")
