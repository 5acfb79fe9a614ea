"""Folders of Hugging Face are loaded, and Hugging Face loads checkpoints."""

import os

import pytest
import torch

from pippy import PipelineDriver1F1B, pipeline
from pippy.drivers.base.errors import CheckpointError
from tests.drivers.model.state.saved_runs import assert_equal

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


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
