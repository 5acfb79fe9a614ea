"""What cannot be saved or loaded is refused, and changes nothing."""

import builtins
import copy
import hashlib
import io
import pickle
import traceback
from functools import partial

import pytest
import torch
from torch import nn

from pippy import Pipe, PipelineDriver1F1B, load_checkpoint, pipeline
from pippy.drivers.base.errors import CheckpointError
from pippy.ir.base.errors import PippyWarning
from tests.drivers.model.state.saved_runs import Training, WithDropout, assert_equal, batch, cross_entropy, rewrite
from tests.drivers.models import TiedLanguage

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


def changed(training):
    """What `load` could have changed."""
    return {**training.everything(), "random": torch.get_rng_state()}


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


MODEL_FILE, OPTIMIZER_FILE = "model-00002-of-00003.safetensors", "optimizer-00003-of-00003.safetensors"
DAMAGES = {
    "a file is gone": (lambda path: (path / MODEL_FILE).unlink(), "lists 'model-00002.*', which this checkpoint lacks"),
    "a file is cut": (lambda path: cut(path / OPTIMIZER_FILE), r"has \d+ bytes, and \d+ were written"),
    "a bit of the model": (lambda path: flip(path / MODEL_FILE), "is damaged"),
    "a bit of the optimizer": (lambda path: flip(path / OPTIMIZER_FILE), "is damaged"),
    "a bit of the values": (lambda path: flip(path / "values.pt"), "values.pt is damaged"),
    "a manifest that is no JSON": (lambda path: cut(path / "checkpoint.json"), "is no JSON"),
    "a newer version": (lambda path: rewrite(path, lambda found: None, version=3), "newer pippy"),
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


class Hostile:
    """Unpickled, it runs what it names."""

    def __reduce__(self):
        return exec, ("import builtins; builtins.hostile_code_has_run = True",)


def saved_bytes(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def with_values(data):
    """The change of a manifest that makes these the bytes of `values.pt`, as whoever writes the file can."""

    def change(path):
        (path / "values.pt").write_bytes(data)
        noted = {"bytes": len(data), "hashes": {"all": hashlib.sha256(data).hexdigest()}}
        rewrite(path, lambda found: found["files"]["values.pt"].update(noted))

    return change


HOSTILE = {
    "code": with_values(saved_bytes({"values": Hostile()})),
    "code without torch": with_values(pickle.dumps({"values": Hostile()})),
    "no pickle": with_values(b"hostile"),
    "nothing": with_values(b""),
    "a list": with_values(saved_bytes([1])),
    "values that are a list": with_values(saved_bytes({"values": [1]})),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_checkpoint_runs_nothing_and_is_not_advised_to_be_trusted(threads, tmp_path, what):
    training = Training(threads)
    training.driver.save(tmp_path, **training.parts, step=1)
    path, before = tmp_path / "step-1", changed(training)
    HOSTILE[what](path)
    for load in (partial(training.driver.load, **training.parts), load_checkpoint):
        with pytest.raises(CheckpointError, match="load another checkpoint") as caught:
            load(path)
        told = "".join(traceback.format_exception(caught.value))
        assert str(tmp_path) in told and "weights_only" not in told.replace("weights_only=True", "")
    assert not hasattr(builtins, "hostile_code_has_run")
    assert_equal(changed(training), before)


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
        ({**training.parts, "optimizer": sgd}, "is of SGD, but the saved state is of AdamW"),
        ({**training.parts, "optimizer": plain}, "other groups of parameters"),
        ({**training.parts, "optimizer": stranger}, "of another driver"),
        ({**training.parts, "optimizer": torch.optim.SGD(linear.parameters())}, "is a SGD, but the saved state"),
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
        ({"step": -1}, "the number of the step, which names the checkpoint, 0 or more"),
        ({"step": 1.5}, "the number of the step, which names the checkpoint, 0 or more"),
        ({"keep": 0}, "give how many checkpoints to keep"),
        ({"model": 3}, "choose another name"),
        ({"random_state": 3}, "choose another name"),
        ({"strict": 3}, "choose another name"),
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
    with pytest.warns(PippyWarning, match="leaves out gradients"):
        training.driver.save(tmp_path, **training.parts)
    training.driver.load(tmp_path, **training.parts)
    assert all(gradient is None for gradient in training.driver.gradients().values())


def test_folders_that_are_no_checkpoints_are_refused(threads, tmp_path):
    training = Training(threads)
    torch.save({"x": torch.ones(1)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"neither checkpoints .* but model\.pt"):
        training.driver.load(tmp_path)
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        training.driver.load(tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="not there"):
        training.driver.load(tmp_path / "nothing")
