"""What a script's handlers get of pippy's logging, and where what `forward` prints and logs on workers goes."""

import logging
import os
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn

from pippy import PipelineDriver1F1B, local_cluster, pipeline
from pippy.drivers.base.errors import WorkerLostError
from pippy.drivers.protocol.commands import Answer, WorkerLogRecord
from pippy.drivers.session.told import log_for_worker
from pippy.drivers.wire.messages.worker_messages import MessageQueue
from pippy.drivers.worker.worker import LogHandler, Worker
from pippy.drivers.worker.worker_context import WorkerContext
from tests.drivers.models import Chain
from tests.drivers.processes import hearing_of_deaths

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
