"""Checkpoints that are written while the run goes on: their errors, their end, and what stops them."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from pippy import load_checkpoint
from pippy.drivers.base.errors import CheckpointError
from pippy.drivers.files import contents, synced_files
from pippy.drivers.model.state import loading
from tests.drivers.model.state.saved_runs import Training, assert_equal
from tests.drivers.thread_cluster import thread_cluster

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


class Gate:
    """Writes of the workers wait until it is opened."""

    def __init__(self, monkeypatch):
        self.opened, self.reached = threading.Event(), threading.Event()
        monkeypatch.setattr(synced_files, "os", self)

    def __getattr__(self, name):
        return getattr(os, name)

    def write(self, file, data):
        self.reached.set()
        assert self.opened.wait(60)
        return os.write(file, data)


def test_training_goes_on_while_a_checkpoint_is_written(threads, tmp_path, monkeypatch):
    training = Training(threads)
    training.train(range(2))
    before = training.everything()
    gate = Gate(monkeypatch)
    training.driver.save(tmp_path, **training.parts, step=2, wait=False)
    assert gate.reached.wait(60)
    training.train(range(2, 4))
    assert not (tmp_path / "step-2").exists()
    other = Training(threads)
    with pytest.raises(CheckpointError, match="is saving to"):
        other.driver.save(tmp_path)
    gate.opened.set()
    training.driver.save(tmp_path, **training.parts, step=4)  # waits for the one before
    for path, expected in (("step-4", training.everything()), ("step-2", before)):
        training.driver.load(tmp_path / path, **training.parts)
        assert_equal(training.everything(), expected)


def test_a_checkpoint_that_could_not_be_written_is_said_at_the_next_call(threads, tmp_path, monkeypatch):
    training = Training(threads)
    gate = Gate(monkeypatch)
    training.driver.save(tmp_path, **training.parts, wait=False)
    gate.write = lambda file, data: os.write(-1, data)
    gate.opened.set()
    training.driver.saving._thread.join()
    with pytest.raises(CheckpointError, match="no checkpoint was written"):
        training.train(range(1))
    training.train(range(1))
    monkeypatch.undo()
    training.driver.save(tmp_path, wait=False)
    training.driver.close()
    assert os.path.isdir(tmp_path / "save-1")


def test_the_end_of_a_cluster_waits_for_a_checkpoint(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    with thread_cluster(4) as cluster:
        training = Training(cluster)
        training.driver.save(tmp_path, **training.parts, step=0, wait=False)
        assert gate.reached.wait(60)
        threading.Timer(0.05, gate.opened.set).start()
    assert load_checkpoint(tmp_path)["step"] == 0


def test_what_went_wrong_first_is_raised_at_the_end_of_a_cluster(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    gate.write = lambda file, data: os.write(-1, data)
    with pytest.raises(CheckpointError, match="no checkpoint was written"), thread_cluster(4) as cluster:
        Training(cluster).driver.save(tmp_path, wait=False)
    with pytest.raises(ZeroDivisionError) as raised, thread_cluster(4) as cluster:
        Training(cluster).driver.save(tmp_path, wait=False)
        raise ZeroDivisionError
    assert "no checkpoint was written" in raised.value.__notes__[0]


def test_ctrl_c_gives_a_save_up(threads, tmp_path, monkeypatch):
    training = Training(threads)
    gate = Gate(monkeypatch)

    def write(file, data):
        gate.write = lambda file, data: os.write(file, data)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return os.write(file, data)

    gate.write = write
    with pytest.raises(KeyboardInterrupt):
        training.driver.save(tmp_path, **training.parts)
    assert contents.checkpoints_in(tmp_path) == []
    training.train(range(1))
    training.driver.save(tmp_path, **training.parts)  # it is unlocked
    training.driver.load(tmp_path, **training.parts)
    assert sorted(os.listdir(tmp_path)) == [".lock", "save-1"]


def test_a_folder_that_a_host_does_not_see_is_named(threads, tmp_path, monkeypatch):
    class Elsewhere:
        """Makes no folders: as if the controller made them on a disk of its own."""

        def __getattr__(self, name):
            return getattr(os, name)

        def mkdir(self, path):
            pass

    training = Training(threads)
    monkeypatch.setattr(contents, "os", Elsewhere())
    with pytest.raises(CheckpointError, match=r"worker \d .*(?s:.)*is not there on .*all hosts share"):
        training.driver.save(tmp_path)
    monkeypatch.undo()
    path = training.driver.save(tmp_path)
    whole = loading.contents_of

    def moved(path):
        found = whole(path)
        os.rename(tmp_path / "save-1", tmp_path / "save-2")
        return found

    monkeypatch.setattr(loading, "contents_of", moved)
    with pytest.raises(CheckpointError, match=r"nothing was loaded(?s:.)*is not there on .*all hosts share"):
        training.driver.load(path)


SAVES_WITHOUT_END = """
import sys, torch
from torch import nn
from pippy import Pipe, PipelineDriver1F1B, local_cluster

with local_cluster(2, threads=1) as cluster:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    driver = PipelineDriver1F1B(Pipe.from_sequential(model, nn.MSELoss()), cluster)
    for step in range(10**9):
        with torch.no_grad():
            driver.load_state_dict({name: torch.full_like(each, step) for name, each in model.state_dict().items()})
        driver.save(sys.argv[1], step=step, keep=2, wait=step % 2 == 0)
        print(step, flush=True)
"""


def test_a_script_that_is_killed_leaves_a_whole_checkpoint(tmp_path):
    script = subprocess.Popen(
        [sys.executable, "-c", SAVES_WITHOUT_END, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        for line in script.stdout:
            if line == "3\n":
                break
    finally:
        script.kill()
        script.wait()
        script.stdout.close()
    saved = load_checkpoint(tmp_path)
    assert saved["step"] >= 2 and all(bool((each == saved["step"]).all()) for each in saved["model"].values())
