"""A driver with slices= trains as the plain model does, on whole sequences: see docs/microbatches.md."""

import copy
import functools
import re

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pippy import (
    IndexLoader,
    MicroBatches,
    PipelineDriver,
    PipelineDriver1F1B,
    PipelineDriverFillDrain,
    local_cluster,
    pipeline,
)
from pippy.drivers.plan import make_schedule
from pippy.errors import DriverError, InputError, MicrobatchError, SliceError, StepError
from pippy.ir.run.key_value_cache import SliceCache, roots
from tests.drivers.thread_cluster import thread_cluster
from tests.models.hugging_face import transformers
from tests.models.test_generation import WORDS, Reversed, caches_with_keys, gpt2, llama

ROWS, LENGTH = 5, 8
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@pytest.fixture(scope="module")
def threads():
    with thread_cluster(4) as cluster:
        yield cluster


def plain_gpt2(**options):
    return gpt2(**NO_DROPOUT, **options)


def tokens(seed=1, rows=ROWS, length=LENGTH):
    return torch.randint(9, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def of_logits(output, target):
    """A loss function of what the model returns, in its own dtype: those of transformers compute in float32."""
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def of_next_labels(logits, labels, vocab_size, shift_labels=None, **_):
    """The loss of transformers, in the dtype of the model."""
    next_labels = F.pad(labels, (0, 1), value=-100)[:, 1:] if shift_labels is None else shift_labels
    return F.cross_entropy(logits.reshape(-1, vocab_size), next_labels.reshape(-1))


def pipe_for(model, call, loss_fn=None, stages=3):
    example = {name: value[:2] for name, value in call.items()}
    return pipeline(model, loss_fn, num_stages=stages, split="parameters", example_kwargs=example)


def plain_step(model, call, loss_fn=None):
    """The loss, the logits and the gradients of the plain model."""
    model = copy.deepcopy(model)
    inputs = {name: value for name, value in call.items() if name != "target"}
    output = model(**inputs)
    loss = output.loss if loss_fn is None else loss_fn(output, call["target"])
    loss.backward()
    return loss.detach(), output.logits.detach(), {name: each.grad for name, each in model.named_parameters()}


def check_step(driver, model, call, loss_fn=None, chunks=2):
    loss, logits, gradients = plain_step(model, call, loss_fn)
    found, outputs = driver.run(chunks, **call, outputs=True)
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(outputs.logits, logits, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(driver.gradients(), gradients, rtol=1e-10, atol=1e-14)
    driver.zero_grad()


def call_with(loss_fn, **more):
    return {"input_ids": tokens(), **({"labels": tokens()} if loss_fn is None else {"target": tokens(2)}), **more}


@functools.cache
def llama_in_stages(stages=3):
    """A Llama with a loss function, whose numbers no test changes."""
    model = llama()
    return model, pipe_for(model, call_with(of_logits), of_logits, stages)


@pytest.mark.parametrize(
    ("kind", "make", "loss_fn"),
    [(PipelineDriver1F1B, plain_gpt2, None), (PipelineDriverFillDrain, llama, of_logits)],
)
def test_slices_train_as_the_plain_model_does(threads, kind, make, loss_fn):
    model = make()
    if loss_fn is None:
        model.loss_function = of_next_labels
    call = call_with(loss_fn)
    driver = kind(pipe_for(model, call, loss_fn), threads, slices=4)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.5)
    check_step(driver, model, call, loss_fn)
    driver.run(2, **call)
    optimizer.step()
    driver.zero_grad()
    driver.copy_to(model)
    check_step(driver, model, call, loss_fn, chunks=3)


@pytest.mark.parametrize("schedule", ["eager_1f1b", "interleaved_1f1b", "zb_h1", "v_min", "dualpipe_v"])
def test_other_schedules(threads, schedule):
    """tests/drivers/plan/test_rewrites.py has the orders of all."""
    (model, pipe), call = llama_in_stages(4), call_with(of_logits)
    driver = PipelineDriver(pipe, threads, schedule=schedule, slices=2, check=False, world_size=2)
    check_step(driver, model, call, of_logits)


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint": "always"},
        {"checkpoint": {0: "except_last"}},
        {"out_of_order": True},
        {"replicas": 2},
        {"schedule": "zb_h1", "checkpoint": "always"},
    ],
    ids=str,
)
def test_with_other_arguments_of_a_driver(threads, options):
    (model, pipe), call = llama_in_stages(2), call_with(of_logits)
    driver = PipelineDriver(pipe, threads, slices=4, check=False, **{"schedule": "1f1b", **options})
    check_step(driver, model, call, of_logits, chunks=3)


