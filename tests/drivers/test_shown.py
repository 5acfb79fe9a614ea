"""What a prompt, a notebook, an error and a log show of an object, a run, and a wrong argument."""

import html
import inspect
import logging
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import pippy
from pippy import Pipe, PipelineDriver, PipelineDriver1F1B, local_cluster, pipeline
from pippy.drivers import plan as schedules
from pippy.drivers.base.errors import WorkerLostError
from pippy.drivers.plan import drawings, make_schedule, render_svg, simulate
from pippy.drivers.plan.language.errors import ScheduleError
from pippy.drivers.protocol.commands import Answer, WorkerLogRecord
from pippy.drivers.report.record import Recording
from pippy.drivers.session.told import log_for_worker
from pippy.drivers.wire.messages.worker_messages import MessageQueue
from pippy.drivers.worker.worker import LogHandler, Worker
from pippy.drivers.worker.worker_context import WorkerContext
from pippy.errors import PippyError
from pippy.ir.base.readable import brief
from tests.drivers.models import Chain
from tests.drivers.processes import hearing_of_deaths

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
    assert repr(running) == "<PostedStep, not waited for>"
    running.result()
    assert repr(running) == "<PostedStep, done>"
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
    "tensors": [torch.zeros(50, 50)] * 500,
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
    yield lambda limit: driver.record(limit=limit).__enter__(), (1,), ()
    yield lambda seconds: PipelineDriver(pipe, cluster, step_timeout=seconds), (1.0,), ()
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


# What a script's handlers get of pippy's logging, and where what `forward` prints and logs on workers goes.


SCRIPT = """
import logging, sys
import torch
from torch import nn
from pippy import PipelineDriver, PipeTracer, cluster, pipeline

class Speaking(nn.Module):
    def forward(self, x):
        print("printed", flush=True)
        logging.getLogger("mine").info("told")
        logging.getLogger("mine").warning("warned")
        return x * 1

class Tracer(PipeTracer):
    def is_leaf_module(self, module, name):
        return isinstance(module, Speaking) or super().is_leaf_module(module, name)

logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="script: %(name)s %(levelname)s %(message)s")
logging.getLogger("pippy").setLevel(logging.INFO)
pipe = pipeline(nn.Sequential(nn.Linear(2, 2), Speaking(), nn.Linear(2, 1)), nn.MSELoss(), split=["2"], tracer=Tracer())
with cluster(2) as workers:
    driver = PipelineDriver(pipe, workers, schedule="auto", check=False)
    for _ in range(12):
        driver.run(2, torch.ones(4, 2), torch.ones(4, 1))
"""


def test_the_script_s_handlers_get_pippy_s_records_and_not_those_of_forward_on_a_worker():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("script: ")]
    chosen = [line for line in told if line.startswith("script: pippy.drivers.choice.auto INFO schedule='auto': ")]
    assert chosen and all(line.startswith("script: pippy.") for line in told)
    assert "printed" in done.stdout.splitlines()
    assert "warned" in done.stderr.splitlines() and "told" not in done.stderr


