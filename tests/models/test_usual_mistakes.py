"""What goes wrong first with a model of Hugging Face: the right numbers all the same, or a message whose advice works."""

import re
from collections import UserDict  # of which a tokenizer's BatchEncoding is a class
from functools import partial

import pytest
import torch

from pippy import PipelineDriver1F1B, pipeline
from pippy.drivers.base.errors import MicrobatchError, OptimizerError
from pippy.ir.base.errors import BalanceError, InputError, TracingError
from tests.comparisons import twin
from tests.drivers.thread_cluster import thread_cluster
from tests.models.hugging_face import MODELS, WORDS, transformers

IDS = torch.randint(3, WORDS, (6, 10), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, 7:] = 0
EXAMPLE = {"input_ids": IDS[:2], "labels": IDS[:2]}


def gpt2(**options):
    torch.manual_seed(0)
    config = transformers().GPT2Config(**{**MODELS["gpt2"].options, "n_layer": 2, **options})
    return transformers().GPT2LMHeadModel(config).double()


made = partial(pipeline, split=["transformer.h.1"])


@pytest.fixture(scope="module")
def pipe():
    return made(gpt2(), example_kwargs=EXAMPLE)


@pytest.fixture(scope="module")
def driver(pipe):
    with thread_cluster(2) as threads:
        yield PipelineDriver1F1B(pipe, threads)


CALL = {"input_ids": IDS, "labels": IDS}


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {"input_ids": IDS}, r"'labels' is None.*Give it in this call, too, or .* an example that leaves it out$"),
        ((), {**CALL, "attention_mask": MASK}, r"in the example, too: example_kwargs=.*'attention_mask': ...}$"),
        ((), {**CALL, "num_items_in_batch": 60}, r"in the example, too: example_kwargs=.*'num_items_in_batch': ...}$"),
        ((UserDict(CALL),), {}, r"unpack it, as in pipe\(\*\*batch\)"),
        ((), {**CALL, "input_ids": IDS.tolist()}, r"^input_ids is list of 6, the first .{,300}$"),
    ],
)
def test_what_a_call_forgets_or_adds_is_named(args, kwargs, words, pipe):
    with pytest.raises(InputError, match=words):
        pipe(*args, **kwargs)


@pytest.mark.parametrize("more", [{"attention_mask": MASK}, {"num_items_in_batch": 60}, {"use_cache": False}, {}])
def test_the_advice_for_arguments_is_right(more):
    model = gpt2(use_cache="use_cache" in more)
    plain, call = twin(model), {"input_ids": IDS, **({"labels": IDS} if more else {}), **more}
    found, expected = made(model, example_kwargs=call)(**call), plain(**call)
    assert set(found) == set(expected)
    torch.testing.assert_close(found.logits, expected.logits)
    if more:
        torch.testing.assert_close(found.loss, expected.loss.detach())


def test_a_cache_that_only_the_config_asks_for_is_left_out():
    model = gpt2(use_cache=True)
    expected, pipe = model(**CALL), made(model, example_kwargs=EXAMPLE)
    found = pipe(**CALL)
    assert set(found) == set(expected) - {"past_key_values"}
    torch.testing.assert_close(found.loss, expected.loss.detach())
    assert model.config.use_cache is True
    with pytest.raises(InputError, match="'use_cache' is True, but the model was traced with use_cache=False"):
        pipe(**CALL, use_cache=True)


def test_a_cache_that_a_wrapper_returns_is_left_out():
    class Wrapper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = gpt2(use_cache=True)

        def forward(self, **batch):
            return self.model(**batch)

    pipe = pipeline(Wrapper(), split=["model.transformer.h.1"], example_kwargs=EXAMPLE)
    torch.testing.assert_close(pipe(**CALL).loss, gpt2()(**CALL).loss.detach())


def test_a_cache_that_the_call_asks_for_is_refused_with_two_ways_out():
    with pytest.raises(
        TracingError, match=r"(?s)Cache.*model.config.use_cache = False.*'use_cache': False in example_kwargs"
    ):
        made(gpt2(n_layer=1), example_kwargs={**EXAMPLE, "use_cache": True})


