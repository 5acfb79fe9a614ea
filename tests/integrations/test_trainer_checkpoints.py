"""Checkpoints of a PipelineTrainer are those of a Trainer: either goes on from the other's, on any number of stages."""

import copy

import pytest
import torch

from tests.integrations.trainers import (
    PipelineArguments,
    PipelineTrainer,
    Trainer,
    arguments,
    assert_same_history,
    assert_same_model,
    gpt2,
    padded,
    sentences,
    train,
)

OPTIONS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 5,
    "lr_scheduler_type": "linear",
    "save_strategy": "steps",
    "save_steps": 3,
}
DATA = {"train_dataset": sentences(9), "data_collator": padded}


def stages(number):
    return PipelineArguments(stages=number, split="parameters")


def trainer(kind, folder, model, **given):
    options = {} if kind is Trainer else {"driver_options": {"check": False}}
    return kind(copy.deepcopy(model), arguments(folder, **OPTIONS), **options, **DATA, **given)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, threads):
    """A plain run and one on workers, each undisturbed, with a checkpoint after three of five steps."""
    folder, model = tmp_path_factory.mktemp("runs"), gpt2()
    plain = trainer(Trainer, folder / "plain", model)
    own = trainer(PipelineTrainer, folder / "own", model, cluster=threads, pipeline=stages(2))
    train(plain, own)
    return {"plain": plain, "own": own, "folder": folder}


def test_the_files_are_those_of_a_trainer(runs):
    written = {
        which: {each.name for each in (runs["folder"] / which / "checkpoint-3").iterdir()} for which in ("plain", "own")
    }
    assert written["own"] - written["plain"] == {"pippy_random_state.json"}
    assert written["plain"] <= written["own"]
    states = [
        torch.load(runs["folder"] / which / "checkpoint-3/optimizer.pt", weights_only=True)
        for which in ("plain", "own")
    ]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert states[0]["state"].keys() == states[1]["state"].keys()
    for number, expected in states[0]["state"].items():
        for name, value in expected.items():
            torch.testing.assert_close(states[1]["state"][number][name], value, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "saved, number",
    [("own", 2), ("own", 1), ("plain", 2), ("own", None)],
    ids=["own", "fewer stages", "a Trainer's", "in a Trainer"],
)
def test_going_on(saved, number, runs, tmp_path, threads):
    kind, given = (
        (Trainer, {}) if number is None else (PipelineTrainer, {"pipeline": stages(number), "cluster": threads})
    )
    again = trainer(kind, tmp_path, gpt2(), **given)
    train(again, resume_from_checkpoint=str(runs["folder"] / saved / "checkpoint-3"))
    for each in (again.state.log_history, runs["plain"].state.log_history):
        assert "train_loss" in each[-1]  # of the steps of this call alone
    assert_same_history(again, runs["plain"], rel=1e-4, but=("train_loss",))
    assert_same_model(again.model, runs["plain"].model, rtol=1e-3)


def test_dropout_goes_on_to_the_bit(tmp_path, threads):
    model = gpt2(resid_pdrop=0.3, embd_pdrop=0.3)
    own = trainer(PipelineTrainer, tmp_path, model, pipeline=stages(2), cluster=threads)
    losses = []
    for checkpoint in (None, str(tmp_path / "checkpoint-3")):
        train(own, resume_from_checkpoint=checkpoint)
        losses.append([each["loss"] for each in own.state.log_history if "loss" in each])
    assert losses[0] == losses[1] and len(losses[0]) == 5


def test_a_saved_model_is_one_of_the_hub(runs, tmp_path):
    runs["own"].save_model(str(tmp_path))
    assert_same_model(type(gpt2()).from_pretrained(tmp_path), runs["plain"].model)


def test_the_optimizer_outlives_its_workers(runs):
    own = runs["own"]
    state = own.optimizer.state_dict()["state"]
    own.close()
    for number, expected in own.optimizer.state_dict()["state"].items():
        torch.testing.assert_close(state[number]["exp_avg"], expected["exp_avg"], rtol=0, atol=0)
    assert state.keys() == own.optimizer.plain.state_dict()["state"].keys() != set()