def test_what_happens_to_a_run_is_logged_also_what_its_workers_do(alone, caplog, tmp_path):
    caplog.set_level(logging.DEBUG, logger="pippy")
    x = torch.ones(4, 8)
    with local_cluster(2, threads=1) as cluster:
        pipe = pipeline(Chain(2), nn.MSELoss())
        driver = PipelineDriver1F1B(pipe, cluster, compile={"backend": "eager"}, check=False)
        path = driver.save(tmp_path, step=0)
        driver.run(2, x, x)
        os.kill(cluster.session.workers[1].pid, signal.SIGKILL)
        with hearing_of_deaths(cluster.session), pytest.raises(WorkerLostError):
            driver.run(2, x, x)
        driver.recover()
        driver.run(2, x, x)
    told = [(each.name.removeprefix("pippy.drivers."), each.levelname, each.getMessage()) for each in caplog.records]
    of_script = [each for each, record in zip(told, caplog.records) if not hasattr(record, "worker")]
    begins = [
        ("engines.cluster", "INFO", "2 workers started: worker0 (pid "),
        ("driver.driver_base", "INFO", "<PipelineDriver1F1B: 1f1b, 2 stages on worker0, worker1>"),
        ("model.state.saving", "INFO", f"checkpoint written: {path}, "),
        ("driver.steps.programs", "DEBUG", "program for training sent: <Program 1f1b: 2 stages on 2 workers, chunks=2"),
        ("session.session", "WARNING", "worker 'worker1' (pid "),
        ("model.recovery.recovery", "INFO", "worker 'worker1' has another process: pid "),
        ("model.state.loading", "INFO", f"checkpoint loaded: {path}"),
        ("model.recovery.recovery", "INFO", f"recovered: the run goes on from {path}"),
        ("engines.cluster", "INFO", "cluster closed: worker0, worker1"),
    ]
    assert len(of_script) == len(begins)
    assert all(one[:2] == other[:2] and one[2].startswith(other[2]) for one, other in zip(of_script, begins))
    assert of_script[4][2].endswith("is lost: killed by SIGKILL")
    for worker, times in ("worker0", 1), ("worker1", 2):  # the second process of worker1 compiles, too
        compiled = [text for name, _, text in told if name.startswith("worker.compiled") and text.startswith(worker)]
        kinds = [text.removeprefix(f"{worker}: ")[:9] for text in compiled]
        assert kinds == ["compiles ", "compiled "] * (len(kinds) // 2) and len(kinds) >= 2 * times
    assert told.count(("worker.worker", "DEBUG", "worker1: holds stages of driver 0")) == 2


def test_a_record_travels_with_an_answer_and_an_answer_without_one_is_as_it_was():
    worker = Worker(WorkerContext(0, ("only",), MessageQueue(), None, "cpu", 1))
    assert type(Answer(worker.tell())) is Answer and worker.tell() is None
    logger, level = logging.getLogger("pippy.example"), logging.getLogger("pippy").level
    with worker.log.of_this_process(logging.INFO):
        logger.debug("not asked for")
        try:
            raise ValueError("why")
        except ValueError:
            logger.exception("it failed, %d times", 2)
    logger.warning("of the script")
    assert logging.getLogger("pippy").level == level
    (record,) = worker.tell().records
    assert (
        record.level == logging.ERROR
        and record.function == "test_a_record_travels_with_an_answer_and_an_answer_without_one_is_as_it_was"
    )
    assert record.message.startswith("it failed, 2 times\nTraceback") and record.message.endswith("ValueError: why")
    assert worker.tell() is None
    worker.context.messages.close()


def test_too_many_records_are_counted_and_a_long_one_is_cut():
    handler = LogHandler(most=2)
    for text in "x" * 100_000, "second", "third", "fourth":
        handler.handle(logging.makeLogRecord({"name": "pippy", "levelno": 30, "msg": text}))
    first, second, dropped = handler.take()
    assert len(first.message) < 10_000 and second.message == "second"
    assert dropped.message.startswith("2 records of this worker were dropped") and handler.take() == ()


def test_a_handler_of_the_script_that_fails_is_no_failure_of_the_run(caplog):
    class Failing(logging.Handler):
        def emit(self, record):
            raise OSError("no space left")

    failing = Failing()
    logging.getLogger("pippy").addHandler(failing)
    try:
        log_for_worker("a", 7, [WorkerLogRecord("pippy.example", 30, text, 0.0, "", 0, "") for text in ("one", "two")])
    finally:
        logging.getLogger("pippy").removeHandler(failing)


LEVELS = """
import logging, sys
import pippy
logger = logging.getLogger("pippy.example")
logger.info("first"), logger.debug("too low")
logging.basicConfig(stream=sys.stdout, format="script: %(message)s")
logger.info("second")
"""


def test_pippy_log_sets_the_level_and_writes_where_the_script_has_no_handler():
    def run(**given):
        environment = {name: value for name, value in os.environ.items() if name != "PIPPY_LOG"} | given
        return subprocess.run(
            [sys.executable, "-c", LEVELS], capture_output=True, text=True, env=environment, timeout=60
        )

    silent, told, wrong = run(), run(PIPPY_LOG="Info"), run(PIPPY_LOG="loud")
    assert (silent.stdout, silent.stderr) == ("", "")
    assert told.stderr.endswith(" INFO pippy.example: first\n") and told.stderr.count("\n") == 1
    assert told.stdout == "script: second\n"
    last = wrong.stderr.splitlines()[-1]
    assert wrong.returncode == 1
    assert last.endswith("PIPPY_LOG=loud: give one of debug, info, warning, error, critical, or unset it")
