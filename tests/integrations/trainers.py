"""Tiny models and data for trainers, and the comparison of a PipelineTrainer with a plain Trainer."""

import copy
import importlib.util

import pytest
import torch

if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None:
    pytest.skip("transformers and accelerate are in the extra 'dev'", allow_module_level=True)

from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

from pippy.integrations.transformers import PipelineArguments, PipelineTrainer

WORDS = 23


def gpt2(**options):
    set_seed(1)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **options}
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS, n_embd=8, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2, **dropout
        )
    )


def llama():
    set_seed(2)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=WORDS, num_key_value_heads=1, bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes)
    )


def bert():
    set_seed(3)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(
        BertConfig(vocab_size=WORDS, max_position_embeddings=32, num_labels=3, **sizes, **dropout)
    )


def sentences(count, shortest=4, longest=11):
    """Rows of different lengths, as a tokenizer gives them."""
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(3, WORDS, (length,), generator=generator).tolist()} for length in lengths]


def padded(rows):
    """A collator: rows padded on the right, with their mask, and labels that are ignored there."""
    longest = max(len(each["input_ids"]) for each in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for at, each in enumerate(rows):
        mask[at, : len(each["input_ids"])] = 1
        ids[at, : len(each["input_ids"])] = torch.tensor(each["input_ids"])
    labels = torch.tensor([each["label"] for each in rows]) if "label" in rows[0] else ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def arguments(folder, **options):
    usual = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "logging_steps": 1}
    return TrainingArguments(output_dir=str(folder), **{**usual, "learning_rate": 1e-2, **options})


def trainers(model, folder, cluster, options, kind=(Trainer, PipelineTrainer), pipeline=None, check=False, **given):
    """A plain Trainer, and a PipelineTrainer for a copy of its model. ``check`` says whether its first step is checked."""
    copied = copy.deepcopy(model)
    plain = kind[0](model, arguments(folder / "plain", **options), **copy.deepcopy(given))
    how = {"pipeline": pipeline or PipelineArguments(stages=2, split="parameters"), "driver_options": {"check": check}}
    return plain, kind[1](copied, arguments(folder / "own", **options), cluster=cluster, **how, **given)


def updates(count=None, rows=4, accumulated=1, **more):
    """TrainingArguments for so many updates, each of ``accumulated`` batches of so many rows."""
    batches = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulated}
    return batches | ({} if count is None else {"max_steps": count}) | more


def trained_alike(*given, rel=2e-5, **how):
    """A plain Trainer and a PipelineTrainer, as `trainers` makes them, that have trained with the same history."""
    plain, own = trainers(*given, **how)
    train(plain, own)
    assert_same_history(own, plain, rel=rel)
    return plain, own


SPEEDS = ("runtime", "per_second", "total_flos", "preparation_time")


def assert_same_history(own, plain, but=(), **tolerances):
    """Every loss, norm, learning rate and metric that was logged is the same to rounding, step by step."""
    assert len(own.state.log_history) == len(plain.state.log_history)
    for its, expected in zip(own.state.log_history, plain.state.log_history):
        assert its.keys() == expected.keys()
        for name, value in expected.items():
            if not any(each in name for each in (*SPEEDS, *but)):
                assert its[name] == pytest.approx(value, **{"rel": 2e-5, "abs": 1e-6, **tolerances}), (name, expected)


def assert_same_model(own, plain, rtol=1e-4, atol=1e-5):
    state = plain.state_dict()
    assert own.state_dict().keys() == state.keys()
    for name, tensor in own.state_dict().items():
        torch.testing.assert_close(
            tensor, state[name], rtol=rtol, atol=atol, msg=lambda said, name=name: f"{name}: {said}"
        )


def train(*given, **options):
    """Train each from the same seed, which decides on the order of the rows. Gives what the trainings give."""
    results = []
    for each in given:
        set_seed(5)
        results.append(each.train(**options))
    return results
