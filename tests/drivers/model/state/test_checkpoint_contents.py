"""What is in the files of a checkpoint, who writes and reads which part, and which checkpoints are kept."""

import json
import os
import threading
from collections import Counter

import pytest
import torch

from pippy import load_checkpoint
from pippy.drivers.base.errors import CheckpointError
from pippy.drivers.files import synced_files
from tests.drivers.model.state.saved_runs import REPLICATE, Training, assert_equal, batch, many
from tests.drivers.models import TiedLanguage

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


def test_each_tensor_is_written_once_by_the_worker_that_has_it(threads, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    training = Training(threads)
    training.train(range(1))
    path = training.driver.save(tmp_path, **training.parts)
    index = json.loads((tmp_path / "save-1" / "model.safetensors.index.json").read_text())
    state = training.driver.state_dict()
    assert sorted(index["weight_map"]) == sorted(state)
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in state.values())
    assert len(set(index["weight_map"].values())) == 3  # the last stage has a copy only
    found = {}
    for name in os.listdir(path):
        if name.startswith("model") and name.endswith(".safetensors"):
            with safetensors.safe_open(os.path.join(path, name), "pt") as file:
                assert file.metadata()["format"] == "pt"
                for key in file.keys():  # noqa: SIM118 - it is no dict
                    assert key not in found and index["weight_map"][key] == name
                    found[key] = file.get_tensor(key)
    assert_equal(found, dict(state))


def test_what_a_state_dict_has_comes_back_whatever_holds_it(threads, tmp_path):
    model, driver, optimizer = many(threads)
    driver.run(2, torch.randn(6, 4), torch.randn(6, 4))
    optimizer.step()
    driver.zero_grad()
    before = driver.state_dict()
    assert before["_loss.scale"] != 1  # the loss's own parameter, too, as it is on its worker
    path = driver.save(tmp_path, optimizer=optimizer)
    with open(os.path.join(path, "model.safetensors.index.json")) as index:
        assert set(json.load(index)["weight_map"]) == set(before) - {"last.weight", "_extra_state"}
    saved = load_checkpoint(tmp_path)["model"]
    assert_equal({**saved}, dict(before))
    assert saved["last.weight"] is saved["first.weight"] and "hidden" not in saved
    twin, other, its = many(threads)
    other.pipe.set_extra_state = twin.set_extra_state  # a Pipe is not the model, whose states it only shows
    other.load(tmp_path, optimizer=its)
    assert_equal(dict(other.state_dict()), dict(before))
    assert torch.equal(twin.unused, model.unused)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_of_parameters_with_more_bits_and_the_scale_come_back(threads, tmp_path, dtype):
    def made():
        training = Training(threads, model=TiedLanguage().to(dtype), master_dtype=torch.float32)
        training.scaler = training.driver.instantiate_grad_scaler(init_scale=8.0, growth_interval=2)
        return training

    def train(training, steps):
        for step in steps:
            loss = training.driver.run(2, *batch(step))
            training.scaler.step(training.optimizer)
            training.scaler.update()
            training.driver.zero_grad()
        return loss, training.scaler.get_scale()

    first = made()
    train(first, range(3))
    first.driver.save(tmp_path, **first.parts, scaler=first.scaler)
    end = train(first, range(3, 6))
    second = made()
    second.driver.load(tmp_path, **second.parts, scaler=second.scaler)
    assert train(second, range(3, 6)) == end
    assert_equal(second.everything(), first.everything())
    second.driver.load(tmp_path)  # the parameters alone: the copies follow
    loaded, states = second.driver.state_dict(), second.optimizer.state_dict()["state"]
    assert not torch.equal(loaded["first.weight"], first.driver.state_dict()["first.weight"])
    for name, state in states.items():
        assert torch.equal(state["master_parameter"].to(dtype), loaded[name])
    third = Training(threads, model=TiedLanguage().to(dtype))
    with pytest.raises(CheckpointError, match="master_dtype"):
        third.driver.load(tmp_path, **third.parts, scaler=None)


def test_each_worker_reads_its_part_once(threads, tmp_path, monkeypatch):
    training = Training(threads, REPLICATE)
    training.train(range(1))
    path = training.driver.save(tmp_path, **training.parts)
    read = Counter()

    class Counting:
        def __getattr__(self, name):
            return getattr(os, name)

        def preadv(self, *args):
            count = os.preadv(*args)
            read[threading.current_thread()] += count
            return count

    monkeypatch.setattr(synced_files, "os", Counting())
    training.driver.load(path, **training.parts)
    controllers = read.pop(threading.current_thread())
    placed, state = training.driver.placed, training.driver.state_dict()
    parts = [
        sum(state[name].nbytes * 3 + 8 for name in state if any(worker == one for one, _ in placed.locations(name)))
        for worker in range(4)
    ]
    assert sorted(read.values()) == sorted(part for part in parts if part)
    headers = sum(
        8 + int.from_bytes(path.read_bytes()[:8], "little") for path in (tmp_path / "save-1").glob("*.safetensors")
    )
    others = sum((tmp_path / "save-1" / name).stat().st_size for name in ("values.pt", "checkpoint.json"))
    assert controllers == headers + others


def test_the_newest_checkpoints_are_kept_whatever_their_steps(threads, tmp_path):
    training = Training(threads)
    for step in (10, 20, 30):
        training.driver.save(tmp_path, step=step)
    training.driver.load(tmp_path / "step-10")
    assert training.driver.save(tmp_path, step=20, keep=2).endswith("step-20.2")
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-20.2", "step-30"]
    assert training.driver.load(tmp_path) == {"step": 20}
