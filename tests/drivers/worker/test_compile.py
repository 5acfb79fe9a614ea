"""``compile=``: what it takes, the numbers of the plain model, and nothing compiled twice."""

import copy
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from pippy import Pipe, PipelineDriver, pipeline
from pippy.drivers.base.errors import DriverError, StepError
from pippy.drivers.protocol.commands import News
from tests.drivers.models import Chain

pytestmark = pytest.mark.usefixtures("seeded")


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
    loss = nn.functional.mse_loss(plain(x), target)
    loss.backward()
    torch.testing.assert_close(driver.run(chunks, x, target), loss.detach())
    for name, gradient in driver.gradients().items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad)


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
    driver.close()


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
    driver.close()


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
    driver.close()


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
    driver.close()


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
    driver.close()


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
    driver.close()


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
