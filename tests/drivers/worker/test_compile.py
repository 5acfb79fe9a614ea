"""Calls of stages, compiled and not."""

import copy
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pippy import Pipe, PipelineDriver, pipeline
from pippy.drivers.base.errors import DriverError, StepError
from pippy.drivers.protocol.commands import News
from pippy.drivers.worker.stage_call import StageCall
from pippy.ir.base.errors import StageError
from pippy.ir.base.trees import tensors
from tests.comparisons import assert_gradients, assert_loss
from tests.drivers.models import Chain

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


class Noting:
    """A backend that adds a line to a file for each graph that it compiles; it does so while the other file is there."""

    def __init__(self, path, busy=""):
        self.path, self.busy = str(path), str(busy)

    def __call__(self, graph, inputs):
        from torch._dynamo.backends.registry import lookup_backend

        with Path(self.path).open("a") as file:
            file.write("a graph\n")
        end = time.monotonic() + 60
        while self.busy and Path(self.busy).exists() and time.monotonic() < end:  # in Python, as most of a compiler is
            pass
        return lookup_backend("aot_eager")(graph, inputs)

    def count(self):
        return len(Path(self.path).read_text().splitlines())


@pytest.fixture
def noting(tmp_path):
    return Noting(tmp_path / "compiled")


def check(driver, plain, x, target, chunks=4):
    """A step gives the loss and the gradients of the plain model."""
    plain.zero_grad()
    driver.zero_grad()
    assert_loss(driver.run(chunks, x, target), nn.functional.mse_loss(plain(x), target))
    assert_gradients(driver, plain)


@pytest.mark.parametrize(
    ("schedule", "stages"), [("1f1b", 2), ("zb_h1", 2), ("interleaved_1f1b", 4), ("auto", 2)], ids=str
)
def test_numbers_are_the_plain_model_s_and_nothing_is_compiled_twice(cluster, noting, schedule, stages):
    """Ten rows in four micro-batches: two sizes."""
    model = Chain(stages)
    plain, x, target = copy.deepcopy(model), torch.randn(10, 8), torch.randn(10, 8)
    driver = PipelineDriver(pipeline(model, nn.MSELoss()), cluster, schedule=schedule, world_size=2, compile=noting)
    check(driver, plain, x, target)
    compiled = noting.count()
    for _ in range(7):
        check(driver, plain, x, target)
    if schedule == "auto":
        assert driver.choice is not None
    else:
        assert noting.count() == compiled
        pieces = 3 if schedule == "zb_h1" else 2
        assert 2 * pieces <= compiled <= 2 * pieces * (stages + 1)
    with torch.no_grad():
        expected = nn.functional.mse_loss(plain(x), target)
        torch.testing.assert_close(driver.run(4, x, target), expected)
    assert set(driver.compiled.values()) == {"compiled graphs for 4 forms of inputs"}  # two of them in evaluation


noted: list[dict[str, object]] = []


def notes_options(graph, inputs, **options):
    noted.append(options)
    return graph


def test_the_names_of_backends_and_the_options_of_torch_compile(threads):
    model = Chain(2)
    plain, x, target = copy.deepcopy(model), torch.randn(8, 8), torch.randn(8, 8)
    noted.clear()
    for compile in (
        "aot_eager",
        {"backend": "eager", "fullgraph": True, "dynamic": False, "mode": "default"},
        {"backend": notes_options, "options": {"fast-math": True}},
        {"disable": True},
    ):
        driver = PipelineDriver(pipeline(model, nn.MSELoss()), threads, compile=compile, check=False)
        check(driver, plain, x, target)
        said = set(driver.compiled.values())
        assert said == (set() if compile == {"disable": True} else {"compiled graphs for 1 form of inputs"})
        driver.close()
    assert noted and noted == [{"options": {"fast_math": True}}] * len(noted)


def test_a_stage_has_so_many_forms_of_inputs_and_no_more(threads):
    model = Chain(2)
    plain = copy.deepcopy(model)
    compile = {"backend": "graphs", "recompile_limit": 2}
    driver = PipelineDriver(pipeline(model, nn.MSELoss()), threads, compile=compile, check=False)
    for rows in (2, 4, 6, 8, 2):
        check(driver, plain, torch.randn(rows, 8), torch.randn(rows, 8), 1)
    said = "graphs for 2 forms of inputs; eager: it is given inputs of more than 2 forms"
    assert driver.compiled["submod_1"] == said