def test_the_bits_are_those_of_every_split_and_schedule(threads):
    """Gradients of keys and values are added from the last slice to the first, wherever the stage is."""
    found = []
    for stages, schedule in ((2, "1f1b"), (3, "fill_drain"), (3, "zb_h1")):
        pipe = llama_in_stages(stages)[1]
        driver = PipelineDriver(pipe, threads, schedule=schedule, slices=4, check=False)
        loss = driver.run(2, **call_with(of_logits))
        found.append({"loss": loss, **driver.gradients()})
    assert all(torch.equal(each[name], found[0][name]) for each in found[1:] for name in found[0])


def test_a_window_that_slides_over_slices(threads):
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers().MistralConfig(vocab_size=WORDS, num_key_value_heads=1, sliding_window=3, **sizes)
    model, call = transformers().MistralForCausalLM(config).double(), call_with(of_logits)
    driver = PipelineDriver1F1B(pipe_for(model, call, of_logits, stages=2), threads, slices=4, check=False)
    check_step(driver, model, call, of_logits)


def test_positions_that_are_given_and_packed_documents(threads):
    """Models of transformers read from positions where a document begins, but not where they have a cache."""
    model, positions = llama(), torch.arange(LENGTH).expand(ROWS, -1) + 3
    call = call_with(of_logits, position_ids=positions)
    driver = PipelineDriver1F1B(pipe_for(model, call, of_logits, stages=2), threads, slices=4, check=False)
    check_step(driver, model, call, of_logits)
    with pytest.raises(SliceError, match="position_ids do not count up by one, so a row holds several documents"):
        driver.run(2, **{**call, "position_ids": positions % 5})


def test_padding_and_labels_that_do_not_count(threads):
    """A slice in which no label counts has no loss, but gradients of its keys and values, from later slices."""
    model, mask, labels = plain_gpt2(), torch.ones(ROWS, LENGTH, dtype=torch.long), tokens()
    model.loss_function = of_next_labels
    mask[1, :3], mask[3, 5:] = 0, 0
    labels[:, 2:5] = -100
    labels[0] = -100
    call = {"input_ids": tokens(), "attention_mask": mask, "labels": labels}
    driver = PipelineDriver1F1B(pipe_for(model, call), threads, slices=4)
    check_step(driver, model, call)
    labels = labels.clone()
    labels[:, 4:] = -100  # the last slices have no loss at all
    check_step(driver, model, {**call, "labels": labels})


