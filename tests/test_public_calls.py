"""A word that a public call does not take is told with the place where it belongs, or with what it is like."""

import inspect

import pytest
import torch
from torch import nn

import pippy
from pippy import PipelineDriver, PipelineDriver1F1B, cluster, pipeline
from pippy.drivers.model.model_on_workers import ModelOnWorkers
from pippy.ir.base.errors import InputError, PippyError

WITHOUT_WORDS = {"pipe_split", "verify", "clear_split_points", "current_cluster", "is_checkpointing", "is_recomputing"}
IN_FORWARD = {"keyed_random"}
MODEL, X, TARGET = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), torch.ones(4, 2), torch.ones(4, 1)


def public_functions():
    for name in pippy.api.__all__:
        value = getattr(pippy, name)
        if inspect.isfunction(value) and name not in WITHOUT_WORDS | IN_FORWARD:
            yield name, value
    for kind in (PipelineDriver1F1B, PipelineDriver, ModelOnWorkers, pippy.Pipe, pippy.IndexLoader):
        for name, value in vars(kind).items():
            if inspect.isfunction(value) and not name.startswith("_"):
                yield f"{kind.__name__}.{name}", value


@pytest.mark.parametrize(("name", "call"), public_functions())
def test_each_public_call_tells_of_a_word_that_it_does_not_take(name, call):
    parameters = inspect.signature(call).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        pytest.skip("takes any word")
    with pytest.raises(PippyError, match=r"takes no no_such_word=; it takes"):
        call(no_such_word=3)


@pytest.mark.parametrize(
    ("word", "told"),
    {
        "loss_reduction": r"belongs to PipelineDriver1F1B\(pipe, cluster, loss_reduction=\.\.\.\)",
        "checkpoint": r"belongs to PipelineDriver1F1B\(pipe, cluster, checkpoint=\.\.\.\)",
        "single_loss": r"belongs to PipelineDriver1F1B\(pipe, cluster, single_loss=\.\.\.\)",
        "schedule": r'belongs to PipelineDriver\(pipe, schedule="auto"\)',
        "memory": r'belongs to PipelineDriver\(pipe, schedule="auto", memory=\.\.\.\)',
        "chunks": r"belongs to driver\.run\(chunks, x, target\)",
        "lr": r"belongs to driver\.instantiate_optimizer\(torch\.optim\.AdamW, lr=\.\.\.\)",
        "threads": r"belongs to cluster\(n, threads=\.\.\.\)",
        "n_stages": r"did you mean num_stages=\?",
        "checkpoints": r"did you mean checkpoint=, as in PipelineDriver1F1B",
    }.items(),
)
def test_words_given_to_pipeline(word, told):
    with pytest.raises(InputError, match=rf"^pipeline\(\) takes no {word}=; .*{told}"):
        pipeline(MODEL, nn.MSELoss(), **{word: 1})


def test_words_given_to_a_driver_and_its_methods():
    pipe = pipeline(MODEL, nn.MSELoss(), num_stages=2, split="parameters")
    with cluster(2, threads=1):
        with pytest.raises(InputError, match=r"takes no num_stages=; it belongs to pipeline\(model, loss_fn, num_st"):
            PipelineDriver1F1B(pipe, num_stages=2)
        with pytest.raises(InputError, match=r"takes no stage_per_worker=; did you mean stages_per_worker=\?"):
            PipelineDriver(pipe, schedule="interleaved_1f1b", stage_per_worker=2)
        driver = PipelineDriver1F1B(pipe)
        with pytest.raises(InputError, match=r"'outpus' \(did you mean outputs=, as in driver\.run\(chunks, x, target"):
            driver.run(2, X, TARGET, outpus=True)
        with pytest.raises(InputError, match=r"^AdamW\(\) takes no weight_decy=; did you mean weight_decay=\?"):
            driver.instantiate_optimizer(torch.optim.AdamW, weight_decy=0.1)
        with pytest.raises(InputError, match=r"^AdamW\(\) takes no params=; did you mean param_groups=\?"):
            driver.instantiate_optimizer(torch.optim.AdamW, params=[])
        with pytest.raises(InputError, match=r"^driver\.save\(\) takes no kep=; did you mean keep=\?"):
            driver.save("nowhere", kep=3)


def test_a_type_error_inside_a_call_is_left_alone():
    class Own(nn.Module):
        def forward(self, x):
            raise TypeError("of the user's")

    with pytest.raises(PippyError, match="of the user's"):
        pipeline(Own(), nn.MSELoss(), num_stages=2)
