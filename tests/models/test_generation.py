"""Generation gives what the plain model's `generate` gives, token for token: see docs/hugging_face.md."""

import copy
import dataclasses
import gc
import itertools
import json
import os
import pkgutil
import re
import signal
import threading
from collections import Counter

import pytest
import torch

from pippy import PipelineDriver1F1B, PipelineDriverInterleaved1F1B, local_cluster, pipeline
from pippy.drivers.protocol.programs import Sampling
from pippy.drivers.worker import generating
from pippy.drivers.worker.generating import probabilities
from pippy.errors import GenerationError, StepError, WorkerLostError
from pippy.ir.pipe import model_of
from pippy.ir.run.key_value_cache import KeyValueCache
from tests.drivers.processes import close_open_cluster, hearing_of_deaths, stop, until, within
from tests.drivers.thread_cluster import as_on_hosts, thread_cluster
from tests.models.hugging_face import MODELS, transformers

WORDS, ROWS, LENGTH = 31, 5, 6
TOKENS = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": False}
GPT2 = {
    "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 24, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
    **TOKENS,
}  # fmt: skip
LLAMA = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32, **TOKENS,
}  # fmt: skip
ENDS = {"eos_token_id": [2, 3, 4, 5, 6, 7, 8]}  # so many that rows end at different tokens


@pytest.fixture(scope="module")
def threads():
    with thread_cluster(4) as cluster:
        yield cluster


def gpt2(**options):
    torch.manual_seed(0)
    return transformers().GPT2LMHeadModel(transformers().GPT2Config(**{**GPT2, **options})).double()


def llama(**options):
    torch.manual_seed(0)
    return transformers().LlamaForCausalLM(transformers().LlamaConfig(**{**LLAMA, **options})).double()


def prompts():
    ids = torch.randint(9, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3], mask[3, :1] = 0, 0
    return ids.masked_fill(mask == 0, 0), mask


def pipe_of(model, stages):
    ids, mask = prompts()
    return pipeline(
        model,
        num_stages=stages,
        split="parameters",
        example_kwargs={"input_ids": ids[:2], "attention_mask": mask[:2], "labels": ids[:2]},
    )


def plain(model, seed, *args, **kwargs):
    """What the plain model generates in evaluation mode, and the random number that comes next."""
    flags = [module.training for module in model.modules()]
    model.eval()
    torch.manual_seed(seed)
    ids = model.generate(*args, **kwargs)
    for module, flag in zip(model.modules(), flags, strict=True):
        module.training = flag
    return ids, torch.rand(1)


CASES = [
    {"max_new_tokens": 7, "chunks": 2, "eos_token_id": 30},
    {"max_new_tokens": 9, "chunks": 3, **ENDS},
    {"max_new_tokens": 9, "chunks": 2, "do_sample": True, "top_k": 9, "top_p": 0.9, "temperature": 1.5, **ENDS},
    {"max_new_tokens": 5, "do_sample": True, "pad_token_id": 29},
    {"max_new_tokens": 1, "chunks": 5},
]


def check_cases(driver, model, cases):
    ids, mask = prompts()
    for seed, case in enumerate(cases):
        expected, after = plain(
            model, seed, ids, attention_mask=mask, **{k: v for k, v in case.items() if k != "chunks"}
        )
        torch.manual_seed(seed)
        assert torch.equal(driver.generate(ids, attention_mask=mask, **case), expected), case
        assert torch.equal(torch.rand(1), after), case


@pytest.mark.parametrize(("make", "stages"), [(gpt2, 2), (llama, 4)])
def test_generates_what_the_plain_model_generates_before_and_after_training(threads, make, stages):
    model = make()
    driver = PipelineDriver1F1B(pipe_of(model, stages), threads)
    check_cases(driver, model, CASES)

    ids, mask = prompts()
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=1.0)
    arguments = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    driver.run(2, **arguments)
    optimizer.step()
    driver.run(2, **arguments)
    gradients = driver.gradients()
    driver.generate(ids, max_new_tokens=2)
    assert all(torch.equal(gradient, gradients[name]) for name, gradient in driver.gradients().items())
    assert all(module.training for module in model.modules())
    driver.copy_to(model)
    check_cases(driver, model, CASES[:3])


