"""What a PipelineTrainer cannot do is refused before anything starts, and the message says what to do."""

import importlib
import sys

import pytest
import torch
from transformers import HfArgumentParser

import pippy.integrations.transformers as integration
from pippy.drivers.base.errors import DriverError, OptimizerError
from pippy.drivers.plan.language.errors import ArgumentError
from pippy.integrations.transformers.arguments import REFUSED_ARGUMENTS, check_training_arguments
from tests.integrations.trainers import PipelineArguments, PipelineTrainer, arguments, gpt2, padded, sentences

GIVEN = {
    "deepspeed": ({"zero_optimization": {}}, "stages= divides the model"),
    "fsdp": ("full_shard", "stages= divides the model, replicas= the rows"),
    "parallelism_config": (object(), "leave it out"),
    "torch_compile": (True, r"PipelineArguments\(compile=True\)"),
    "use_liger_kernel": (True, "leave it out"),
    "auto_find_batch_size": (True, r"PipelineArguments\(memory='12GiB'\)"),
    "neftune_noise_alpha": (5.0, "add the noise in the model's forward"),
    "fp16_full_eval": (True, "use fp16=True"),
    "bf16_full_eval": (True, "use bf16=True"),
    "debug": (["underflow_overflow"], "pippy check"),
}


@pytest.mark.parametrize("name", [each.name for each in REFUSED_ARGUMENTS])
def test_each_says_what_to_do(name, tmp_path):
    value, instead = GIVEN[name]
    args = arguments(tmp_path)
    setattr(args, name, value)  # TrainingArguments itself asks for other packages, or for processes
    with pytest.raises(DriverError, match=f"^{name}=.*cannot do that, because .*; .*{instead}"):
        PipelineTrainer(gpt2(), args, stages=2)


def test_what_most_scripts_give_is_taken(tmp_path):
    check_training_arguments(arguments(tmp_path))


class Elsewhere:
    """TrainingArguments of a process on a GPU, or of one of several."""

    debug = ()

    def __init__(self, device="cpu", world_size=1):
        self.device, self.world_size = torch.device(device), world_size

    neftune_noise_alpha = None


@pytest.mark.parametrize(
    "args, instead",
    [(Elsewhere("cuda:0"), r"TrainingArguments\(use_cpu=True\)"), (Elsewhere(world_size=4), "start the script once")],
)
def test_other_processes_are_refused(args, instead):
    with pytest.raises(DriverError, match=instead):
        check_training_arguments(args)


def test_a_pipeline_that_nobody_has_described(tmp_path):
    with pytest.raises(DriverError, match=r"say stages=4, or open a cluster"):
        PipelineTrainer(gpt2(), arguments(tmp_path))
    with pytest.raises(DriverError, match=r"say PipelineArguments\(stages=2\)"):
        PipelineTrainer(gpt2(), arguments(tmp_path), stages=2, pipeline=PipelineArguments())
    with pytest.raises(DriverError, match=r"give a PipelineArguments"):
        PipelineTrainer(gpt2(), arguments(tmp_path), pipeline=4)
    with pytest.raises(DriverError, match=r"replicas=0: give a number of 1 or more"):
        PipelineTrainer(gpt2(), arguments(tmp_path), pipeline=PipelineArguments(stages=1, replicas=0))


@pytest.mark.parametrize(
    "given, instead",
    [
        ({"schedule": "gpipe"}, "take one of auto, fill_drain, 1f1b"),
        ({"schedule": "zb_h1", "memory": "1GiB"}, "leave one of them out"),
        ({"replicas": 2, "memory": "1GiB"}, "print trainer.driver.choice, and give that schedule"),
        ({"checkpoint": "some"}, "take one of 'always', 'except_last', 'never'"),
        ({"chunks": 0}, "chunks=0"),
    ],
)
def test_a_pipeline_that_cannot_be_made(given, instead, tmp_path):
    with pytest.raises((DriverError, ArgumentError), match=instead):
        PipelineTrainer(gpt2(), arguments(tmp_path), pipeline=PipelineArguments(stages=2, **given))


@pytest.mark.parametrize("name", ["transformers", "accelerate"])
def test_without_the_library(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=rf'{name}.* install the extra: pip install -e "\.\[transformers\]"'):
        importlib.reload(integration)


def test_arguments_of_a_command_line():
    line = ["--stages", "2", "--schedule", "zb_h1", "--memory", "1GiB", "--compile", "--chunks", "3"]
    (found,) = HfArgumentParser(PipelineArguments).parse_args_into_dataclasses(line)
    assert PipelineArguments(stages=2, memory="1GiB").driver_options()["schedule"] == "auto"
    assert found == PipelineArguments(stages=2, schedule="zb_h1", memory="1GiB", compile=True, chunks=3)


def test_a_loss_that_cannot_be_traced(tmp_path, threads):
    class Branching(PipelineTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            loss = outputs.loss if outputs.loss > 1 else outputs.loss * 2
            return (loss, outputs) if return_outputs else loss

    own = Branching(
        gpt2(),
        arguments(tmp_path, max_steps=1),
        train_dataset=sentences(8),
        data_collator=padded,
        stages=2,
        cluster=threads,
    )
    with pytest.raises(Exception, match=r"outputs\.loss > 1"):
        own.train()


def test_an_optimizer_that_moves_parameters_between_steps(tmp_path, threads):
    class Averaged(torch.optim.SGD):
        def train(self):
            pass

    model = gpt2()
    own = PipelineTrainer(
        model, arguments(tmp_path), stages=2, cluster=threads, optimizers=(Averaged(model.parameters()), None)
    )
    with pytest.raises(OptimizerError, match=r"TrainingArguments\(optim='adamw_torch'\)"):
        own.create_optimizer()
