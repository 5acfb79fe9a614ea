"""A PipelineTrainer has the losses of a Trainer, step by step, and so its gradient norms, learning rates and metrics."""

import dataclasses
from typing import Any

import numpy
import pytest
import torch
from transformers import DataCollatorWithFlattening, EarlyStoppingCallback, TrainerCallback
from transformers.trainer_utils import SchedulerType

from tests.integrations.trainers import (
    WORDS,
    PipelineArguments,
    PipelineTrainer,
    Trainer,
    TrainingArguments,
    assert_same_history,
    assert_same_model,
    bert,
    gpt2,
    llama,
    padded,
    sentences,
    train,
    trained_alike,
    trainers,
    updates,
)

LANGUAGE = {"train_dataset": sentences(13), "data_collator": padded}
LABELLED = [{**each, "labels": each["input_ids"]} for each in sentences(12)]
CLASSES = [{**each, "label": len(each["input_ids"]) % 3} for each in sentences(13)]


# The argument was renamed.
KNOWN = {each.name for each in dataclasses.fields(TrainingArguments)}
BY_LENGTH = {"group_by_length": True} if "group_by_length" in KNOWN else {"train_sampling_strategy": "group_by_length"}


def accuracy(predicted):
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def test_padded_rows_with_accumulation_clipping_decay_and_evaluation(tmp_path, threads):
    options = {
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,  # the last update of an epoch has one batch, of one row
        "num_train_epochs": 2,
        "max_grad_norm": 0.3,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        **BY_LENGTH,
        "include_num_input_tokens_seen": "non_padding",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 4,
    }
    plain, own = trainers(
        gpt2(), tmp_path, threads, options, eval_dataset=sentences(9), compute_metrics=accuracy, check=True, **LANGUAGE
    )
    expected, result = train(plain, own)
    assert result.training_loss == pytest.approx(expected.training_loss, rel=1e-5)
    assert_same_history(own, plain)
    assert_same_model(own.model, plain.model)
    assert plain.state.log_history[-1]["num_input_tokens_seen"] > 0

    assert_same_predictions(own, plain, sentences(5))
    unlabelled = [{"input_ids": each["input_ids"][:4]} for each in sentences(5)]
    for each in (own, plain):
        each.data_collator = lambda rows: {"input_ids": torch.tensor([row["input_ids"] for row in rows])}
    assert_same_predictions(own, plain, unlabelled)


def assert_same_predictions(own, plain, rows):
    predicted = []
    for each in (own, plain):
        torch.manual_seed(0)  # older versions group them at random
        predicted.append(each.predict(rows))
    numpy.testing.assert_allclose(predicted[0].predictions, predicted[1].predictions, rtol=1e-4, atol=1e-5)
    numpy.testing.assert_array_equal(predicted[0].label_ids, predicted[1].label_ids)


def unmasked(rows):
    """A collator of rows of one length, without a mask."""
    ids = torch.tensor([each["input_ids"][:4] for each in rows])
    return {"input_ids": ids, "labels": ids}


OF_LAST: list[Any] = [(gpt2, unmasked, 9), (gpt2, padded, 15), (gpt2, padded, 9)]
OF_LAST += [(llama, unmasked, 15), (llama, padded, 9), (llama, unmasked, 10)]


@pytest.mark.parametrize(("model", "collator", "count"), OF_LAST)  # the last batch has 1, 7 or 2 rows
def test_a_last_batch_of_other_rows(tmp_path, threads, model, collator, count):
    options = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "num_train_epochs": 2}
    data = {"train_dataset": sentences(count), "eval_dataset": sentences(count), "data_collator": collator}
    plain, own = trainers(model(), tmp_path, threads, options, check=True, **data)
    expected, result = train(plain, own)
    assert result.training_loss == pytest.approx(expected.training_loss, rel=1e-5)
    assert_same_history(own, plain)
    assert own.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)
    assert_same_predictions(own, plain, sentences(count))


class LeavesAnEpoch(TrainerCallback):
    """Leaves the first epoch in the middle of an update, whose gradients are then those of two updates."""

    has_left = False

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == 1 and not self.has_left:
            self.has_left = control.should_epoch_stop = True


def test_smoothed_labels_without_clipping(tmp_path, threads):
    options = {
        "max_grad_norm": 0.0,
        "label_smoothing_factor": 0.1,
        "lr_scheduler_type": "polynomial",
        "optim": "sgd",
        "eval_strategy": "epoch",
        "prediction_loss_only": True,
    }
    given = {"eval_dataset": sentences(7), "callbacks": [LeavesAnEpoch()], **LANGUAGE}
    trained_alike(llama(), tmp_path, threads, updates(6, 2, 3, **options), check=True, **given)


