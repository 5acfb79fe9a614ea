"""What a prompt and a notebook show of an object, and what errors show of a wrong argument, fits on a screen."""

import html
import inspect
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import pippy
from pippy import Pipe, PipelineDriver, PipelineDriver1F1B, local_cluster, pipeline
from pippy.drivers import plan as schedules
from pippy.drivers.plan import drawings, make_schedule, render_svg, simulate
from pippy.drivers.plan.language.errors import ArgumentError, ScheduleError
from pippy.drivers.report.record import Recording
from pippy.errors import PippyError
from pippy.ir.base.readable import brief
from tests.drivers.models import Chain

PROGRAM = "<Program 1f1b: 2 stages on 2 workers, chunks=4, 48 instructions>"


def test_objects_are_shown_in_a_line(threads, tmp_path):
    driver, x = PipelineDriver1F1B(pipeline(Chain(2), nn.MSELoss()), threads), torch.randn(8, 8)
    names = f"{', '.join(threads.workers[:2])}; none on {', '.join(threads.workers[2:])}"
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
    every = PipelineDriver1F1B(pipeline(Chain(4), nn.MSELoss()), threads)
    assert repr(every) == f"<PipelineDriver1F1B: 1f1b, 4 stages on {', '.join(threads.workers)}>"
    assert str(pipe) != repr(pipe) and "def forward(self" in str(pipe)
    worker = html.escape(threads.workers[1])
    memory = driver.memory(4, x, x)
    for shown, cell, times in ((driver, "submod_1", 1), (driver, worker, 2), (threads, worker, 1), (memory, "B1.3", 1)):
        assert len(re.findall(rf"<td[^>]*>{cell}<", shown._repr_html_())) == times
    simulated = simulate(driver.program(4))
    assert repr(simulated) == "<Simulation: 2 workers, makespan 15, idle 20 %, at most 2 live>"
    assert repr(simulated.timeline) == "<Timeline: 2 workers, 16 passes, makespan 15>"
    assert driver.program(4)._repr_html_() == simulated._repr_html_() == render_svg(simulated.timeline)


def test_a_program_that_cannot_run_or_is_too_large_has_no_picture(monkeypatch):
    program = make_schedule("1f1b", workers=2, chunks=2)
    assert replace(program, orders=(program.orders[0][::-1], program.orders[1]))._repr_html_() is None
    assert program._repr_html_() is not None
    monkeypatch.setattr(drawings, "MOST_DRAWN", 7)
    assert program._repr_html_() is None


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


class Huge:
    """Its ``repr`` has many lines."""

    def __repr__(self) -> str:
        return "x\n" * 5_000


HUGE = {
    "numbers": list(range(5_000)),
    "text": "a\n" * 5_000,
    "dict": dict.fromkeys(range(500), "b" * 50),
    "names": ("layer.weight" * 10,) * 500,
    "object": Huge(),
    "digits": 10**5000,
}


def calls_to_refuse(cluster, tmp_path):
    """Public functions, with arguments that they take, and the parameters that are not to be tried."""
    pipe, x = pipeline(Chain(2), nn.MSELoss()), torch.randn(8, 8)
    driver, program = PipelineDriver1F1B(pipe, cluster), make_schedule("1f1b", workers=2, chunks=2)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    yield pipeline, (Chain(2), nn.MSELoss()), ()
    yield Pipe.from_tracing, (Chain(2),), ()
    yield Pipe.from_sequential, (nn.Sequential(nn.Linear(2, 2), nn.ReLU()),), ()
    yield pippy.verify, (pipe,), ()
    yield pippy.annotate_split_points, (Chain(2), {}), ()
    yield pippy.load_checkpoint, (tmp_path,), ()
    yield pippy.MicroBatches, ([x],), ()
    yield pippy.TensorChunkSpec, (0,), ()
    for cluster_function in (local_cluster, pippy.cluster):
        yield (
            cluster_function,
            (2,),
            "n pin timeout start_timeout controller_hosts _worker".split(),
        )  # workers would start
    for name in ("remap_qualname", "stage_qualnames", "get_grad", "stage"):
        yield getattr(pipe, name), ("submod_0.0.weight",), ()
    for call in (pipe.forward, pipe.draw):
        yield call, (x, x), ()
    yield pipe.load_state_dict, ({},), ()
    made = "chunk_spec batch_dims output_spec loss_reduction out_of_order keyed_random _debug_mask_minibatches step_timeout"
    for driver_class in (PipelineDriver, PipelineDriver1F1B):
        yield driver_class, (pipe, cluster), made.split()
    for call in (driver.run, driver.run_async, driver.memory):
        yield call, (2, x, x), ()
    yield driver.program, (2,), ("chunks",)
    yield driver.save, (tmp_path,), ("optimizers",)
    yield driver.load, (tmp_path,), ()
    yield driver.load_state_dict, ({},), ()
    yield driver.instantiate_optimizer, (torch.optim.SGD,), ()
    yield optimizer.add_param_group, ({},), ()
    yield optimizer.load_state_dict, ({},), ()
    for name in "clip_grad_norm_ clip_grad_value_ copy_to eval generate get_grad grad_norm initialize record".split():
        yield getattr(driver, name), (), ()
    yield Recording, (), ()
    for name in ("make_schedule", "register"):
        yield getattr(schedules, name), ("1f1b",), ("workers", "chunks", "schedule")
    yield schedules.add_recompute, (program, "always"), ()
    for name in ("add_communication", "simulate", "validate", "render_text", "render_svg"):
        yield getattr(schedules, name), (program,), ()
    yield schedules.parse_program, ("",), ()


def with_huge_arguments(function, args, left_out):
    """The calls of a function in which one argument after the other is huge."""
    names = [*inspect.signature(function).parameters]
    for name, parameter in inspect.signature(function).parameters.items():
        for kind, given in HUGE.items() if name not in left_out else ():
            if parameter.kind is parameter.VAR_POSITIONAL:
                yield kind, lambda given=given: function(*args, given)
            elif parameter.kind is parameter.VAR_KEYWORD:
                yield kind, lambda given=given: function(*args, unknown=given)
            elif parameter.kind is not parameter.KEYWORD_ONLY and names.index(name) < len(args):
                at = names.index(name)
                yield kind, lambda given=given, at=at: function(*args[:at], given, *args[at + 1 :])
            else:
                yield kind, lambda given=given, name=name: function(*args, **{name: given})


def test_no_error_shows_all_of_a_huge_argument(threads, tmp_path):
    long, refused = [], 0
    for function, args, left_out in calls_to_refuse(threads, tmp_path):
        for kind, call in with_huge_arguments(function, args, left_out):
            try:
                call()
            except Exception as error:
                refused += isinstance(error, PippyError | ScheduleError)
                if len(str(error)) > 2_500 or "Exceeds the limit" in str(error):
                    long.append((function.__qualname__, kind, type(error).__name__, str(error)[:100]))
    assert not long, "\n".join(map(str, long))
    assert refused > 300
