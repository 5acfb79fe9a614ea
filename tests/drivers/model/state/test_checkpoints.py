"""Checkpoints: their contents, saving beside the run, and runs that go on from them."""

import copy
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent import futures

import pytest
import torch

from pippy import PipelineDriver1F1B, load_checkpoint, pipeline
from pippy.drivers.base.errors import CheckpointError
from pippy.drivers.files import contents, synced_files
from pippy.drivers.model.state import loading
from tests.drivers.model.state.saved_runs import (
    REPLICATE,
    TRANSMIT,
    Plain,
    Training,
    WithDropout,
    assert_equal,
    batch,
    close,
    many,
)
from tests.drivers.models import TiedLanguage
from tests.drivers.thread_cluster import thread_cluster

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


# Checkpoints: a run that goes on from one is the run that was not interrupted, whoever goes on.


@pytest.mark.parametrize("wait", [True, False])
def test_a_run_that_goes_on_elsewhere_equals_the_undisturbed_one_to_the_bit(cluster, tmp_path, wait):
    first = Training(cluster, model=WithDropout())
    first.train(range(3))
    random.seed(5)
    path = first.driver.save(tmp_path, **first.parts, step=3, drawn=[1.5, "a"], wait=wait)
    assert path == str(tmp_path / "step-3")
    drawn = torch.rand(2), random.random()
    undisturbed, end = first.train(range(3, 8)), first.everything()
    first.driver.close()

    torch.manual_seed(99)
    second = Training(cluster, model=WithDropout())
    second.train(range(50, 52))
    values = second.driver.load(tmp_path, **second.parts)
    assert values == {"step": 3, "drawn": [1.5, "a"]}
    assert torch.equal(torch.rand(2), drawn[0]) and random.random() == drawn[1]
    assert torch.equal(second.train(range(values["step"], 8)), undisturbed)
    assert_equal(second.everything(), end)
    second.driver.close()


SPLITS = [
    (4, REPLICATE, "1f1b", 2, TRANSMIT, "fill_drain"),
    (2, TRANSMIT, "zb_h1", 4, REPLICATE, "1f1b"),
    (1, REPLICATE, "1f1b", 2, REPLICATE, "interleaved_1f1b"),
]


@pytest.mark.parametrize("workers, config, schedule, others, other_config, other_schedule", SPLITS)
def test_any_split_goes_on_as_plain_pytorch_would(
    threads, tmp_path, workers, config, schedule, others, other_config, other_schedule
):
    model = TiedLanguage()
    plain = Plain(copy.deepcopy(model))
    options = {} if schedule != "interleaved_1f1b" else {"stages_per_worker": 2}
    first = Training(threads, config, schedule, model, {"world_size": workers, **options})
    close(first.train(range(3)), plain.train(range(3)))
    first.driver.save(tmp_path, **first.parts)

    second = Training(threads, other_config, other_schedule, driver_options={"world_size": others})
    second.driver.load(tmp_path, **second.parts)
    mine, theirs = second.train(range(3, 8)), plain.train(range(3, 8))
    close(mine, theirs)
    close(dict(second.driver.state_dict()), dict(plain.model.state_dict()))


def test_plain_pytorch_goes_on_from_a_checkpoint_and_a_driver_from_plain_pytorch(threads, tmp_path):
    model = TiedLanguage()
    plain = Plain(copy.deepcopy(model))
    training = Training(threads, model=model)
    close(training.train(range(3)), plain.train(range(3)))
    training.driver.save(tmp_path, **training.parts, step=3)
    other = Plain(TiedLanguage())
    assert load_checkpoint(tmp_path, **vars(other)) == {"step": 3}
    close(other.train(range(3, 6)), plain.train(range(3, 6)))

    back = Training(threads, TRANSMIT)
    back.driver.load_state_dict(other.model.state_dict())
    saved = load_checkpoint(
        tmp_path
    )  # numbered in the order of the groups, which is another one than that of the plain ones
    names = [name for group in saved["optimizer"]["param_groups"] for name in group["param_names"]]
    assert names == [name for name, _ in back.optimizer.named_parameters()]
    own = {id(each): name for name, each in other.model.named_parameters()}
    plains = [own[id(each)] for group in other.optimizer.param_groups for each in group["params"]]
    state = other.optimizer.state_dict()
    saved["optimizer"]["state"] = {names.index(name): state["state"][plains.index(name)] for name in names}
    for group, its in zip(saved["optimizer"]["param_groups"], state["param_groups"]):
        group.update({key: value for key, value in its.items() if key not in ("params", "param_names")})
    back.optimizer.load_state_dict(saved["optimizer"])
    back.scheduler.load_state_dict(other.scheduler.state_dict())
    close(back.train(range(6, 9)), plain.train(range(6, 9)))


# Folders of Hugging Face are loaded, and Hugging Face loads checkpoints.


@pytest.fixture
def language():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "n_embd": 4, "n_head": 1, "n_layer": 2, "n_positions": 8, "use_cache": False}

    def make():
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, resid_pdrop=0.0))
        ids = torch.randint(11, (2, 5))
        return model, pipeline(
            model, num_stages=2, split="parameters", example_kwargs={"input_ids": ids, "labels": ids}
        )

    return make


@pytest.mark.parametrize("form", ["one file", "shards", "shards without an index"])
def test_a_folder_of_hugging_face_is_loaded(threads, language, tmp_path, form):
    theirs, _ = language()
    theirs.save_pretrained(tmp_path, max_shard_size="1MB" if form == "one file" else "1KB")
    if form == "shards without an index":
        os.remove(tmp_path / "model.safetensors.index.json")
    _, pipe = language()
    driver = PipelineDriver1F1B(pipe, threads)
    assert driver.load(tmp_path) == {}
    assert_equal(dict(driver.state_dict()), dict(theirs.state_dict()))
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(CheckpointError, match="has no state for 'optimizer'"):
        driver.load(tmp_path, optimizer=optimizer)


def test_hugging_face_loads_a_checkpoint(threads, language, tmp_path):
    model, pipe = language()
    driver = PipelineDriver1F1B(pipe, threads)
    with torch.no_grad():
        driver.load_state_dict({name: torch.randn_like(each) for name, each in model.state_dict().items()})
    path = driver.save(tmp_path)
    model.config.save_pretrained(path)
    again = type(model).from_pretrained(path)
    assert_equal(dict(again.state_dict()), dict(driver.state_dict()))


# Checkpoints that are written while the run goes on: their errors, their end, and what stops them.


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
    futures.wait([training.driver.saving._beside])
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
