"""Stages compiled by torch.compile: the numbers of the plain model, and nothing compiled twice."""

import copy
import shutil
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from pippy import PipelineDriver, pipeline
from pippy.drivers.base.errors import DriverError, StepError
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
    """Ten rows in four micro-batches: two sizes, so each stage is compiled for one, and once more for any."""
    model = Chain(stages)
    plain, x, target = copy.deepcopy(model), torch.randn(10, 8), torch.randn(10, 8)
    driver = PipelineDriver(
        pipeline(model, nn.MSELoss()), cluster, schedule=schedule, world_size=2, compile={"backend": noting}
    )
    check(driver, plain, x, target)
    compiled = noting.count()
    assert stages <= compiled <= 2 * (stages + 1)
    for _ in range(7):
        check(driver, plain, x, target)
    assert noting.count() == compiled
    assert (driver.choice is not None) == (schedule == "auto")
    with torch.no_grad():
        expected = nn.functional.mse_loss(plain(x), target)
        torch.testing.assert_close(driver.run(4, x, target), expected)
    driver.close()


def test_inductor(cluster):
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("inductor needs a C++ compiler, and there is none")
    model = Chain(1)
    plain, x, target = copy.deepcopy(model), torch.randn(8, 8), torch.randn(8, 8)
    with pytest.warns(match="one stage"):
        pipe = pipeline(model, nn.MSELoss())
    driver = PipelineDriver(pipe, cluster, compile=True)
    for _ in range(2):
        check(driver, plain, x, target)
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


def test_a_worker_that_compiles_for_long_is_not_lost(cluster, tmp_path):
    """Pings are answered on threads of their own, which the compiler lets in: here it waits for the answers."""
    compiled, busy = tmp_path / "compiled", tmp_path / "busy"
    busy.touch()
    driver = PipelineDriver(pipeline(Chain(2), nn.MSELoss()), cluster, compile={"backend": Noting(compiled, busy)})
    x = torch.randn(4, 8)
    step = driver.run_async(2, x, x)
    end = time.monotonic() + 50
    while not compiled.exists():
        assert time.monotonic() < end
    for _ in range(10):
        cluster.session.answer(cluster.session.ping(0))
    assert time.monotonic() < end
    busy.unlink()
    assert torch.isfinite(step.result())
    driver.close()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (7, "compile=7 is a int; give 'graphs', 'inductor', True, or a dict"),
        ({"fast": True}, "'fast' is no option of torch.compile"),
        ({"backend": "no such"}, r"compile=\{'backend': 'no such'\}: torch.compile refuses it: InvalidBackend"),
        ({"mode": "no such"}, "torch.compile refuses it: RuntimeError"),
    ],
)
def test_what_torch_compile_would_refuse_is_refused_before_anything_is_sent(cluster, given, words):
    before = list(cluster.session.counts)
    with pytest.raises(DriverError, match=words):
        PipelineDriver(pipeline(Chain(2), nn.MSELoss()), cluster, compile=given)
    assert cluster.session.counts == before
