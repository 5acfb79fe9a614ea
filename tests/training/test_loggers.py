"""What loggers are given is what the training did: each step once, also where it was resumed or has lost a worker."""

import csv
import json
import struct
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import pippy
from pippy import CSVLogger, TensorBoardLogger, WandbLogger
from pippy.drivers.base.errors import DriverError
from pippy.drivers.report.activity import Cause
from pippy.ir.base.errors import PippyWarning
from tests.drivers.processes import hearing_of_deaths
from tests.training.models import Parts, Plain, groups_of, parts_of, run, shuffled
from tests.training.test_recoveries import Kills
from tests.training.test_resume import Ended, raising_at

pytestmark = pytest.mark.usefixtures("in_float64")


class Notes:
    """A logger of a script's own, with nothing but the protocol."""

    def __init__(self):
        self.rows, self.closed = [], 0

    def log(self, step, values):
        self.rows.append((step, values))

    def close(self):
        self.closed += 1


def lines(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def scalars(folder):
    """What TensorBoard shows of a folder: the steps and values of each name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {name: [(each.step, each.value) for each in events.Scalars(name)] for name in events.Tags()["scalars"]}


def history(folder):
    """What a folder of an offline run has for Weights & Biases: the values of each step."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # the process that writes the files has ended
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, at, whole, steps = path.read_bytes(), 7, b"", {}
    while at + 7 <= len(data):
        at += (32768 - at % 32768) * (32768 - at % 32768 < 7)  # a log of leveldb, in blocks
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):
            record, whole = wandb_internal_pb2.Record.FromString(whole), b""
            if record.HasField("history"):
                values = {each.key or each.nested_key[0]: json.loads(each.value_json) for each in record.history.item}
                assert values["_step"] not in steps
                steps[values["_step"]] = values
    return steps


