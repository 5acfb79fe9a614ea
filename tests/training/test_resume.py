"""A training that was ended anywhere, and is called again, is the one that was not disturbed: to the bit."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import pippy
from pippy.drivers.base.errors import CheckpointError
from tests.training.models import assert_same, parts_of, run

pytestmark = pytest.mark.usefixtures("in_float64")


class Ended(Exception):
    pass


def raising_at(step):
    def callback(report):
        if report.step == step:
            raise Ended

    return callback


@pytest.mark.parametrize("step", range(1, 9))
def test_an_exception_at_any_step_changes_nothing_of_what_comes(cluster, tmp_path, undisturbed, step):
    with pytest.raises(Ended):
        run(cluster, tmp_path, callbacks=raising_at(step))
    again = run(cluster, tmp_path)
    assert again[0].resumed_at == (step - 1) // 3 * 3
    assert_same(again, undisturbed)


def test_it_is_saved_at_the_end_and_a_second_call_has_nothing_to_do_or_goes_further(cluster, tmp_path, undisturbed):
    first = run(cluster, tmp_path, steps=5, save_every=None)
    assert sorted(name for name in os.listdir(tmp_path) if name[0] != ".") == ["step-5"]
    again = run(cluster, tmp_path, steps=5)
    assert_same(again, first) and again[0].resumed_at == 5
    assert_same(run(cluster, tmp_path), undisturbed)
    assert sorted(name for name in os.listdir(tmp_path) if name[0] != ".") == ["step-6", "step-8"]


def test_minutes_make_a_checkpoint_due(cluster, tmp_path):
    run(cluster, tmp_path, steps=3, save_every=None, save_minutes=1e-9, keep=None)
    assert sorted(name for name in os.listdir(tmp_path) if name[0] != ".") == ["step-1", "step-2", "step-3"]


def test_a_training_that_was_stopped_goes_on_from_there(cluster, tmp_path, undisturbed):
    """The items of the next step were read already when it was stopped."""
    first = run(cluster, tmp_path, callbacks=lambda report: report.stop() if report.step == 4 else None)
    assert first[0].steps == 4
    again = run(cluster, tmp_path)
    assert again[0].resumed_at == 4
    assert_same(again, undisturbed)


@pytest.mark.parametrize("step", [1, 4, 6, 8])
def test_ctrl_c_lets_the_step_end_and_saves_it(cluster, tmp_path, undisturbed, step):
    def press(report):
        if report.step == step:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match=f"after step {step}, saved as .*step-{step}"):
        run(cluster, tmp_path, callbacks=press)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    again = run(cluster, tmp_path)
    assert again[0].resumed_at == step
    assert_same(again, undisturbed)


def test_a_second_ctrl_c_ends_it_at_once(cluster, tmp_path, undisturbed):
    seen = []

    def press(report):
        seen.append(report.step)
        if report.step == 4:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        run(cluster, tmp_path, callbacks=press)
    assert not caught.value.args and seen == [1, 2, 3, 4]
    assert_same(run(cluster, tmp_path), undisturbed)


def test_ctrl_c_without_a_folder_says_that_nothing_is_saved(cluster):
    with pytest.raises(KeyboardInterrupt, match="is not saved: no folder="):
        run(cluster, None, callbacks=lambda report: signal.raise_signal(signal.SIGINT))


@pytest.mark.parametrize(
    "damage", [lambda file: file.write_text(file.read_text().replace("pippy", "pipqy")), os.remove]
)
def test_no_older_checkpoint_is_taken_for_one_that_is_damaged(cluster, tmp_path, damage):
    run(cluster, tmp_path, steps=6)
    damage(tmp_path / "step-6" / "checkpoint.json")
    with pytest.raises(CheckpointError, match=r"step-6/checkpoint\.json is damaged.*move step-6 out of the run"):
        run(cluster, tmp_path)
    os.rename(tmp_path / "step-6", tmp_path / ".step-6")
    assert run(cluster, tmp_path)[0].resumed_at == 3


class Broken(Dataset):
    """Its item raises while Ctrl-C is pressed, as a loader's processes end by it."""

    def __init__(self, press):
        self.press = press

    def __len__(self):
        return 8

    def __getitem__(self, at):
        if self.press and at == 5:
            signal.raise_signal(signal.SIGINT)
            raise RuntimeError("DataLoader worker exited unexpectedly")
        return torch.full((8,), float(at)), torch.ones(8)


