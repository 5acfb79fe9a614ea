"""What those who have a Trainer type, and what they are told: each message can be followed in their script."""

import re
import traceback

import pytest
import torch
from torch import nn
from transformers import TrainerCallback
from transformers.utils import logging

from pippy.drivers.base.errors import DriverError, MicrobatchError, StepError
from pippy.integrations.transformers.arguments import advice_on
from pippy.ir.base.errors import BalanceError, TracingError
from tests.integrations.trainers import (
    PipelineArguments,
    PipelineTrainer,
    Trainer,
    arguments,
    assert_same_history,
    assert_same_model,
    bert,
    gpt2,
    padded,
    sentences,
    train,
    trainers,
)

STEPS = {"max_steps": 3, "per_device_train_batch_size": 4}
LANGUAGE = {"train_dataset": sentences(12, 6, 6), "data_collator": padded}


class WithLoss(PipelineTrainer):
    """A trainer with a loss of its own: ``computed(trainer, loss, outputs, inputs)``."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = self.computed(outputs["loss"], outputs, inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


def own(tmp_path, threads, kind=PipelineTrainer, model=gpt2, options=STEPS, pipeline=None, **given):
    how = {"pipeline": pipeline or PipelineArguments(stages=2, split="parameters"), **LANGUAGE, **given}
    return kind(model(), arguments(tmp_path, **options), cluster=threads, **how)


@pytest.fixture(autouse=True)
def as_a_newcomer_has_it():
    """The level of transformers' log, which models of other tests have raised."""
    before = logging.get_verbosity()
    logging.set_verbosity_warning()
    yield
    logging.set_verbosity(before)


def told(error):
    """What Python prints of an error, in a line: the message, and the notes below it."""
    return " ".join("".join(traceback.format_exception_only(error)).split())


def logs(self, loss, outputs, inputs, items):
    self.log({"own": float(loss)})
    return loss


def prints(self, loss, outputs, inputs, items):
    print(f"{loss.item():.3f}")
    return loss


def branches(self, loss, outputs, inputs, items):
    return loss * 2 if torch.isnan(loss) else loss


def loops(self, loss, outputs, inputs, items):
    return sum(loss for _ in range(int(inputs["labels"].max())))


def counts(self, loss, outputs, inputs, items):
    accuracy = (outputs["logits"].argmax(-1).numpy() == inputs["labels"].numpy()).mean()
    return loss if accuracy > 0.5 else 2 * loss


@pytest.mark.parametrize("computed", [logs, prints, branches, loops, counts])
def test_numbers_in_compute_loss_belong_elsewhere(computed, tmp_path, threads):
    kind = type("Own", (WithLoss,), {"computed": computed})
    with pytest.raises((TracingError, BalanceError)) as caught:
        own(tmp_path, threads, kind).train()
    said = told(caught.value)
    assert "In a PipelineTrainer: " in said and "on_log of a TrainerCallback is given the loss" in said
    assert said.count("In a PipelineTrainer") == 1 and "concrete_args" not in said


class Logged(TrainerCallback):
    def __init__(self):
        self.losses = []

    def on_log(self, args, state, control, logs=None, **options):
        self.losses += [logs["loss"]] if "loss" in logs else []


@torch.fx.wrap
def cautious(logits, labels):
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss if torch.isfinite(loss) else 0 * loss


def test_the_advice_about_numbers_works(tmp_path, threads):
    """A callback for the log, torch.where, and a function that is called whole."""

    def computed(self, loss, outputs, inputs, items):
        loss = cautious(outputs["logits"], inputs["labels"])
        return torch.where(loss > 100, 0.5 * loss, loss)

    logged = Logged()
    trainer = own(tmp_path, threads, type("Own", (WithLoss,), {"computed": computed}), callbacks=[logged])
    trainer.train()
    assert logged.losses == [each["loss"] for each in trainer.state.log_history if "loss" in each]
    assert len(logged.losses) == 3


def test_what_compute_loss_keeps_is_kept_in_the_first_step_alone(tmp_path, threads, caplog):
    def computed(self, loss, outputs, inputs, items):
        self.latest = loss.detach()
        self.losses.append(self.latest)
        return loss

    kind = type("Own", (WithLoss,), {"computed": computed, "losses": []})
    own(tmp_path, threads, kind).train()
    said = caplog.text
    assert said.count("compute_loss changes ") == 1
    assert re.search(
        r"changes self.l\w+, self.l\w+, which happens in the first step alone: .* belongs into a callback", said
    )


def mixes(self, loss, outputs, inputs, items):
    logits = outputs["logits"] - outputs["logits"].mean(0)
    return nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())