def test_a_loss_function_beside_labels_is_weighted_as_it_says(threads):
    """The model makes a loss of its labels, too, which nothing uses."""
    model, labels = plain_gpt2(), tokens()
    labels[:, 3:] = -100
    call = call_with(of_logits, labels=labels)
    driver = PipelineDriver1F1B(pipe_for(model, call, of_logits, stages=2), threads, slices=4)
    loss, _, gradients = plain_step(model, call, of_logits)
    torch.testing.assert_close(driver.run(2, **call), loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(driver.gradients(), gradients, rtol=1e-10, atol=1e-14)
    with pytest.raises(MicrobatchError, match=r"returns float32\[\] for a slice of 2 tokens.*outputs=False"):
        driver.run(2, **call, outputs=True)


def test_the_check_of_a_step(threads, monkeypatch):
    (_, pipe), call = llama_in_stages(), call_with(of_logits)
    driver = PipelineDriver1F1B(pipe, threads, slices=4, check=False)
    assert driver.check(2, **call)
    monkeypatch.setattr("pippy.drivers.worker.stage_call.roots", lambda made: ([], []))
    report = driver.check(2, **call)
    assert not report
    assert "k_proj" in str(report)


def test_micro_batches_that_come_in_pieces(threads):
    (model, pipe), call = llama_in_stages(2), call_with(of_logits)
    driver = PipelineDriver1F1B(pipe, threads, slices=4, check=False)
    pieces = {name: MicroBatches([value[:1], value[1:]]) for name, value in call.items()}
    loss, _, gradients = plain_step(model, call, of_logits)
    torch.testing.assert_close(driver.run(2, **pieces), loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(driver.gradients(), gradients, rtol=1e-10, atol=1e-14)
    items = iter([(call["input_ids"][:1], call["target"][:1]), (call["input_ids"][1:], call["target"][1:])])
    torch.testing.assert_close(driver.eval_batch(items, chunks=2), loss, rtol=1e-12, atol=1e-12)


def test_what_later_slices_give_is_not_left_out(monkeypatch, threads):
    """Without it, the gradients are other ones, and the check of the first step says so."""
    (_, pipe), call = llama_in_stages(), call_with(of_logits)
    monkeypatch.setattr("pippy.drivers.worker.stage_call.roots", lambda made: ([], []))
    with pytest.raises(
        MicrobatchError, match="again as two of 3 and 2 rows by the pipeline, each in 4 slices of its sequences"
    ):
        PipelineDriver1F1B(pipe, threads, slices=4).run(2, **call)


def test_a_loss_function_that_shifts_labels_itself_is_found(threads):
    def shifting(output, target):
        return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())

    call = call_with(shifting)
    driver = PipelineDriver1F1B(pipe_for(llama(), call, shifting), threads, slices=4)
    with pytest.raises(MicrobatchError, match="each in 4 slices of its sequences"):
        driver.run(2, **call)


def test_attention_that_is_not_causal_and_does_not_say_so_is_found(threads):
    def to_all(module, query, key, value, attention_mask, **_):
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).contiguous(), None

    interface = transformers().AttentionInterface
    interface.register("to_all", to_all)
    transformers().masking_utils.AttentionMaskInterface.register("to_all", lambda *_, **__: None)
    model, call = plain_gpt2(attn_implementation="to_all"), call_with(of_logits)
    with pytest.raises(MicrobatchError, match="each in 4 slices of its sequences"):
        PipelineDriver1F1B(pipe_for(model, call, of_logits), threads, slices=4).run(2, **call)