@pytest.fixture
def wandb_logger(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = wandb.Settings(x_disable_stats=True, console="off", x_disable_meta=True)
    yield WandbLogger(mode="offline", project="pippy", dir=str(tmp_path), settings=settings)
    wandb.teardown()


def test_loggers_get_what_plain_pytorch_would_tell(threads):
    notes, plain = Notes(), Plain()
    torch.manual_seed(7)
    groups, expected = list(groups_of(shuffled(), 1, 1)), []
    for items in groups:
        rate = plain.optimizer.param_groups[0]["lr"]
        (loss,) = plain.train([items])
        expected.append((loss, rate, float(nn.utils.get_total_norm([each.grad for each in plain.model.parameters()]))))
    parts = Parts(threads)
    torch.manual_seed(7)
    given = parts.driver, shuffled(), parts.optimizer, parts.scheduler
    pippy.train(*given, chunks=2, epochs=1, max_norm=torch.inf, loggers=notes)  # which clips nothing
    parts.driver.close()
    assert [step for step, _ in notes.rows] == [*range(1, 7)] and notes.closed == 1
    told = [(values["loss"], values["learning_rate"], values["gradient_norm"]) for _, values in notes.rows]
    torch.testing.assert_close(torch.tensor(told), torch.tensor(expected), rtol=1e-12, atol=1e-12)
    workers = threads.workers
    for _, values in notes.rows:
        assert values["epoch"] == 0 and values["samples_per_second"] > 0 and "tokens_per_second" not in values
        assert all(values[f"memory_mib/{name}"] > 50 and 0 < values[f"idle/{name}"] < 1 for name in workers)


def test_memory_and_idle_shares_come_with_the_answers_of_the_steps_that_are_logged(cluster):
    """No message is sent for them; they are those of a recording, where each moment of a worker has a cause."""
    counts, reports, notes = [], [], Notes()
    for loggers in (), notes:
        parts = parts_of(cluster)
        before = list(cluster.session.counts)
        with parts.driver.record() if loggers else nullcontext() as recording:
            data = shuffled(rows=8)
            options = {"chunks": 2, "steps": 4, "loggers": loggers, "log_every": 2, "callbacks": reports.append}
            pippy.train(parts.driver, data, parts.optimizer, **options)
        counts.append([after - each for each, after in zip(before, cluster.session.counts)])
        parts.driver.close()
    assert counts[0] == counts[1]
    assert [step for step, _ in notes.rows] == [2, 4]
    assert [report.idle is not None for report in reports] == [False] * 5 + [True, False, True]
    for report, step in zip(reports[4:], recording.steps):
        causes = [sum(each.duration for each in worker if each.cause != Cause.COMPUTING) for worker in step.activities]
        if report.idle:
            assert [*report.idle.values()] == pytest.approx([each / step.makespan for each in causes])
            assert [*report.memory.values()] == [each.memory for each in step.noted]


def test_a_run_that_was_ended_goes_on_in_the_same_files(cluster, tmp_path, undisturbed):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    path, folder = tmp_path / "logs/metrics.csv", tmp_path / "events"
    held_out = {"eval_data": [next(iter(shuffled()))], "eval_every": 2}

    def loggers():
        return [CSVLogger(path), TensorBoardLogger(folder)]

    def on_disk(report):
        assert lines(path)[-1]["step"] == str(report.step)
        assert scalars(folder)["loss"][-1][0] == report.step
        raising_at(5)(report)

    with pytest.raises(Ended):
        run(cluster, tmp_path / "run", callbacks=on_disk, loggers=loggers(), **held_out)
    assert [each["step"] for each in lines(path)] == [*"12345"]
    result, *_ = run(cluster, tmp_path / "run", loggers=loggers(), **held_out)
    assert result.resumed_at == 3 and result.losses == undisturbed[0].losses
    rows = lines(path)
    assert [(int(each["step"]), float(each["loss"])) for each in rows] == [*enumerate(result.losses, 1)]
    told = {int(each["step"]): float(each["evaluation/loss"]) for each in rows if each["evaluation/loss"]}
    assert told == {step: values["loss"] for step, values in result.evaluations.items()} and len(told) == 4
    shown = scalars(folder)
    assert [step for step, _ in shown["loss"]] == [*range(1, 9)]
    assert [loss for _, loss in shown["loss"]] == pytest.approx(result.losses)  # they are kept in float32
    assert [step for step, _ in shown["evaluation/loss"]] == [2, 4, 6, 8]


def test_a_step_that_is_made_again_after_a_lost_worker_is_logged_once(cluster, tmp_path, undisturbed, wandb_logger):
    path = tmp_path / "metrics.csv"
    loggers = [CSVLogger(path), wandb_logger]
    with hearing_of_deaths(cluster.session):
        result, *_ = run(cluster, tmp_path / "run", callbacks=Kills(cluster, 5), max_recoveries=1, loggers=loggers)
    assert result.recoveries == 1 and result.losses == undisturbed[0].losses
    assert [(int(each["step"]), float(each["loss"])) for each in lines(path)] == [*enumerate(result.losses, 1)]
    assert {step: values["loss"] for step, values in history(tmp_path).items()} == dict(enumerate(result.losses, 1))


def test_the_run_of_the_script_itself_gets_the_values_and_stays_open(threads, tmp_path, wandb_logger):
    import wandb

    own = wandb.init(**wandb_logger.options)
    parts = Parts(threads)
    held_out = [next(iter(shuffled()))]
    result = pippy.train(
        parts.driver, shuffled(), parts.optimizer, chunks=2, steps=2, loggers=WandbLogger(), eval_data=held_out
    )
    parts.driver.close()
    assert wandb.run is own
    own.finish()
    steps = history(tmp_path)
    assert [steps[step]["loss"] for step in (1, 2)] == result.losses
    assert steps[2]["evaluation/loss"] == result.evaluations[2]["loss"]


def test_an_evaluation_at_the_end_is_added_to_the_last_line(threads, tmp_path):
    parts = Parts(threads)
    given = parts.driver, shuffled(), parts.optimizer
    held_out = [next(iter(shuffled()))]
    result = pippy.train(*given, chunks=2, steps=3, eval_data=held_out, loggers=CSVLogger(tmp_path / "metrics.csv"))
    parts.driver.close()
    rows = lines(tmp_path / "metrics.csv")
    assert [float(each["loss"]) for each in rows] == result.losses
    assert [each["evaluation/loss"] for each in rows] == ["", "", str(result.evaluations[3]["loss"])]


class Full(Notes):
    """Writes one step, and finds no room for the next."""

    def log(self, step, values):
        if self.rows:
            raise OSError("No space left on device")
        super().log(step, values)


def test_a_logger_that_fails_is_told_of_once_and_the_run_goes_on(cluster, undisturbed):
    full, notes = Full(), Notes()
    with pytest.warns(PippyWarning, match=r"log\(\) of the logger Full raised OSError: No space left.*goes on") as told:
        again = run(cluster, None, loggers=[full, notes])
    assert len(told) == 1
    assert again[0].losses == undisturbed[0].losses == [values["loss"] for _, values in notes.rows]
    assert len(full.rows) == 1 and not full.closed and notes.closed == 1


def test_a_logger_that_cannot_begin_ends_the_call_before_a_step(threads, tmp_path):
    parts, notes = Parts(threads), Notes()
    logger = CSVLogger(tmp_path / "file/metrics.csv")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file"):
        pippy.train(parts.driver, shuffled(), parts.optimizer, chunks=2, steps=1, loggers=[notes, logger])
    parts.driver.close()
    assert not notes.rows and notes.closed == 1


@pytest.mark.parametrize(
    "loggers, says",
    [
        ("metrics.csv", r"(?s)loggers='metrics.csv'.*has neither; give pippy.CSVLogger\(\"metrics.csv\"\)"),
        ([print], r"loggers=<built-in function print>.*has neither"),
        (CSVLogger, r"loggers=CSVLogger is a class; give an object of it: CSVLogger\(\.\.\.\)"),
        ([Notes(), sys.stderr], r"has no log\(\)"),
        (None, r"loggers=None"),
    ],
)
def test_what_is_no_logger_is_refused_before_anything_is_sent(threads, parts, loggers, says):
    before = list(threads.session.counts)
    with pytest.raises(DriverError, match=says):
        pippy.train(parts.driver, shuffled(), parts.optimizer, chunks=2, steps=1, loggers=loggers)
    with pytest.raises(DriverError, match="log_every=0: give after how many steps to log, 1 or more"):
        pippy.train(parts.driver, shuffled(), parts.optimizer, chunks=2, steps=1, log_every=0)
    assert threads.session.counts == before


@pytest.mark.parametrize("make, package", [(lambda: TensorBoardLogger("run"), "tensorboard"), (WandbLogger, "wandb")])
def test_a_package_that_is_missing_is_named_with_its_line(monkeypatch, make, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DriverError, match=rf"needs the package {package}.*: pip install {package}; pippy.CSVLogger"):
        make()


@pytest.mark.parametrize("make", [CSVLogger, TensorBoardLogger])
def test_a_path_of_another_kind_is_refused(tmp_path, make):
    other = tmp_path if make is CSVLogger else tmp_path / "file"
    if make is TensorBoardLogger:
        pytest.importorskip("tensorboard", reason="tensorboard is not installed")
        other.write_text("")
    for wrong in other, 7:
        with pytest.raises(DriverError, match="give the path of"):
            make(wrong)