def of_some(self, loss, outputs, inputs, items):
    mask = inputs["labels"] > 12
    return nn.functional.cross_entropy(outputs["logits"][mask], inputs["labels"][mask])


def weighted(self, loss, outputs, inputs, items, by=None):
    weights = (inputs["labels"] % 7).double()
    losses = nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), inputs["labels"].flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / (weights.sum() if by is None else by)


def weighted_by_items(self, loss, outputs, inputs, items):
    return weighted(self, loss, outputs, inputs, items, by=items)


@pytest.mark.parametrize(
    ("refused", "words", "works", "how"),
    [
        (
            mixes,
            "chunks= is given by pipeline=PipelineArguments(chunks=...)",
            mixes,
            {"pipeline": PipelineArguments(stages=2, split="parameters", chunks=1)},
        ),
        (mixes, 'check= by driver_options={"check": ...}', mixes, {"driver_options": {"check": False}}),
        (
            of_some,
            'loss_reduction= by driver_options={"loss_reduction": ...}',
            of_some,
            {"driver_options": {"loss_reduction": lambda labels: (labels > 12).sum()}},
        ),
        (weighted, "divide its sum by num_items_in_batch", weighted_by_items, {}),
    ],
)
def test_a_loss_of_other_means(refused, words, works, how, tmp_path, threads):
    with pytest.raises(MicrobatchError) as caught:
        own(tmp_path, threads, type("Own", (WithLoss,), {"computed": refused})).train()
    assert words in told(caught.value).partition("In a PipelineTrainer: ")[2]
    result = own(tmp_path, threads, type("Own", (WithLoss,), {"computed": works}), **how).train()
    assert result.global_step == 3


def test_labels_that_are_missing_are_the_error_of_a_plain_trainer(tmp_path, threads):
    def unlabelled(rows):
        return {name: value for name, value in padded(rows).items() if name != "labels"}

    said = []
    for kind in (Trainer, PipelineTrainer):
        more = {} if kind is Trainer else {"cluster": threads, "stages": 2}
        with pytest.raises(ValueError, match="did not return a loss from the inputs") as caught:
            kind(gpt2(), arguments(tmp_path, **STEPS), **{**LANGUAGE, "data_collator": unlabelled}, **more).train()
        said.append(str(caught.value))
    assert said[0] == said[1]


