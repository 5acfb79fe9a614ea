"""Checkpoints: a run that goes on from one is the run that was not interrupted, whoever goes on."""

import copy
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pippy
from pippy import MultiUseParameterConfig, Pipe, PipelineDriver, PipelineDriver1F1B, load_checkpoint, pipeline
from pippy.drivers.checkpoints import run_folder, synced_files
from pippy.drivers.errors import CheckpointError
from pippy.drivers.state import loading
from pippy.ir.errors import PippyWarning
from tests.drivers.models import TiedLanguage
from tests.drivers.thread_cluster import thread_cluster

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")
TRANSMIT, REPLICATE = MultiUseParameterConfig.TRANSMIT, MultiUseParameterConfig.REPLICATE


def cross_entropy(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Training:
    """A driver of a tied language model, with an optimizer and a scheduler, and the mini-batches of a run."""

    def __init__(self, cluster, config=REPLICATE, schedule="1f1b", model=None, driver_options=(), **options):
        self.model = model or TiedLanguage()
        pipe = pipeline(self.model, cross_entropy, multi_use_param_spec=config)
        self.driver = PipelineDriver(pipe, cluster, schedule=schedule, **dict(driver_options))
        groups = [{"params": ...}, {"params": ["*.bias", "norm.*"], "weight_decay": 0.0}]
        self.optimizer = self.driver.instantiate_optimizer(
            torch.optim.AdamW, lr=1e-2, weight_decay=0.1, param_groups=groups, **options
        )
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=3e-2, total_steps=20)

    @property
    def parts(self):
        return {"optimizer": self.optimizer, "scheduler": self.scheduler}

    def train(self, steps):
        losses = []
        for step in steps:
            losses.append(self.driver.run(3, *batch(step)))
            for each in (self.optimizer, self.scheduler):
                each.step()
            self.optimizer.zero_grad()
        return torch.stack(losses)

    def everything(self):
        """All that a checkpoint has of it, in one flat dict of tensors and values."""
        found = dict(self.driver.state_dict())
        for name, state in self.optimizer.state_dict()["state"].items():
            found.update({f"{name}/{key}": value for key, value in state.items()})
        found["groups"], found["scheduler"] = self.optimizer.named_groups(), self.scheduler.state_dict()
        return copy.deepcopy(found)


class Plain:
    """The same in plain PyTorch."""

    def __init__(self, model):
        self.model = model
        named = dict(model.named_parameters())
        bare = [name for name in named if name.endswith("bias") or name.startswith("norm.")]
        groups = [
            {"params": [named[name] for name in named if name not in bare]},
            {"params": [named[name] for name in bare], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=3e-2, total_steps=20)

    def train(self, steps):
        losses = []
        for step in steps:
            x, target = batch(step)
            loss = cross_entropy(self.model(x), target)
            loss.backward()
            for each in (self.optimizer, self.scheduler):
                each.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses)


def batch(step):
    numbers = torch.Generator().manual_seed(step)
    return tuple(torch.randint(13, (7, 5), generator=numbers) for _ in range(2))


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert same, name


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


class WithDropout(TiedLanguage):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.2)


# Going on


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


# What is in the files


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