def test_smoothed_labels_that_are_means_over_their_batches(tmp_path, threads):
    options = updates(2, 4, 2, label_smoothing_factor=0.1, eval_strategy="epoch")
    plain, own = trainers(gpt2(), tmp_path, threads, options, check=True, eval_dataset=sentences(6), **LANGUAGE)
    plain.model_accepts_loss_kwargs = own.model_accepts_loss_kwargs = False
    train(plain, own)
    assert_same_history(own, plain)


@pytest.mark.parametrize("scaled", [True, False])
def test_losses_that_are_means_over_their_batches(scaled, tmp_path, threads):
    """A classifier divides by its rows. Trainer divides such a loss by the batches of an update, if it knows that it is one."""
    options = updates(4, 4, 3, eval_strategy="epoch")
    data = {"train_dataset": CLASSES, "eval_dataset": CLASSES[:6], "data_collator": padded}
    given = {**data, "compute_metrics": accuracy}
    plain, own = trainers(bert(), tmp_path, threads, options, check=True, **given)
    plain.model_accepts_loss_kwargs = own.model_accepts_loss_kwargs = scaled
    train(plain, own)
    assert_same_history(own, plain)


def test_packed_rows(tmp_path, threads):
    packed = {"train_dataset": LABELLED, "data_collator": DataCollatorWithFlattening()}
    trained_alike(llama(), tmp_path, threads, updates(3, 3, 2), **packed)


def test_rows_one_by_one_fill_the_pipeline(tmp_path, threads):
    options = updates(4, 1, 4, eval_strategy="epoch")
    _, own = trained_alike(llama(), tmp_path, threads, options, eval_dataset=sentences(6), **LANGUAGE)
    assert own.driver.random_state["steps"] == 4  # one for each update, and not for each row


class Weighted:
    """A loss of the user's own: in a subclass, as in many scripts."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = 0.5 * losses / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


class PlainWeighted(Weighted, Trainer):
    pass


class OwnWeighted(Weighted, PipelineTrainer):
    pass


def counted(outputs, labels, num_items_in_batch=None):
    """A compute_loss_func."""
    losses = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return losses / num_items_in_batch


@pytest.mark.parametrize("kind, given", [((PlainWeighted, OwnWeighted), {}), (None, {"compute_loss_func": counted})])
def test_losses_of_the_users_own(kind, given, tmp_path, threads):
    options = updates(2, 4, 2, eval_strategy="epoch")
    given = {**given, **LANGUAGE, "eval_dataset": sentences(4)}
    trained_alike(gpt2(), tmp_path, threads, options, kind or (Trainer, PipelineTrainer), check=True, **given)


class LeavesOut:
    """A Trainer that evaluates without ``num_items_in_batch``, as TRL's."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs), return_outputs=False), None, None


class PlainLeavesOut(LeavesOut, Trainer):
    pass


class OwnLeavesOut(PipelineTrainer, PlainLeavesOut):
    pass


def test_a_trainer_that_evaluates_in_its_own_way(tmp_path, threads):
    kinds, given = (PlainLeavesOut, OwnLeavesOut), {"eval_dataset": sentences(9), **LANGUAGE}
    plain, own = trainers(gpt2(), tmp_path, threads, {"max_steps": 1}, kinds, **given)
    for each in (plain, own):
        each.evaluate()  # before, the stages are made for it; and after, they are those of the training
    train(plain, own)
    for each in (plain, own):
        each.evaluate()
    assert_same_history(own, plain)


def test_another_training_may_have_other_arguments(tmp_path, threads):
    plain, own = trained_alike(gpt2(), tmp_path, threads, {"max_steps": 2}, **LANGUAGE)
    for each in (plain, own):
        each.data_collator = lambda rows: {
            name: value for name, value in padded(rows).items() if name != "attention_mask"
        }
    train(plain, own)
    assert_same_history(own, plain)
    assert_same_model(own.model, plain.model)


class Seen(TrainerCallback):
    def __init__(self):
        self.calls = []

    def on_step_end(self, args, state, control, **kwargs):
        self.calls.append(("step", state.global_step))

    def on_substep_end(self, args, state, control, **kwargs):
        self.calls.append(("substep", state.global_step))

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.calls.append(("evaluate", state.global_step))


