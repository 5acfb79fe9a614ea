"""What a prompt and a notebook show of an object, and what errors show of a wrong argument, fits on a screen."""

import html
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from pippy import Pipe, PipelineDriver, PipelineDriver1F1B, local_cluster, pipeline
from pippy.drivers.recording.record import Recording
from pippy.drivers.schedules import make_schedule, render_svg, simulate
from pippy.drivers.schedules.errors import ArgumentError
from pippy.errors import PippyError
from pippy.ir.brief import brief
from tests.drivers.models import Chain

PROGRAM = "<Program 1f1b: 2 stages on 2 workers, chunks=4, 48 instructions>"


def test_objects_are_shown_in_a_line(threads, tmp_path):
    driver, x = PipelineDriver1F1B(pipeline(Chain(2), nn.MSELoss()), threads), torch.randn(8, 8)
    names = ", ".join(threads.workers[:2])
    assert repr(driver) == str(driver) == f"<PipelineDriver1F1B: 1f1b, 2 stages on {names}>"
    assert repr(driver.program(4)) == PROGRAM
    assert repr(PipelineDriver(driver.pipe, threads, schedule=driver.program(4))) == (
        f"<PipelineDriver: {PROGRAM}, 2 stages on {names}>"
    )
    running = driver.run_async(4, x, x)
    assert repr(running) == "<RunningStep, not waited for>"
    running.result()
    assert repr(running) == "<RunningStep, done>"
    with driver.record() as recording:
        assert repr(recording) == recording._repr_html_().replace("&lt;", "<").replace("&gt;", ">")
        assert repr(recording) == "<Recording of 0 steps>"
        driver.run(4, x, x)
    step = recording.steps[0]
    assert re.fullmatch(rf"<RecordedStep of [\d.e+]+ ms: {PROGRAM}>", repr(step))
    assert repr(recording) == f"<Recording of 1 step, the latest {step!r}>"
    assert repr(Recording(steps=[step, step], dropped=3)).startswith("<Recording of 2 steps, 3 dropped, the latest <")
    assert step._repr_html_() == step.svg()
    recording.report(tmp_path / "report.html")
    shown = re.fullmatch(r'<iframe srcdoc="([^"]*)" style="[^"]*"></iframe>', recording._repr_html_())
    assert html.unescape(shown[1]) == (tmp_path / "report.html").read_text(encoding="utf-8")


def test_what_drivers_give_is_shown_in_a_line_or_a_table(threads):
    pipe, x = pipeline(Chain(2), nn.MSELoss()), torch.randn(8, 8)
    driver = PipelineDriver1F1B(pipe, threads)
    optimizer = driver.instantiate_optimizer(torch.optim.AdamW, lr=0.5)
    assert (
        repr(optimizer) == f"<PipelineOptimizer of AdamW: {len(list(pipe.parameters()))} parameters in 1 group, lr=0.5>"
    )
    assert repr(driver.instantiate_grad_scaler(init_scale=8.0)) == "<PipelineGradScaler, scale 8>"
    assert re.fullmatch(r"<Pipe: 2 stages, [\d,]+ parameters, with its loss and backward; [^\n]*>", repr(pipe))
    assert str(pipe) != repr(pipe) and "def forward(self" in str(pipe)
    worker = html.escape(threads.workers[1])
    memory = driver.memory(4, x, x)
    for shown, cell, times in ((driver, "submod_1", 1), (driver, worker, 2), (threads, worker, 1), (memory, "B1.3", 1)):
        assert len(re.findall(rf"<td[^>]*>{cell}<", shown._repr_html_())) == times
    simulated = simulate(driver.program(4))
    assert repr(simulated) == "<Simulation: 2 workers, makespan 15, idle 20 %, at most 2 live>"
    assert repr(simulated.timeline) == "<Timeline: 2 workers, 16 passes, makespan 15>"
    assert driver.program(4)._repr_html_() == simulated._repr_html_() == render_svg(simulated.timeline)


def test_a_program_that_cannot_run_or_is_too_large_has_no_picture():
    program = make_schedule("1f1b", workers=2, chunks=2)
    assert replace(program, orders=(program.orders[0][::-1], program.orders[1]))._repr_html_() is None
    assert make_schedule("1f1b", workers=2, chunks=10_000)._repr_html_() is None


@pytest.mark.parametrize("given", [list(range(100_000)), [torch.zeros(50, 50)] * 500, {"a": ["b" * 100] * 10_000}])
def test_errors_show_the_beginning_of_a_large_argument(threads, given):
    pipe, x = pipeline(Chain(2), nn.MSELoss()), torch.randn(8, 8)
    driver = PipelineDriver1F1B(pipe, threads)
    calls = [
        lambda: pipeline(Chain(2), given),
        lambda: pipeline(Chain(2), nn.MSELoss(), num_stages=given),
        lambda: pipeline(Chain(2), nn.MSELoss(), split=given, num_stages=2),
        lambda: Pipe.from_tracing(Chain(2), given),
        lambda: PipelineDriver(given, threads),
        lambda: PipelineDriver(pipe, given),
        lambda: PipelineDriver(pipe, threads, schedule=given),
        lambda: PipelineDriver(pipe, threads, checkpoint=given),
        lambda: PipelineDriver(pipe, threads, world_size=given),
        lambda: PipelineDriver(pipe, threads, step_timeout=given),
        lambda: driver.instantiate_optimizer(given),
        lambda: driver.run(given, x, x),
        lambda: driver.memory(given, x, x),
        lambda: driver.record(limit=given).__enter__(),
        lambda: local_cluster(given),
        lambda: local_cluster(2, threads=given),
    ]
    for call in calls:
        with pytest.raises((PippyError, ArgumentError)) as error:
            call()
        assert len(str(error.value)) < 1000


def test_what_is_short_is_shown_as_it_is():
    assert brief({"placement": [0, 1]}) == "{'placement': [0, 1]}"
    assert brief(torch.ones(2, 2)) == "tensor([[1., 1.], [1., 1.]])"
    assert len(brief(["ab" * 90] * 90)) == 200