class Asks(nn.Module):
    """Asks for the value of a tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        return y if float(y.detach().sum()) > 1e9 else -y


def test_fullgraph_asks_for_graphs(threads):
    pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(8, 8), Asks()), nn.MSELoss())
    x = torch.randn(4, 8)
    driver = PipelineDriver(pipe, threads, compile={"backend": "graphs", "fullgraph": True}, check=False)
    with pytest.raises(
        StepError, match=r"F1\.0(.|\n)*fullgraph=True of compile= asks for: it asks for the values of tensors"
    ):
        driver.run(2, x, x)
    driver.close()
    driver = PipelineDriver(pipe, threads, compile="graphs", check=False)
    torch.testing.assert_close(driver.run(2, x, x), pipe(x, x).detach())
    assert driver.compiled["submod_1"].startswith("eager: it asks for the values of tensors")


def test_an_error_in_a_compiled_stage_says_where_and_the_next_step_is_right(cluster, noting):
    model = Chain(2)
    plain, x, target = copy.deepcopy(model), torch.randn(8, 8), torch.randn(8, 8)
    driver = PipelineDriver(pipeline(model, nn.MSELoss()), cluster, compile={"backend": noting})
    check(driver, plain, x, target)
    with pytest.raises(
        StepError, match=r"worker 0 \(worker0\) failed at F0\.0 \(stage 0, micro-batch 0, rows .*\)(.|\n)*submod_0"
    ) as error:
        driver.run(4, torch.randn(8, 9), target)
    assert "[2, 9]" in str(error.value) and error.value.worker == 0
    with pytest.raises(StepError, match=r"worker 1 .* failed at F1\.0 \(stage 1, micro-batch 0, rows .*\)(.|\n)*_loss"):
        driver.run(4, x, torch.randn(8, 7))
    check(driver, plain, x, target)


def test_stances_of_torchs_compiler_are_followed_by_the_workers(cluster):
    model = Chain(2)
    plain, x, y = copy.deepcopy(model), torch.randn(8, 8), torch.randn(4, 8)
    driver = PipelineDriver(pipeline(model, nn.MSELoss()), cluster, compile="graphs", check=False)
    with torch.compiler.set_stance("force_eager"):
        check(driver, plain, x, x, 2)
    assert driver.compiled["submod_0"] == "eager: nothing was recorded yet"
    check(driver, plain, x, x, 2)
    with torch.compiler.set_stance("eager_on_recompile"):
        check(driver, plain, y, y, 2)
    with torch.compiler.set_stance("fail_on_recompile"):
        check(driver, plain, x, x, 2)
        with pytest.raises(
            StepError, match=r"set_stance\('fail_on_recompile'\) asks for: it is given inputs of a new form"
        ):
            driver.run(2, y, y)
    assert driver.compiled["submod_0"] == "graphs for 1 form of inputs"
    check(driver, plain, y, y, 2)
    assert driver.compiled["submod_0"] == "graphs for 2 forms of inputs"
    with torch.compiler.set_stance(force_backend="eager"), pytest.raises(DriverError, match="compile=, and leave"):
        driver.run(2, x, x)


def test_a_worker_that_compiles_for_long_is_not_lost(cluster, tmp_path):
    """Pings are answered on threads of their own, which the compiler lets in: here it waits for the answers."""
    compiled, busy = tmp_path / "compiled", tmp_path / "busy"
    busy.touch()
    how = {"backend": Noting(compiled, busy)}
    driver = PipelineDriver(pipeline(Chain(2), nn.MSELoss()), cluster, compile=how, check=False)
    x = torch.randn(4, 8)
    step = driver.run_async(2, x, x)
    end = time.monotonic() + 50
    while not compiled.exists():
        assert time.monotonic() < end
    for _ in range(10):
        assert cluster.session.answer(cluster.session.ping(0)) == News((0, 2)), "F and B, none of which is done"
    assert time.monotonic() < end
    busy.unlink()
    assert torch.isfinite(step.result())
    assert cluster.session.answer(cluster.session.ping(0)) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (7, "compile=7 is a int; give True, 'graphs', a backend of torch.compile or its name, or a dict"),
        ("graph", "compile='graph'.*InvalidBackend.*did you mean 'graphs'"),
        ({"dynamic": True}, "dynamic= is not for stages: .* leave it out"),
        ({"options": {"use_aoti": True}}, "use_aoti= is not for stages: .* leave it out"),
        ({"backend": "graphs", "mode": "max-autotune"}, "'graphs' compiles nothing, so it takes no mode="),
        ({"fast": True}, "'fast' is no option of torch.compile; those are .*fullgraph"),
        ({"backend": "no such"}, r"compile=\{'backend': 'no such'\}: torch.compile refuses it: InvalidBackend"),
        ({"mode": "no such"}, "torch.compile refuses it: RuntimeError"),
    ],
)
def test_what_torch_compile_would_refuse_is_refused_before_anything_is_sent(cluster, given, words):
    before = list(cluster.session.counts)
    with pytest.raises(DriverError, match=words):
        PipelineDriver(pipeline(Chain(2), nn.MSELoss()), cluster, compile=given)
    assert cluster.session.counts == before


# A run of a stage holds what its backward reads, and not its outputs. Gradients are those of plain autograd to the bit.


@dataclass
class Named:
    one: torch.Tensor
    others: dict


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Stage(nn.Module):
    """Calls ``function`` with its linear layer and its inputs."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function, self.noted = nn.Linear(6, 6), function, []

    def forward(self, *inputs):
        return self.function(self, *inputs)


def hooked(self, x):
    y = self.linear(x)
    y.register_hook(lambda gradient: gradient * 3)
    return y


def retained(self, x):
    y = self.linear(x)
    y.retain_grad()
    return y