def test_callbacks_and_early_stopping(tmp_path, threads):
    options = {
        "learning_rate": 0.1,  # so large that it soon gets worse for other rows
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "num_train_epochs": 20,
    } | updates(accumulated=2)
    given = {"eval_dataset": sentences(6), "callbacks": [EarlyStoppingCallback(2), Seen()], **LANGUAGE}
    plain, own = trained_alike(gpt2(), tmp_path, threads, options, rel=1e-3, **given)
    assert own.state.global_step == plain.state.global_step < 20
    assert own.callback_handler.callbacks[-2].calls == plain.callback_handler.callbacks[-2].calls != []
    assert_same_model(own.model, plain.model, rtol=1e-3)  # the best one
    assert own.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-4)
    names = [sorted(each.name for each in (tmp_path / which).iterdir()) for which in ("own", "plain")]
    assert names[0] == names[1] and len(names[0]) >= 2


@pytest.mark.parametrize("kind", list(SchedulerType))
def test_every_schedule_of_the_learning_rate(kind, tmp_path, threads):
    more = {
        "cosine_with_min_lr": {"min_lr": 1e-4},
        "cosine_warmup_with_min_lr": {"min_lr": 1e-4},
        "warmup_stable_decay": {"num_decay_steps": 2},
    }.get(kind.value, {})
    plain, own = trainers(
        gpt2(),
        tmp_path,
        threads,
        {"lr_scheduler_type": kind, "lr_scheduler_kwargs": more, "warmup_steps": 2, "eval_strategy": "epoch"},
        eval_dataset=sentences(2),
    )
    for each in (plain, own):
        each.create_optimizer_and_scheduler(6)
    own.optimizer.on_workers = own.optimizer.driver = _Nothing()
    own.optimizer.check = lambda: None  # which would ask for a step that trained
    for _ in range(6):
        rates = [[group["lr"] for group in each.optimizer.param_groups] for each in (own, plain)]
        assert rates[0] == rates[1]
        for each in (own, plain):
            each.optimizer.step()
            each.lr_scheduler.step(*([1.0] if kind in ("reduce_lr_on_plateau", "greedy") else []))


class _Nothing:
    """In the place of a driver and its optimizer."""

    param_groups = ()

    def step(self, closure):
        pass

    def zero_grad(self):
        pass


def test_bfloat16(tmp_path, threads):
    options = updates(5, bf16=True, eval_strategy="epoch")
    plain, own = trained_alike(llama(), tmp_path, threads, options, rel=2e-2, eval_dataset=sentences(6), **LANGUAGE)
    assert {each.dtype for each in own.model.parameters()} == {torch.float32}
    predicted = own.predict(sentences(4)).predictions
    assert predicted.dtype == plain.predict(sentences(4)).predictions.dtype
    assert predicted.shape[-1] == WORDS


def test_float16_with_a_scaled_loss(tmp_path, threads):
    """On a CPU a plain Trainer ignores fp16, so that its numbers are those of float32."""
    options = updates(5, fp16=True, save_strategy="steps", save_steps=3)
    plain, own = trained_alike(llama(), tmp_path, threads, options, rel=5e-3, **LANGUAGE)
    assert [each["loss"] for each in own.state.log_history[:5]] != [
        each["loss"] for each in plain.state.log_history[:5]
    ]
    saved = torch.load(tmp_path / "own/checkpoint-3/scaler.pt", weights_only=True)
    assert saved["scale"] == 65536 and saved["_growth_tracker"] == 3

    before = {name: tensor.clone() for name, tensor in own.model.state_dict().items()}
    own.accelerator.scaler.update(2.0**40)  # all gradients overflow
    own.args.max_steps = 2
    train(own)
    assert own.accelerator.scaler.get_scale() == 2.0**38 and own.state.log_history[-2]["learning_rate"] == 1e-2
    assert all(torch.equal(before[name], tensor) for name, tensor in own.model.state_dict().items())


def test_low_rank_adapters(tmp_path, threads):
    peft = pytest.importorskip("peft", reason="peft is in the extra 'dev'")
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    model = peft.get_peft_model(llama(), config)
    options = updates(3, load_best_model_at_end=True, **options)
    plain, own = trained_alike(model, tmp_path, threads, options, eval_dataset=sentences(6), **LANGUAGE)
    assert_same_model(own.model, plain.model)
    own.save_model(str(tmp_path / "adapter"))
    again = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter")
    assert_same_model(again, plain.model)


def test_replicas_of_a_model_that_each_training_makes(tmp_path, threads):
    options = {"per_device_train_batch_size": 8, "max_steps": 2}
    pipeline = PipelineArguments(stages=1, replicas=2, chunks=4, split="parameters", schedule="fill_drain")
    given = {"model_init": lambda: gpt2(), "eval_dataset": sentences(4), **LANGUAGE}
    plain, own = trainers(None, tmp_path, threads, options, pipeline=pipeline, **given)
    assert own.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)
    first = own.driver
    train(plain, own)
    assert own.driver is not first  # which has another model
    assert_same_history(own, plain)
    assert own.driver.replicas == 2 and own.driver.schedule == "fill_drain"