def test_a_loader_that_ctrl_c_ends_does_not_hide_it(cluster, tmp_path):
    def train(press):
        parts = parts_of(cluster)
        data = DataLoader(Broken(press), batch_size=2)
        try:
            return pippy.train(parts.driver, data, parts.optimizer, chunks=2, epochs=1, folder=tmp_path / str(press))
        finally:
            parts.driver.close()

    expected = train(False)
    with pytest.raises(KeyboardInterrupt, match="after step 2"):
        train(True)
    os.rename(tmp_path / "True", tmp_path / "again")
    os.rename(tmp_path / "False", tmp_path / "old")
    os.rename(tmp_path / "again", tmp_path / "False")
    assert train(False).losses == expected.losses


def test_data_that_raises_does_so_after_the_step_that_was_under_way(cluster, tmp_path):
    def data():
        yield torch.ones(4, 8), torch.ones(4, 8)
        raise Ended

    parts, reports = parts_of(cluster), []
    with pytest.raises(Ended):
        pippy.train(parts.driver, data(), parts.optimizer, chunks=2, steps=3, callbacks=reports.append)
    assert len(reports) == 1
    parts.driver.close()


class Averaged:
    """An average of the parameters, as scripts have one beside the model."""

    def __init__(self):
        self.values = []

    def __call__(self, report):
        self.values.append(report.loss)

    def state_dict(self):
        return {"values": list(self.values)}

    def load_state_dict(self, state):
        self.values = state["values"]


def test_what_is_named_beside_is_saved_as_it_is_after_the_callbacks(cluster, tmp_path, undisturbed):
    first, second = Averaged(), Averaged()
    run(cluster, tmp_path, steps=4, callbacks=first, also={"averaged": first})
    again = run(cluster, tmp_path, callbacks=second, also={"averaged": second})
    assert second.values == undisturbed[0].losses == again[0].losses


def test_a_checkpoint_that_the_loop_did_not_save_is_refused(cluster, tmp_path):
    parts = parts_of(cluster)
    parts.driver.save(tmp_path, optimizer=parts.optimizer, scheduler=parts.scheduler, step=2)
    parts.driver.close()
    with pytest.raises(CheckpointError, match=r"was not saved by train\(\)"):
        run(cluster, tmp_path)
    assert run(cluster, tmp_path, steps=2, resume=False)[0].resumed_at == 0


def test_a_certain_checkpoint_can_be_gone_on_from(cluster, tmp_path, undisturbed):
    run(cluster, tmp_path, keep=None)
    again = run(cluster, tmp_path, resume=tmp_path / "step-3")
    assert again[0].resumed_at == 3
    assert_same(again, undisturbed)


SCRIPT = """
import sys, torch
from tests.drivers.thread_cluster import thread_cluster
from tests.training.models import run
torch.set_default_dtype(torch.float64)
with thread_cluster(2) as workers:
    run(workers, sys.argv[1], steps=1_000_000, callbacks=lambda report: print("step", report.step, flush=True))
"""


def test_a_signal_ends_a_script_and_the_next_call_goes_on(cluster, tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    script = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    line = ""
    for line in script.stdout:
        if line == "step 3\n":
            break
    os.killpg(script.pid, signal.SIGINT)
    out, err = script.stdout.read(), script.stderr.read()  # communicate() would leave out what was read with that line
    assert script.wait(100) == -signal.SIGINT, err
    last = int((line + out).split()[-1])
    assert f"training ended by Ctrl-C after step {last}, saved as" in err
    assert run(cluster, tmp_path, steps=last + 1)[0].resumed_at == last