def test_on_several_hosts_tokens_are_sent_as_on_one(threads):
    with as_on_hosts(threads, "a a b b"):
        model = llama()
        driver = PipelineDriver1F1B(pipe_of(model, 4), threads)
        check_cases(driver, model, CASES[:1])
        assert [each.hosts for each in driver.generation_programs(2)] == [None, None]
        assert driver.program(2).hosts == (0, 0, 1, 1)


def test_rows_end_at_different_tokens(threads):
    ids, mask = prompts()
    model = gpt2()
    expected, _ = plain(model, 2, ids, attention_mask=mask, **{**CASES[2], "chunks": None})
    ended = (torch.isin(expected[:, LENGTH:], torch.tensor(ENDS["eos_token_id"]))).int().argmax(dim=1)
    assert len(ended.unique()) > 1


@pytest.fixture(scope="module")
def driver(threads):
    """A driver of GPT-2 in two stages, whose model is in training mode and stays so."""
    return PipelineDriver1F1B(pipe_of(gpt2(), 2), threads)


def caches_with_keys():
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, KeyValueCache) and each.layers]


def test_each_value_crosses_once_and_the_controller_sends_one_message(threads, driver):
    ids, _ = prompts()
    driver.generate(ids, max_new_tokens=2)
    first, second = (worker.context.transport for worker in threads.engine.workers[:2])
    before, posted = (first.sent[1].values, second.sent[0].values), list(threads.session.counts)
    driver.generate(ids, max_new_tokens=6, chunks=2, eos_token_id=[])
    assert first.sent[1].values - before[0] == 6 * 2
    assert second.sent[0].values - before[1] == 5 * 2  # nobody needs to be told of the last token
    assert [now - then for now, then in zip(threads.session.counts, posted, strict=True)] == [1, 1, 0, 0]
    assert not caches_with_keys()
    assert not first.received.values and not second.received.values


def test_a_worker_says_which_token_it_waits_for(threads, driver, monkeypatch):
    """The first worker says it while the last one chooses a token: the first two, as nothing waits for the third."""
    first, inner, seen, chosen = threads.engine.workers[0], generating.next_token, [], itertools.count(1)
    text = (
        r"{}, instruction 1 of 5: receive token\.0 from 1; waits for token of micro-batch 0 of step \d+, from worker 1"
    )

    def noting(*arguments):
        if (token := next(chosen)) < 3:  # it may be on the way to this token still
            seen.append(until(lambda: re.fullmatch(text.format(token), first.dump().partition(", token ")[2])))
        return inner(*arguments)

    monkeypatch.setattr(generating, "next_token", noting)
    driver.generate(prompts()[0], max_new_tokens=3, chunks=1, eos_token_id=[])
    assert len(seen) == 2 and all(seen)


def test_a_chunk_that_has_ended_sends_nothing_more(threads, driver):
    ids, _ = prompts()
    first = threads.engine.workers[0].context.transport
    before = first.sent[1].values
    made = driver.generate(ids, max_new_tokens=15, chunks=2, eos_token_id=list(range(WORDS)))
    assert made.shape == (ROWS, LENGTH + 1)
    assert first.sent[1].values - before == 2 * 2  # the first token of each chunk, and its end


