"""Models of Hugging Face in one call: loss and every gradient are the plain model's, on the reference and on workers."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from pippy import PipelineDriver, pipeline
from pippy.ir.base.errors import BalanceError, InputError, PippyWarning
from tests.comparisons import twin
from tests.drivers.thread_cluster import thread_cluster
from tests.models.hugging_face import MODELS, ROWS


@pytest.fixture(scope="module")
def threads():
    with thread_cluster(4) as cluster:
        yield cluster


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_gradients(found, expected, rtol=1e-10, atol=1e-14) -> None:
    for name, gradient in expected.items():
        assert (found[name] is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, rtol=rtol, atol=atol, msg=name)


def rows_of(arguments, begin, end):
    return {name: value[begin:end] if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_plain_model(name):
    model, arguments = MODELS[name].make(), MODELS[name].arguments()
    plain = twin(model)
    pipe = pipeline(model, num_stages=4, split="parameters", example_kwargs=arguments)
    assert pipe.num_stages == 4
    for training, rows in ((True, ROWS), (False, ROWS if MODELS[name].fixed_batch else 3)):
        pipe.train(training), plain.train(training)
        given = rows_of(arguments, 0, rows)
        pipe.zero_grad(), plain.zero_grad()
        output, expected = pipe(**given), plain(**given)
        expected.loss.backward()
        torch.testing.assert_close(output.loss, expected.loss, rtol=1e-12, atol=0)
        assert_same_gradients(gradients(model), gradients(plain))
    largest = max(stage.parameters for stage in pipe.balance.stages)
    total = sum(stage.parameters for stage in pipe.balance.stages)
    assert largest < total / 2


DRIVERS = [
    ("gpt2", "1f1b", 4),
    ("llama, tied", "interleaved_1f1b", 8),
    ("bert, classes", "zb_h1", 4),
    ("t5", "1f1b", 4),
]


@pytest.mark.parametrize(("name", "schedule", "stages"), DRIVERS)
def test_workers_train_as_the_plain_model(name, schedule, stages, threads):
    """The micro-batches of one step have the same number of rows, those of the other have not."""
    model, arguments = MODELS[name].make(), MODELS[name].arguments()
    plain = twin(model)
    pipe = pipeline(model, num_stages=stages, split="parameters", example_kwargs=rows_of(arguments, 0, 2))
    arguments = {key: torch.cat([value, value.roll(1, 0)]) for key, value in arguments.items()}
    driver = PipelineDriver(pipe, threads, schedule=schedule)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    own = torch.optim.SGD(plain.parameters(), lr=0.1)
    for chunks in (4, 3):
        optimizer.zero_grad(), own.zero_grad()
        loss, expected = driver.run(chunks, **arguments)["loss"], plain(**arguments).loss
        expected.backward()
        # Most of these models compute their loss in float32, whatever they are in.
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
        found = {key: driver.get_grad(key) for key, _ in plain.named_parameters()}
        assert_same_gradients(found, gradients(plain), rtol=1e-4, atol=1e-7)
        optimizer.step(), own.step()


def test_experts_as_transformers_computes_them_by_default_train_in_float32(threads):
    """By `grouped_mm`, for which torch has a rule for fake tensors that refuses float32."""
    options = {**MODELS["mixtral"].options, "use_cache": True}
    del options["experts_implementation"]
    model, arguments = replace(MODELS["mixtral"], options=options).make().float(), MODELS["mixtral"].arguments()
    plain = twin(model)
    pipe = pipeline(model, num_stages=3, split="parameters", example_kwargs=rows_of(arguments, 0, 2))
    assert not pipe.kept_whole
    for chunks in (1, 2):
        driver = PipelineDriver(pipe, threads, loss_reduction="mean")
        driver.zero_grad(), plain.zero_grad()
        loss, expected = driver.run(chunks, **arguments)["loss"], plain(**arguments).loss
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        found = {key: driver.get_grad(key) for key, _ in plain.named_parameters()}
        assert_same_gradients(found, gradients(plain), rtol=1e-4, atol=1e-6)
    assert min(driver.memory(2, **arguments).peaks) > 0


def test_stages_hold_real_work():
    options = {**MODELS["gpt2"].options, "n_layer": 12, "n_embd": 32}
    model, arguments = replace(MODELS["gpt2"], options=options).make(), MODELS["gpt2"].arguments()
    pipe = pipeline(model, num_stages=4, split="parameters", example_kwargs=arguments)
    held = [stage.parameters for stage in pipe.balance.stages]
    assert max(held) <= 1.3 * sum(held) / 4


def test_lengths_are_free_and_kinds_are_fixed():
    model, arguments = MODELS["llama"].make(), MODELS["llama"].arguments()
    pipe = pipeline(model, num_stages=2, split="parameters", example_kwargs=arguments)
    shorter = {name: value[:, :6] for name, value in arguments.items()}
    torch.testing.assert_close(pipe(**shorter)["loss"], model(**shorter).loss, rtol=1e-12, atol=0)
    with pytest.raises(InputError, match="'attention_mask' is None"):
        pipe(**{**arguments, "attention_mask": None})
    with pytest.raises(
        InputError, match=r"'output_attentions' is True, but the model was traced with|unexpected keyword"
    ):
        pipe(**arguments, output_attentions=True)


def test_without_an_example_the_backbone_is_kept_whole_and_the_reason_asks_for_one():
    with pytest.raises(BalanceError, match=r"(?s)one must call it as a whole.*give example_args or example_kwargs"):
        pipeline(MODELS["gpt2"].make().transformer, num_stages=2, split="parameters")
    with pytest.warns(PippyWarning, match=r"inside of 'transformer' \(GPT2Model\). What to do: give example_args"):
        pipe = pipeline(MODELS["gpt2"].make(), num_stages=2, split="parameters", concrete_args={"labels": None})
    assert "modeling_gpt2.py" in pipe.kept_whole["transformer"]