def test_evaluation_and_no_grad(threads):
    model = gpt2()
    call = call_with(of_logits)
    pipe = pipe_for(model, call, of_logits)
    driver = PipelineDriver1F1B(pipe, threads, slices=4, check=False)
    model.eval()
    with torch.no_grad():
        loss, outputs = driver.run(2, **call, outputs=True)
        expected = model(input_ids=call["input_ids"])
    torch.testing.assert_close(loss, of_logits(expected, call["target"]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(outputs.logits, expected.logits, rtol=1e-12, atol=1e-12)
    check_step(driver, model, call, of_logits)  # in evaluation mode, with gradients
    model.train()


def test_dropout_is_drawn_for_each_slice_and_the_same_in_every_run():
    call = call_with(of_logits)
    pipe = pipe_for(gpt2(), call, of_logits, stages=2)
    with local_cluster(2, threads=1) as cluster:  # threads of one process would share what attention draws from

        def losses():
            driver = PipelineDriver1F1B(pipe, cluster, slices=4, keyed_random=7, check=False)
            return [float(driver.run(2, **call)) for _ in range(2)]

        first = losses()
        assert first == losses()
    assert first[0] != first[1]


def test_frozen_parameters_and_autocast(threads):
    model, call = llama().float(), call_with(of_logits)
    for name, each in model.named_parameters():
        each.requires_grad_("layers.0" not in name and "embed" not in name)
    driver = PipelineDriver1F1B(pipe_for(model, call, of_logits, stages=2), threads, slices=4, check=False)
    loss, _, gradients = plain_step(model, call, of_logits)
    found = driver.run(2, **call)
    torch.testing.assert_close(found, loss)
    torch.testing.assert_close(driver.gradients(), gradients, rtol=1e-4, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _, _ = plain_step(model, call, of_logits)
        found = driver.run(2, **call)
    torch.testing.assert_close(found, loss, rtol=1e-2, atol=1e-2)


def test_generation_and_checkpoints_of_such_a_driver(threads, tmp_path):
    (model, pipe), call = llama_in_stages(2), call_with(of_logits)
    driver = PipelineDriver1F1B(pipe, threads, slices=4, check=False)
    ids = call["input_ids"]
    expected = copy.deepcopy(model).eval().generate(ids, max_new_tokens=3, pad_token_id=0)
    assert torch.equal(driver.generate(ids, max_new_tokens=3, pad_token_id=0), expected)
    path = driver.save(tmp_path, step=1)
    other = PipelineDriver1F1B(llama_in_stages(3)[1], threads)
    assert other.load(path) == {"step": 1}


def test_a_failed_step_leaves_no_keys_and_values(threads):
    (model, pipe), call = llama_in_stages(2), call_with(of_logits)
    driver = PipelineDriver1F1B(pipe, threads, slices=4, check=False)
    with pytest.raises(StepError, match=r"rows 0 to 2 of 5, slice 0 of 4[^$]*index out of range"):
        driver.run(2, **{**call, "input_ids": call["input_ids"] + WORDS})
    check_step(driver, model, call, of_logits)
    assert not caches_with_keys()


def test_a_user_s_program_with_slices(threads):
    (model, pipe), call = llama_in_stages(), call_with(of_logits)
    program = make_schedule("1f1b", workers=3, chunks=2, slices=4)
    driver = PipelineDriver(pipe, threads, schedule=program, slices=4, check=False)
    check_step(driver, model, call, of_logits)
    with pytest.raises(DriverError, match="the program is for slices=4, and the driver for slices=2"):
        PipelineDriver(pipe, threads, schedule=program, slices=2)
    with pytest.raises(DriverError, match="chunks=3, but the program was made for 2 micro-batches"):
        driver.run(3, **call)


def of_length(length):
    return {"input_ids": tokens(length=length), "target": tokens(length=length)}


def test_wrong_calls_are_refused_before_anything_is_sent(threads):
    call = call_with(of_logits)
    driver = PipelineDriver1F1B(llama_in_stages()[1], threads, slices=4)
    before = list(threads.session.counts)
    for wrong, text in [
        (
            of_length(10),
            "a sequence of 10 tokens cannot be cut into slices=4 of the same length, each of 2 tokens or more",
        ),
        (of_length(4), "pad the sequences to a multiple of 4, or make the driver with another number, as in slices=2"),
        (of_length(1), "a sequence of 1 token cannot be cut"),
        ({"input_ids": torch.ones(5, 8)}, "slices=4 cuts input_ids, which is float32[5, 8]; give the ids of tokens"),
        (
            next(iter(IndexLoader([{"input_ids": row, "target": row} for row in tokens()], batch_size=5))),
            "slices=4 cuts input_ids, which is Column('input_ids', 5 rows); give the ids of tokens, an integer tensor of "
            "[rows, length], and no rows that workers load",
        ),
        ({"target": tokens()[:, :4]}, "cuts target along dimension 1, but it is int64[5, 4]"),
        ({"attention_mask": torch.ones(5, 8)}, "the model was traced with attention_mask=None"),
        (
            {"input_ids": MicroBatches([tokens(rows=3), tokens(rows=2, length=16)])},
            "slices=4 cuts 'input_ids' given as MicroBatches([int64[3, 8], int64[2, 16]]), and needs 2 micro-batches of "
            "sequences of one length",
        ),
        ({"input_ids": MicroBatches([tokens(), tokens()], dim=1)}, "with the same rows in each argument; pad them"),
        ({"input_ids": MicroBatches([tokens()])}, "and needs 2 micro-batches of sequences of one length"),
    ]:
        with pytest.raises((SliceError, InputError), match=re.escape(text)):
            driver.run(2, **{**call, **wrong})
    assert threads.session.counts == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"slices": 0}, "slices=0: give into how many slices"),
        ({"slices": True}, "slices=True: give into how many slices"),
        ({"single_loss": True}, "slices=4 and single_loss=True cannot be combined"),
        ({"compile": "graphs"}, "slices=4 and compile='graphs' cannot be combined: stages with slices run eagerly"),
        ({"schedule": "auto"}, "slices=4 and schedule='auto' cannot be combined"),
        ({"chunk_spec": (0,)}, "slices=4 and chunk_spec=(0,) cannot be combined"),
        ({"output_spec": {"logits": 1}}, "slices=4 and output_spec={'logits': 1} cannot be combined"),
    ],
    ids=str,
)
def test_arguments_that_do_not_go_with_slices(threads, options, text):
    pipe = llama_in_stages()[1]
    with pytest.raises(DriverError, match=re.escape(text)):
        PipelineDriver(pipe, threads, **{"slices": 4, **options})