def changed_later(self, x):
    y = self.linear(x).clone()
    part = y[1:]
    y.mul_(3)
    return part, y


def twice(self, x):
    y = self.linear(x)
    return y, y


# What a stage gives, and how many of its outputs' storages are there once these are dropped.
STAGES = {
    "linear": (lambda self, x: self.linear(x), 0),
    "saved by its operation": (lambda self, x: self.linear(x).tanh(), 1),
    "saved by another": (lambda self, x: (lambda y: (y, y.cos()))(self.linear(x).neg()), 1),
    "a view": (lambda self, x: self.linear(x)[1:].t(), 0),
    "views of one": (lambda self, x: self.linear(x).chunk(3, -1), 0),
    "changed in place after a view of it": (changed_later, 0),
    "one tensor twice": (twice, 0),
    "an input": (lambda self, x: (x, self.linear(x)), 1),
    "a parameter": (lambda self, x: (self.linear.weight, self.linear(x)), 1),
    "no gradient": (lambda self, x: (self.linear(x), x.detach() > 0, x.argmax(-1)), 0),
    "containers": (lambda self, x: Named(self.linear(x), {"a": [self.linear(x), 7], "b": None}), 0),
    "a custom function": (lambda self, x: Double.apply(self.linear(x)), 0),
    "a hook": (hooked, 0),
    "a gradient that is retained": (retained, 0),
    "checkpointed": (lambda self, x: checkpoint(self.linear, x, use_reentrant=False), 0),
    "checkpointed by reentrance": (lambda self, x: checkpoint(self.linear, x, use_reentrant=True), 0),
    "sparse": (lambda self, x: self.linear(x).to_sparse(), 1),
}


def gradient_like(value):
    if isinstance(value, torch.Tensor):
        return torch.cos(value.detach().to_dense()) if value.requires_grad else None
    return None


def nested(value):
    """Gradients for outputs, in their structure."""
    if isinstance(value, Named):
        return nested(value.one), nested(tuple(value.others.values()))
    if isinstance(value, (tuple, list)):
        return tuple(map(nested, value))
    return gradient_like(value)


def storages(outputs):
    parts = [part for each in tensors(outputs) for part in ([each._values()] if each.is_sparse else [each])]
    return list({each.untyped_storage()._cdata: each.untyped_storage() for each in parts}.values())


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("name", STAGES)
def test_outputs_are_freed_while_their_backward_waits(name, halves):
    function, left = STAGES[name]
    stage = Stage(function)
    plain, x = copy.deepcopy(stage), torch.randn(4, 6)
    own = x.clone().requires_grad_()
    outputs = plain(own)
    gradients = [gradient_like(each) for each in tensors(outputs)]
    pairs = [pair for pair in zip(tensors(outputs), gradients) if pair[1] is not None]
    torch.autograd.backward(*map(list, zip(*pairs)))

    call = StageCall("stage", stage, None, (), backward=True, halves=halves)
    outputs, run = call.begin((leaf := x.requires_grad_(),), (leaf,), step=1)
    gradient = nested(outputs)
    there = [weakref.ref(each) for each in storages(outputs)]
    objects = [weakref.ref(each) for each in tensors(outputs) if not each.is_leaf]
    del outputs
    assert sum(each() is not None for each in there) == left
    assert left or not any(each() is not None for each in objects)
    (found,) = run.backward(gradient)
    assert torch.equal(found, own.grad)
    for mine, theirs in zip(stage.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_a_loss_is_freed_and_weighted():
    x = torch.randn(4, 6, requires_grad=True)
    call = StageCall("loss", Stage(lambda self, x: F.mse_loss(self.linear(x), x).reshape(1)), None, (), backward=True)
    loss, run = call.begin((x,), (x,), step=1)
    expected = torch.autograd.grad(call.module(x)[0] * 0.25, x)
    there = weakref.ref(loss.untyped_storage())
    del loss
    assert there() is None
    assert torch.equal(run.backward(0.25)[0], expected[0])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda self, x: self.linear(x), r"the loss is float64\[4, 6\]; it must be a single number"),
        (lambda self, x: x.detach().sum(), "the loss does not require a gradient"),
        (lambda self, x: "loss", "the loss is 'loss'; it must be a single number"),
    ],
)
def test_what_is_no_loss_is_refused_as_before(function, message):
    x = torch.randn(4, 6, requires_grad=True)
    _, run = StageCall("loss", Stage(function), None, (), backward=True).begin((x,), (x,), step=1)
    with pytest.raises(StageError, match=message):
        run.backward(1.0)


def test_the_error_of_a_backward_says_what_the_outputs_were():
    x = torch.randn(4, 6, requires_grad=True)
    stage = Stage(lambda self, x: (self.linear(x), {"mask": x > 0}))
    _, run = StageCall("stage", stage, None, (), backward=True).begin((x,), (x,), step=1)
    with pytest.raises(StageError, match=r"outputs: \(float64\[4, 6\], dict\(bool\[4, 6\]\)\)\n"):
        run.backward((torch.ones(3, 5), None))