class Many(nn.Module):
    """A tied parameter, buffers of both kinds, an unused parameter, an extra state, and scalars."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("seen", torch.tensor(7))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.note = "as it was"

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        pippy.pipe_split()
        return self.last(x) * self.seen


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output, target):
        return F.mse_loss(output * self.scale, target)


def many(threads):
    model = Many()
    driver = PipelineDriver1F1B(pipeline(model, Scaled()), threads)
    return model, driver, driver.instantiate_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)


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


# Hugging Face


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


# Who reads what


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


# Beside the run


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
    with pytest.raises(CheckpointError, match="something else saves"):
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
    assert run_folder.checkpoints_in(tmp_path) == []
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
    monkeypatch.setattr(run_folder, "os", Elsewhere())
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


# Which are kept


def test_the_newest_checkpoints_are_kept_whatever_their_steps(threads, tmp_path):
    training = Training(threads)
    for step in (10, 20, 30):
        training.driver.save(tmp_path, step=step)
    training.driver.load(tmp_path / "step-10")
    assert training.driver.save(tmp_path, step=20, keep=2).endswith("step-20.2")
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-20.2", "step-30"]
    assert training.driver.load(tmp_path) == {"step": 20}


# What is refused


def changed(training):
    """What `load` could have changed."""
    return {**training.everything(), "random": torch.get_rng_state()}


def rewritten(path, change):
    """A checkpoint with something else in its manifest."""
    manifest = json.loads((path / "checkpoint.json").read_text())
    change(manifest)
    (path / "checkpoint.json").write_text(json.dumps(manifest))


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


MODEL_FILE, OPTIMIZER_FILE = "model-00002-of-00003.safetensors", "optimizer-00003-of-00003.safetensors"
DAMAGES = {
    "a file is gone": (lambda path: (path / MODEL_FILE).unlink(), "lacks model-00002"),
    "a file is cut": (lambda path: cut(path / OPTIMIZER_FILE), r"has \d+ bytes, and \d+ were written"),
    "a bit of the model": (lambda path: flip(path / MODEL_FILE), "is damaged"),
    "a bit of the optimizer": (lambda path: flip(path / OPTIMIZER_FILE), "is damaged"),
    "a bit of the values": (lambda path: flip(path / "values.pt"), "values.pt is damaged"),
    "a manifest that is no JSON": (lambda path: cut(path / "checkpoint.json"), "cannot be read"),
    "a newer version": (lambda path: rewritten(path, lambda found: found.update(version=2)), "newer pippy"),
    "not there": (lambda path: path.rename(path.parent / "other"), "is not there"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_changes_nothing(threads, tmp_path, damage):
    training = Training(threads)
    training.train(range(1))
    path = tmp_path / "step-1"
    training.driver.save(tmp_path, **training.parts, step=1)
    training.train(range(1, 2))
    before = changed(training)
    hurt, message = DAMAGES[damage]
    hurt(path)
    with pytest.raises(CheckpointError, match=message):
        training.driver.load(path, **training.parts)
    assert_equal(changed(training), before)
    training.train(range(2, 3))


def other_model(width=8, extra=False, dtype=None):
    model = TiedLanguage(width=width)
    if extra:
        model.more = nn.Linear(2, 2)
    return model.to(dtype or torch.float64)


OTHERS = {
    "widths": (lambda: other_model(width=6), r"float64\[6, 6\] in the checkpoint, and float64\[8, 8\] in the model"),
    "an entry more": (lambda: other_model(extra=True), "the model has no more.weight, more.bias"),
    "dtypes": (lambda: other_model(dtype=torch.float32), "is float32.* in the checkpoint, and float64"),
}


@pytest.mark.parametrize("which", OTHERS)
def test_a_checkpoint_of_another_model_changes_nothing(threads, tmp_path, which):
    make, message = OTHERS[which]
    driver = PipelineDriver1F1B(pipeline(make(), cross_entropy), threads)
    driver.save(tmp_path)
    training = Training(threads)
    before = changed(training)
    with pytest.raises(CheckpointError, match=message):
        training.driver.load(tmp_path)
    assert_equal(changed(training), before)
    if which == "dtypes":  # what the message says
        training.driver.load_state_dict(load_checkpoint(tmp_path)["model"], strict=False)


def test_a_model_with_more_entries_than_the_checkpoint_is_refused(threads, tmp_path):
    training = Training(threads)
    training.driver.save(tmp_path)
    more = PipelineDriver1F1B(pipeline(other_model(extra=True), cross_entropy), threads)
    with pytest.raises(CheckpointError, match=r"the checkpoint lacks more\.weight, more\.bias"):
        more.load(tmp_path)


@pytest.mark.parametrize("was_keyed", [True, False])
def test_random_numbers_of_another_kind_are_refused_or_left(threads, tmp_path, was_keyed):
    def made(keyed):
        return Training(threads, model=WithDropout(), driver_options={"keyed_random": keyed})

    first, second = made(was_keyed), made(not was_keyed)
    first.driver.save(tmp_path, **first.parts)
    before, state = changed(second), second.driver.random_state
    remedy = "without" if was_keyed else "with"
    with pytest.raises(CheckpointError, match=f"make the driver {remedy} keyed_random=False, or say random_state=None"):
        second.driver.load(tmp_path, **second.parts)
    with pytest.raises(CheckpointError, match=r"random_state=3: random states are loaded if this is left out"):
        second.driver.load(tmp_path, **second.parts, random_state=3)
    assert_equal(changed(second), before)
    second.driver.load(tmp_path)  # the parameters alone
    second.driver.load(tmp_path, **second.parts, random_state=None)
    assert torch.equal(changed(second)["random"], before["random"]) and second.driver.random_state == state
    assert_equal(second.everything(), first.everything())
    assert made(was_keyed).driver.load(tmp_path, optimizer=None, scheduler=None) == {}


def test_a_part_of_a_checkpoint(threads, tmp_path):
    """With ``strict=False``: what plain PyTorch takes, and the rest is as it was."""
    theirs, ours = other_model(extra=True), TiedLanguage()
    ours.head, ours.also = nn.Linear(3, 3), nn.Linear(3, 3)
    ours.also.weight = ours.head.weight
    driver = PipelineDriver1F1B(pipeline(theirs, cross_entropy), threads)
    driver.save(tmp_path / "theirs", step=3)
    other = PipelineDriver1F1B(pipeline(ours, cross_entropy), threads)
    before, plain = other.state_dict(), copy.deepcopy(ours)
    with pytest.raises(
        CheckpointError, match=r"(?s)lacks head\.weight.*has no more\.weight.*load\(path, strict=False\)"
    ):
        other.load(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="strict='no': give True"):
        other.load(tmp_path / "theirs", strict="no")
    assert_equal(dict(other.state_dict()), dict(before))
    loaded = other.load(tmp_path / "theirs", strict=False)
    wanted = plain.load_state_dict(theirs.state_dict(), strict=False)
    assert loaded == {"step": 3}
    assert (set(loaded.missing_keys), loaded.unexpected_keys) == (set(wanted.missing_keys), wanted.unexpected_keys)
    assert_equal(dict(other.state_dict()), dict(plain.state_dict()))
    assert_equal(
        {name: other.state_dict()[name] for name in loaded.missing_keys}, {n: before[n] for n in loaded.missing_keys}
    )
    PipelineDriver1F1B(pipeline(other_model(width=6), cross_entropy), threads).save(tmp_path / "misshapen")
    with pytest.raises(CheckpointError, match=r"float64\[6, 6\] in the checkpoint, and float64\[8, 8\]"):
        other.load(tmp_path / "misshapen", strict=False)
    assert_equal(dict(other.state_dict()), dict(plain.state_dict()))


def test_other_optimizers_and_what_is_forgotten_are_refused(threads, tmp_path):
    training = Training(threads)
    training.train(range(1))
    training.driver.save(tmp_path, **training.parts, step=1)
    driver, stranger, linear = training.driver, Training(threads).optimizer, nn.Linear(2, 2)
    before = changed(training)
    sgd = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    plain = driver.instantiate_optimizer(torch.optim.AdamW, lr=0.1)
    wrong = [
        ({"optimizer": training.optimizer}, "also has a state for 'scheduler'"),
        ({**training.parts, "step": 3}, "has no state for 'step'"),
        ({**training.parts, "optimizer": sgd}, "is of SGD, and the state that was saved is of AdamW"),
        ({**training.parts, "optimizer": plain}, "other groups of parameters"),
        ({**training.parts, "optimizer": stranger}, "of another driver"),
        ({**training.parts, "optimizer": torch.optim.SGD(linear.parameters())}, "is a SGD, and the state"),
        ({**training.parts, "scheduler": training.optimizer}, "another kind of object"),
        ({**training.parts, "scheduler": linear}, "refused the state"),
    ]
    for given, message in wrong:
        with pytest.raises(CheckpointError, match=message):
            driver.load(tmp_path, **given)
    assert_equal(changed(training), before)
    assert driver.load(tmp_path, optimizer=training.optimizer, scheduler=None) == {"step": 1}


def test_what_cannot_be_saved_is_refused_before_anything_is_written(threads, tmp_path):
    training = Training(threads)
    folder = tmp_path / "run"
    wrong = [
        ({"step": -1}, "the step names the checkpoint"),
        ({"step": 1.5}, "the step names the checkpoint"),
        ({"keep": 0}, "give how many checkpoints to keep"),
        ({"model": 3}, "take another name"),
        ({"random_state": 3}, "take another name"),
        ({"strict": 3}, "take another name"),
        ({"function": print}, "cannot be saved"),
        ({"optimizer": Training(threads).optimizer}, "of another driver"),
    ]
    for given, message in wrong:
        with pytest.raises(CheckpointError, match=message):
            training.driver.save(folder, **given)
    assert not folder.exists()


def test_tensors_that_the_format_does_not_have_are_refused(threads, tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].register_buffer("mask", torch.eye(2).to_sparse())
    driver = PipelineDriver1F1B(Pipe.from_sequential(model, nn.MSELoss()), threads)
    with pytest.raises(CheckpointError, match=r"'0\.mask' cannot be written .*sparse"):
        driver.save(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_gradients_that_no_step_has_used_are_warned_of(threads, tmp_path):
    training = Training(threads)
    training.driver.run(3, *batch(0))
    with pytest.warns(PippyWarning, match="has no gradients"):
        training.driver.save(tmp_path, **training.parts)
    training.driver.load(tmp_path, **training.parts)
    assert all(gradient is None for gradient in training.driver.gradients().values())


def test_folders_that_are_no_checkpoints_are_refused(threads, tmp_path):
    training = Training(threads)
    torch.save({"x": torch.ones(1)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"neither checkpoints .* but model\.pt"):
        training.driver.load(tmp_path)
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        training.driver.load(tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="not there"):
        training.driver.load(tmp_path / "nothing")