def test_workers_in_other_processes(tmp_path):
    close_open_cluster()
    model = gpt2(n_layer=1)
    ids, mask = prompts()
    case = {"max_new_tokens": 9, "do_sample": True, **ENDS}
    expected, _ = plain(model, 0, ids, attention_mask=mask, **case)
    with local_cluster(2, threads=1) as cluster:
        driver = PipelineDriver1F1B(pipe_of(model, 2), cluster)
        torch.manual_seed(0)
        assert torch.equal(driver.generate(ids, attention_mask=mask, chunks=2, **case), expected)
        with pytest.raises(StepError, match=r"F0\.\d .*, token 19, .*\n.*submod_0 failed: IndexError"):
            driver.generate(ids, max_new_tokens=30, eos_token_id=[])  # there are only 24 positions
        torch.manual_seed(0)
        assert torch.equal(driver.generate(ids, attention_mask=mask, chunks=3, **case), expected)
        with driver.profile(tmp_path / "trace.json"):
            driver.generate(ids, max_new_tokens=3, chunks=1, eos_token_id=[])
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        passes = Counter(each["name"] for each in events if each["name"] in ("F0.0", "F1.0", "C1.0"))
        assert passes == {"F0.0": 3, "F1.0": 3, "C1.0": 3}  # one for each token
        moved = Counter(each["name"].partition(" ")[0] for each in events)
        assert moved["send"] == moved["receive"] > 0
        stop(lost := cluster.session.workers[1].pid)  # worker 0 makes its part of a token, and waits for the other part
        threading.Timer(0.2, os.kill, (lost, signal.SIGKILL)).start()
        with hearing_of_deaths(cluster.session), within(1.5), pytest.raises(WorkerLostError, match="SIGKILL") as caught:
            driver.generate(ids, attention_mask=mask, chunks=2, **case)
        assert caught.value.index == 1
        driver.recover()
        torch.manual_seed(0)
        assert torch.equal(driver.generate(ids, attention_mask=mask, chunks=2, **case), expected)


def test_interleaved_stages_without_a_loss_and_prompts_of_one_token(threads):
    model, (ids, _) = llama(num_hidden_layers=1), prompts()
    pipe = pipeline(model, num_stages=4, split="parameters", example_kwargs={"input_ids": ids[:2]})
    driver = PipelineDriverInterleaved1F1B(pipe, threads, world_size=2)
    for kwargs in ({"max_new_tokens": 4}, {"max_new_tokens": 9, "do_sample": True, **ENDS}):
        expected, _ = plain(model, 0, ids[:, :1], attention_mask=torch.ones_like(ids[:, :1]), **kwargs)
        torch.manual_seed(0)
        assert torch.equal(driver.generate(input_ids=ids[:, :1], chunks=3, **kwargs), expected)


def test_prompts_and_masks_of_other_kinds(threads, driver):
    model, (ids, mask) = model_of(driver.pipe), prompts()
    for given, options in (
        (ids, {}),  # the padding in it is masked
        (ids, {"pad_token_id": 2}),  # no token of the prompts is padding
        (ids.int(), {"attention_mask": mask.bool()}),
        (ids, {"attention_mask": mask.flip(1), "eos_token_id": torch.tensor([3, 4, 5])}),
    ):
        expected, _ = plain(model, 0, given, max_new_tokens=4, **options)
        made = driver.generate(given, max_new_tokens=4, **options)
        assert torch.equal(made, expected) and made.dtype is expected.dtype


def test_a_stage_that_fails_ends_the_call_and_the_next_one_works(threads, driver):
    ids, _ = prompts()
    with pytest.raises(StepError, match=r"F0\.\d .*, token 19, .*\n.*submod_0 failed: IndexError"):
        driver.generate(ids, max_new_tokens=30, chunks=3, eos_token_id=[])  # there are only 24 positions
    assert driver.generate(ids, max_new_tokens=3).shape == (ROWS, LENGTH + 3)
    assert not caches_with_keys()