class WithoutLayers(Reversed):
    """It takes a cache, and puts nothing into it."""

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=False):
        (x,) = super().forward(input_ids)
        return transformers().modeling_outputs.CausalLMOutputWithPast(logits=x)


class Cropping(Reversed):
    """It does with its cache what no graph follows."""

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=False):
        (x,) = super().forward(input_ids)
        if use_cache:
            past_key_values.crop(2)
        return transformers().modeling_outputs.CausalLMOutputWithPast(logits=x)


class Checkpointing(Reversed):
    """It checkpoints what adds keys to its cache."""

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=False):
        def part(x):
            return past_key_values.update(x, x, 0)[0] if use_cache else x

        (x,) = super().forward(input_ids)
        x = checkpoint(part, x, use_reentrant=False)
        return transformers().modeling_outputs.CausalLMOutputWithPast(logits=x)


class Backward(Reversed):
    """It uses its layers the other way round when it has a cache."""

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=False):
        (x,) = super().forward(input_ids, use_cache=use_cache)
        if use_cache:
            x, _ = past_key_values.update(x, x, 0)
        return transformers().modeling_outputs.CausalLMOutputWithPast(logits=x)


def bert():
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    return transformers().BertLMHeadModel(transformers().BertConfig(vocab_size=WORDS, **sizes))


def with_an_encoder():
    model = llama()
    model.config.is_encoder_decoder = True
    return model


def with_gradient_checkpointing():
    model = llama()
    model.gradient_checkpointing_enable()
    return model


def with_a_loss_of_its_own():
    model = llama()
    model.loss_function = lambda logits, labels, **_: F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return model