def test_an_optimizer_of_a_pipe_without_a_loss_is_refused(driver):
    without = PipelineDriver1F1B(made(gpt2(), example_kwargs={"input_ids": IDS[:2]}), driver.cluster)
    with pytest.raises(OptimizerError, match=r"the Pipe has no loss.*loss_fn.*with labels"):
        without.instantiate_optimizer(torch.optim.AdamW)


@pytest.mark.parametrize("rows", [6, 5])
def test_a_batch_of_a_tokenizer_and_a_smaller_last_one(rows, pipe, driver):
    batch = transformers().BatchEncoding({name: value[:rows] for name, value in CALL.items()})
    expected = gpt2()(**batch).loss
    torch.testing.assert_close(driver.run(2, **batch).loss, expected.detach(), rtol=1e-6, atol=0)


def test_labels_of_a_collator_are_counted_and_advice_that_counts_others_is_refused(pipe, driver):
    """The model shifts its labels, so the last ones count and the first ones do not: it was advised to count all."""
    labels = IDS.clone()
    labels[0, 3:] = labels[4, 1:] = -100
    plain = gpt2()
    expected = plain(input_ids=IDS, labels=labels).loss
    expected.backward()
    name = "transformer.h.0.mlp.c_fc.weight"
    told = PipelineDriver1F1B(pipe, driver.cluster, loss_reduction=lambda labels: (labels[:, 1:] != -100).sum())
    for each in (driver, told):
        each.zero_grad()
        found = each.run(3, input_ids=IDS, labels=labels).loss
        torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=0)
        torch.testing.assert_close(each.get_grad(name), plain.get_parameter(name).grad, rtol=1e-4, atol=1e-7)
    all_labels = PipelineDriver1F1B(pipe, driver.cluster, loss_reduction=lambda labels: (labels != -100).sum())
    with pytest.raises(MicrobatchError, match=re.escape("loss_reduction=lambda labels: (labels[:, 1:] != -100).sum()")):
        all_labels.run(3, input_ids=IDS, labels=labels)


def speech():
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 12,
    }
    convolutions = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    names = [
        "hidden_dropout",
        "attention_dropout",
        "activation_dropout",
        "feat_proj_dropout",
        "final_dropout",
        "layerdrop",
    ]
    config = transformers().Wav2Vec2Config(
        **sizes, **convolutions, **positions, **dict.fromkeys(names, 0.0), mask_time_prob=0.0, ctc_loss_reduction="mean"
    )
    return transformers().Wav2Vec2ForCTC(config).double()


def ctc(output, labels):
    """As transformers computes it in forward."""
    odds = output.logits.log_softmax(-1, dtype=torch.float32).transpose(0, 1)
    sizes = [torch.full((len(labels),), size) for size in (len(odds), labels.shape[1])]
    with torch.backends.cudnn.flags(enabled=False):
        return torch.nn.functional.ctc_loss(odds, labels, sizes[0], sizes[1])


def test_a_loss_under_flags_of_cudnn_is_computed_by_a_loss_function():
    plain, sounds, labels = speech(), torch.randn(4, 400).double(), torch.randint(1, 12, (4, 5))
    cut = {"num_stages": 2, "split": "parameters"}
    with pytest.raises(BalanceError, match="into a loss function of your own, which is called as a whole"):
        pipeline(twin(plain), **cut, example_kwargs={"input_values": sounds[:2], "labels": labels[:2]})
    pipe = pipeline(twin(plain), ctc, **cut, example_args=(sounds[:2], labels[:2]))
    with thread_cluster(2) as threads:
        driver = PipelineDriver1F1B(pipe, threads)
        loss = plain(sounds, labels=labels).loss
        loss.backward()
        torch.testing.assert_close(driver.run(2, sounds, labels), loss.detach())
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(driver.get_grad(name), parameter.grad, msg=name)