class CtrlC:
    """Comes at the end of this: Python drops what is raised there."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("where", "at"),
    [
        ("pippy.drivers.generation.generation.compile_traced", 2),
        ("pippy.drivers.worker.generating.Generation.__init__", 2),
        ("pippy.drivers.worker.generating.GenerateCall._grow", 2),
    ],
)
def test_after_ctrl_c_the_next_call_gives_what_the_plain_model_gives(threads, monkeypatch, where, at):
    """It comes while the model is traced, as a worker takes the graphs, or as a call begins."""
    model = gpt2()
    driver = PipelineDriver1F1B(pipe_of(model, 2), threads)
    ids, mask = prompts()
    calls, inner = itertools.count(1), pkgutil.resolve_name(where)

    def interrupt(*arguments, **options):
        if next(calls) == at:
            CtrlC() if "compile" in where else CtrlC.__del__(None)
        return inner(*arguments, **options)

    case = {"max_new_tokens": 9, "do_sample": True, **ENDS}
    monkeypatch.setattr(where, interrupt)
    with within(10), pytest.raises(KeyboardInterrupt):
        driver.generate(ids, attention_mask=mask, chunks=3, **case)
    assert next(calls) > at
    assert all(module.training for module in model.modules())
    check_cases(driver, model, [{**case, "chunks": 2}])
    assert not caches_with_keys()


def test_tokens_are_not_drawn_from_logits_that_are_not_finite():
    with pytest.raises(ValueError, match="because a logit is nan or infinite"):
        probabilities(torch.tensor([[0.0, torch.nan]]), Sampling(1.0, 0, 1.0, torch.get_rng_state()))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"num_beams": 4}, "generate() does not take num_beams"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": None}, "max_new_tokens=None"),
        ({"attention_mask": torch.ones(1, 2)}, "attention_mask is float32[1, 2]"),
        ({"do_sample": 1}, "do_sample=1"),
        ({"do_sample": True, "temperature": 0}, "temperature=0"),
        ({"do_sample": True, "top_k": -1}, "top_k=-1"),
        ({"do_sample": True, "top_p": 2}, "top_p=2"),
        ({"eos_token_id": "end"}, "eos_token_id='end'"),
        ({"pad_token_id": -1}, "pad_token_id=-1"),
        ({"chunks": 6}, "chunks=6 for 5 prompts"),
        ({"ids": torch.zeros(3)}, "got float32[3] for the prompts"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(threads, driver, wrong, text):
    before = list(threads.session.counts)
    with pytest.raises(GenerationError, match=re.escape(text)):
        driver.generate(**{"ids": prompts()[0], "max_new_tokens": 3, **wrong})
    assert threads.session.counts == before


def test_settings_of_the_model_that_are_not_followed_are_refused(threads, driver):
    config = model_of(driver.pipe).generation_config
    config.repetition_penalty = 1.2
    with pytest.raises(GenerationError, match=r"has repetition_penalty=1\.2"):
        driver.generate(prompts()[0], max_new_tokens=3)
    config.repetition_penalty = None
    driver.generate(prompts()[0], max_new_tokens=3)


def test_models_without_a_cache_are_refused(threads):
    pipe = pipeline(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), num_stages=2, split="uniform")
    with pytest.raises(GenerationError, match="forward of Sequential does not take input_ids"):
        PipelineDriver1F1B(pipe, threads).generate(prompts()[0], max_new_tokens=3)
    copied = copy.deepcopy(pipe)
    with pytest.raises(GenerationError, match="this Pipe, a copy, does not hold"):
        PipelineDriver1F1B(copied, threads).generate(prompts()[0], max_new_tokens=3)


@pytest.mark.parametrize("name", ["mistral", "mixtral"])
def test_other_models(threads, name):
    described = MODELS[name]
    model = dataclasses.replace(described, options={**described.options, "num_hidden_layers": 1}).make()
    driver = PipelineDriver1F1B(pipe_of(model, 2), threads)
    check_cases(driver, model, CASES[1:3])


class Reversed(torch.nn.Module):
    """It uses its layers the other way round when it generates."""

    def __init__(self):
        super().__init__()
        self.words, self.a, self.b = torch.nn.Embedding(WORDS, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=False):
        x = self.words(input_ids)
        for layer in (self.b, self.a) if use_cache else (self.a, self.b):
            x = layer(x)
        return (x,)


def test_a_cut_where_generation_would_go_back_to_an_earlier_stage_is_refused(threads):
    def driver(split):
        pipe = pipeline(Reversed(), split=split, example_kwargs={"input_ids": prompts()[0]})
        return PipelineDriver1F1B(pipe, threads)

    with pytest.raises(GenerationError, match=r"it uses 'a\.weight' of stage 0 after stage 1"):
        driver(["b"]).generate(prompts()[0], max_new_tokens=2)
    assert driver(["a"]).generate(prompts()[0], max_new_tokens=2).shape == (ROWS, LENGTH + 2)