class Steps(PipelineTrainer):
    """As an old tutorial has it."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        loss = self.compute_loss(model, inputs)
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("clips", [0.0, 1.0])
def test_a_training_step_that_trains_nothing_is_refused(evaluates, clips, tmp_path, threads):
    """After an evaluation there was a driver, a norm of 0, and no word."""
    trainer = own(tmp_path, threads, Steps, options={**STEPS, "max_grad_norm": clips}, eval_dataset=sentences(4, 6, 6))
    if evaluates:
        trainer.evaluate()
    with pytest.raises(DriverError, match=r"training_step of Steps has trained nothing .*; have it call super\(\)"):
        trainer.train()


def test_a_training_step_that_calls_the_one_above_trains(tmp_path, threads):
    class Above(PipelineTrainer):
        def training_step(self, *given):
            return super().training_step(*given)

    assert own(tmp_path, threads, Above).train().global_step == 3


def frozen():
    return gpt2().requires_grad_(False)


class Norms(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **options):
        return [each.grad.norm() for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"pipeline": PipelineArguments(stages=40)}, BalanceError, "at most In a PipelineTrainer: num_stages= is stages="),
        ({"model": frozen}, StepError, "In a PipelineTrainer: trainer.evaluate() computes the loss alone"),
        ({"callbacks": [Norms()]}, DriverError, "In a PipelineTrainer: the driver is trainer.driver"),
    ],
)  # fmt: skip
def test_words_of_other_scripts_are_told_in_those_of_a_trainer(given, error, words, tmp_path, threads):
    with pytest.raises(error) as caught:
        own(tmp_path, threads, **given).train()
    assert words in told(caught.value)


def test_each_argument_is_given_somewhere():
    """What an error calls an argument of a call is a field of PipelineArguments, or an option of the driver."""
    assert advice_on("give replicas=2, loss_reduction=f, or out_of_order=True") == (
        "In a PipelineTrainer: replicas= is given by pipeline=PipelineArguments(replicas=...); "
        'loss_reduction= by driver_options={"loss_reduction": ...}; out_of_order= by driver_options={"out_of_order": ...}'
    )
    assert advice_on("batch_size == 3, and what=7") == ""


# What callbacks read


class Average(TrainerCallback):
    """An average of the weights, and a norm for a log."""

    def __init__(self):
        self.average, self.norms = {}, []

    def on_train_begin(self, args, state, control, model=None, **options):
        self.average = {name: each.detach().clone() for name, each in model.named_parameters()}

    def on_step_end(self, args, state, control, model=None, **options):
        with torch.no_grad():
            for name, each in model.named_parameters():
                self.average[name].mul_(0.5).add_(each, alpha=0.5)

    def on_log(self, args, state, control, model=None, **options):
        self.norms.append(float(sum(each.detach().double().norm() for each in model.parameters())))


def test_callbacks_read_the_weights_of_the_workers(tmp_path, threads):
    read = Average(), Average()
    plain, pipelined = trainers(bert(), tmp_path, threads, STEPS, **labelled())
    for trainer, callback in zip((plain, pipelined), read):
        trainer.add_callback(callback)
    train(plain, pipelined)
    assert_same_history(pipelined, plain)
    for name, expected in read[0].average.items():
        torch.testing.assert_close(read[1].average[name], expected, rtol=1e-4, atol=1e-5)
    assert read[1].norms == pytest.approx(read[0].norms, rel=1e-5) and len(set(read[1].norms)) >= 3


def labelled():
    rows = [{**each, "label": at % 3} for at, each in enumerate(sentences(12))]
    return {"train_dataset": rows, "data_collator": padded}


class Counts(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **options):
        self.count = sum(each.numel() for each in model.parameters() if each.requires_grad)


@pytest.mark.parametrize(("callback", "copies"), [(Counts, 1), (Average, 3)])
def test_the_model_is_copied_when_it_is_read_and_no_oftener(callback, copies, tmp_path, threads, monkeypatch):
    """Once at the end; or for each of three updates, if callbacks read it then, after which the end has nothing to copy."""
    trainer, found = own(tmp_path, threads, callbacks=[callback()]), []
    trainer.evaluate(sentences(4, 6, 6))
    copy_to = trainer.driver.copy_to
    monkeypatch.setattr(trainer.driver, "copy_to", lambda model: found.append(1) or copy_to(model))
    trainer.train()
    assert len(found) == copies


class Stops(TrainerCallback):
    def on_step_end(self, args, state, control, **options):
        if state.global_step == 2:
            raise RuntimeError("a callback with a fault")


def test_a_training_that_was_ended_has_what_was_trained(tmp_path, threads):
    plain, pipelined = trainers(gpt2(), tmp_path, threads, STEPS, **LANGUAGE)
    for each in (plain, pipelined):
        each.add_callback(Stops())
        with pytest.raises(RuntimeError, match="a callback with a fault"):
            train(each)
    assert_same_model(pipelined.model, plain.model)


# What is said before the first step is done


def lines_of(trainer, capsys):
    trainer.train()
    return [each for each in re.split(r"[\r\n]", capsys.readouterr().err) if "PipelineTrainer: " in each]


def test_the_first_step_says_what_goes_on(tmp_path, threads, capsys):
    trainer = own(tmp_path, threads, options={**STEPS, "disable_tqdm": False})
    said = [re.sub(r"\d[\d.e-]*", "#", each) for each in lines_of(trainer, capsys)]
    assert said == [
        "PipelineTrainer: tracing GPT#LMHeadModel, and cutting it into stages",
        "PipelineTrainer: running the first step",
        "PipelineTrainer: the first step is the plain model's: # of # rows in # micro-batches: the loss and # gradients; "
        "largest difference #; # s",
    ]
    assert lines_of(trainer, capsys) == []


@pytest.mark.parametrize(
    ("options", "shown", "logged"),
    [
        ({"disable_tqdm": True}, 0, 0),
        ({"disable_tqdm": True, "log_level": "info"}, 0, 3),
        ({"disable_tqdm": False, "log_level": "error"}, 0, 0),
    ],
)
def test_who_wants_no_bars_and_no_log_hears_nothing(options, shown, logged, tmp_path, threads, capsys, caplog):
    before = logging.get_verbosity()
    try:
        assert len(lines_of(own(tmp_path, threads, options={**STEPS, **options}), capsys)) == shown
        assert caplog.text.count("PipelineTrainer: ") == logged
    finally:
        logging.set_verbosity(before)


def test_batches_that_workers_cannot_take_are_told(tmp_path, threads, caplog):
    """In the log of transformers: in that of pippy, which shows nothing, nobody saw it."""
    logging.warning_once.cache_clear()
    trainer = own(tmp_path, threads)
    trainer.evaluate(sentences(4, 6, 6))
    trainer.data_collator = lambda rows: {"input_ids": torch.tensor([row["input_ids"] for row in rows])}
    trainer.predict(sentences(4, 6, 6))
    (record,) = [each for each in caplog.records if "batches with other arguments than those" in each.message]
    assert record.name.startswith("transformers.")