@pytest.mark.parametrize(
    ("make", "call", "text"),
    [
        (lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), {"input": torch.ones(5, 8)},
         "the forward of Sequential does not take input_ids, attention_mask, past_key_values, use_cache"),
        (bert, {"input_ids": tokens()}, "'bert.encoder.layer.0.attention.self' has is_causal=False"),
        (lambda: llama(is_causal=False), {"input_ids": tokens()}, "the attention of LlamaForCausalLM is not causal"),
        (Reversed, {"input_ids": tokens()}, "this one returns a tuple"),
        (Cropping, {"input_ids": tokens()}, "Cropping cannot run in slices: forward asks its cache for 'crop'"),
        (Checkpointing, {"input_ids": tokens()}, "calls torch.utils.checkpoint for a part that adds keys and values"),
        (with_an_encoder, {"input_ids": tokens()}, "LlamaForCausalLM has an encoder and a decoder"),
        (WithoutLayers, {"input_ids": tokens()}, "no layer of WithoutLayers adds keys and values to a cache"),
        (llama, {"inputs_embeds": torch.ones(5, 8, 8)}, "the Pipe takes inputs_embeds, and it is not known how"),
        (with_gradient_checkpointing, {"input_ids": tokens()}, "'model' of LlamaForCausalLM has gradient_checkpointing on"),
        (with_a_loss_of_its_own, {"input_ids": tokens(), "labels": tokens()}, "does not take shift_labels"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_sliced_are_refused(threads, make, call, text):
    pipe = pipe_for(make(), call, stages=2)
    before = list(threads.session.counts)
    with pytest.raises(SliceError, match=re.escape(text)):
        PipelineDriver1F1B(pipe, threads, slices=2)
    assert threads.session.counts == before


def test_a_cut_where_slices_would_go_back_to_an_earlier_stage_is_refused(threads):
    pipe = pipeline(Backward(), split=["b"], example_kwargs={"input_ids": tokens()})
    text = r"the model cannot run in slices as it is cut: it uses 'a\.weight' of stage 0 after stage 1"
    with pytest.raises(SliceError, match=text):
        PipelineDriver1F1B(pipe, threads, slices=2)


def test_copies_of_a_pipe_are_refused(threads):
    pipe = copy.deepcopy(llama_in_stages()[1])
    with pytest.raises(SliceError, match="this Pipe, a copy, does not hold"):
        PipelineDriver1F1B(pipe, threads, slices=2)


def test_keys_of_all_slices_are_held_once():
    """What each slice reads is a view of one buffer, and what it adds is not seen by those before it."""
    cache, keys = SliceCache(slices=4), torch.randn(2, 3, 8, 5, dtype=torch.float64, requires_grad=True)
    read, made = [], []
    for number in range(4):
        with cache.running(number) as its:
            part = keys[:, :, 2 * number : 2 * number + 2]
            read.append(cache.extended(part, part.detach(), layer=0)[0])
            made.append(its)
    assert len({each.untyped_storage().data_ptr() for each in read}) == 1
    weights = [torch.randn_like(each) for each in read]
    for number in reversed(range(4)):
        edges, gradients = roots(made[number])
        torch.autograd.backward([read[number], *edges], [weights[number], *gradients])
    expected = sum(F.pad(each, (0, 0, 0, 8 - each.shape[2])) for each in weights)
    torch.testing.assert_close(keys.grad, expected)


@functools.cache
def long_pipe(rows=6, length=32):
    sizes = {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2}
    model, ids = llama(**sizes, max_position_embeddings=length), tokens(rows=rows, length=length)
    call = {"input_ids": ids, "target": tokens(2, rows, length)}
    return pipe_for(model, call, of_logits, stages=2), call


@pytest.mark.parametrize("options", [{"schedule": "zb_h1"}, {"checkpoint": "always"}], ids=str)
def test_what_is_held_is_counted(threads, options):
    """To the byte, but for what the workers hold of inputs of forwards that run again."""
    pipe, call = long_pipe()
    driver = PipelineDriver(pipe, threads, slices=2, check=False, **options)
    driver.run(3, **call)
    driver.zero_grad()
    with driver.record(memory=True) as recording:
        driver.run(3, **call)
    measured = [max(each.held[0]) for each in recording.steps[0].noted]
    counted = driver.memory(3, **call).peaks
    off = [one / other - 1 for one, other in zip(counted, measured, strict=True)]
    assert max(map(abs, off)) < (0.02 if "checkpoint" in options else 1e-9)
    driver.zero_grad()
    with torch.no_grad(), driver.record(memory=True) as recording:
        driver.run(3, **call)
        counted = driver.memory(3, **call).peaks
    assert list(counted) == [max(each.held[0]) for each in recording.steps[0].noted]


def test_what_1f1b_keeps_with_slices(threads):
    """So many of `workers * slices` slices as are alive, and keys and values of whole rows."""
    pipe, call = long_pipe()
    kept = {}
    for slices in (1, 4):
        driver = PipelineDriver1F1B(pipe, threads, slices=slices, check=False)
        counted = driver.memory(3, **call)
        kept[slices] = counted.workers[0].peak.kept
        sizes = counted.sizes.of_slice(0).stages[0]
        # keys and values of the stage's one layer: 2 rows of 32 tokens, 32 numbers of 8 bytes each
        assert sizes.keys == (2 * 2 * 32 * 32 * 8 if slices > 1 else 0)
    alive = (2 + 4 - 1) / (2 * 4)
    assert alive * 0.9 < kept[4] / kept[1] < alive + 0.2
