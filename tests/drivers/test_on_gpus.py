"""What other tests see on the CPU, on GPUs: each is skipped where there is none."""

import copy
import importlib.util
import json
import os
import signal
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import PipelineDriver, PipelineDriver1F1B, local_cluster, pipe_split, pipeline
from pippy.errors import WorkerLostError
from tests.comparisons import assert_bits, assert_gradients, assert_state, update
from tests.drivers.processes import close_open_cluster, within

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
WORDS, WIDTH, LENGTH, ROWS = 31, 16, 6, 8
WORKSPACE = 80 << 20  # of torch's matrix products, once for a process
VALUE = 4096 * 1024 * 4  # bytes that go from stage to stage: a worker has a copy of each that is under way


@pytest.fixture(scope="module")
def held():
    close_open_cluster()
    with local_cluster(2, device="cuda:0") as cluster:
        yield cluster


class Block(nn.Module):
    """Attention, a convolution, and what is usual around them."""

    def __init__(self, dropout):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.conv, self.out = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.attention(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.dropout(self.out(F.gelu(self.conv(y.transpose(1, 2)).transpose(1, 2))))


class Language(nn.Module):
    def __init__(self, dropout=0.0, stages=4):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(stages))
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            if number:
                pipe_split()
            x = block(x)
        return self.head(x)


def token_loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def language(**options):
    torch.manual_seed(0)
    return Language(**options)


def tokens():
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(WORDS, (ROWS, LENGTH), generator=generator) for _ in range(2))


OPTIONS = {
    "fill-drain": {"schedule": "fill_drain"},
    "interleaved": {"schedule": "interleaved_1f1b"},
    "zb_h1": {"schedule": "zb_h1"},
    "zb_v": {"schedule": "zb_v"},
    "dualpipe_v": {"schedule": "dualpipe_v"},
    "forwards computed again": {"schedule": "interleaved_1f1b", "checkpoint": "always"},
    "graphs": {"schedule": "zb_v", "compile": "graphs"},
    "one loss": {"schedule": "fill_drain", "single_loss": True},
    "replicas": {"schedule": "interleaved_1f1b", "replicas": 2, "stages_per_worker": 4},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_are_those_of_the_plain_model_on_the_gpu(held, name):
    options = OPTIONS[name]
    stages = 2 if options["schedule"] == "fill_drain" else 4
    plain = language(stages=stages).double()
    driver = PipelineDriver(pipeline(copy.deepcopy(plain), token_loss), held, **options)
    mine, x_and_target = driver.instantiate_optimizer(torch.optim.AdamW, lr=1e-2), tokens()
    plain.cuda()
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    x, target = (each.cuda() for each in x_and_target)
    for _ in range(4):
        loss = token_loss(plain(x), target)
        loss.backward()
        torch.testing.assert_close(driver.run(4, *x_and_target), loss.detach().cpu(), rtol=1e-9, atol=0)
        update(mine, theirs)
    assert_state(driver, plain.cpu(), rtol=1e-7, atol=1e-10)


def losses(cluster, steps=3, **options):
    """The losses and the parameters of some steps with dropout, of two stages on a worker each, or on one."""
    torch.manual_seed(3)
    driver = PipelineDriver(pipeline(language(dropout=0.3, stages=2), token_loss), cluster, **options)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    found = []
    for _ in range(steps):
        found.append(driver.run(4, *tokens()))
        update(optimizer)
    state = driver.state_dict()
    driver.close()
    return found, state


def test_dropout_draws_the_same_on_every_worker_and_schedule(held):
    wanted = losses(held, schedule="1f1b")
    others = [{"schedule": "fill_drain"}, {"schedule": "zb_h1"}, {"schedule": "1f1b", "checkpoint": "always"}]
    for options in others:
        found = losses(held, **options)
        assert found[0] == wanted[0], options
        for name, tensor in found[1].items():
            torch.testing.assert_close(tensor, wanted[1][name])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True) for _ in range(2))

    def forward(self, x):
        x = self.first(x)[0]
        pipe_split()
        return self.second(x)[0]


def test_recurrent_layers_drop_the_same_when_they_are_computed_again(held):
    torch.manual_seed(0)
    model, found = Recurrent().double(), []
    x, target = torch.randn(2, ROWS, LENGTH, WIDTH, dtype=torch.float64)
    for options in ({}, {"checkpoint": "always"}):
        torch.manual_seed(3)
        driver = PipelineDriver1F1B(pipeline(copy.deepcopy(model), nn.MSELoss()), held, **options)
        found.append((driver.run(4, x, target), driver.gradients()))
        driver.close()
    assert found[0][0] == found[1][0]
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_on_the_gpu_is_that_of_the_plain_model(held, dtype):
    plain = language(stages=2)
    driver = PipelineDriver1F1B(pipeline(copy.deepcopy(plain), token_loss), held)
    plain.cuda()
    x, target = tokens()
    with torch.autocast("cuda", dtype=dtype):
        parts = [token_loss(plain(a.cuda()), b.cuda()) for a, b in zip(x.chunk(4), target.chunk(4))]
        found = driver.run(4, x, target)
        wanted = torch.stack(parts).mean()
    wanted.backward()
    torch.testing.assert_close(found, wanted.detach().cpu(), rtol=1e-5, atol=1e-6)
    assert_gradients(driver, plain.cpu(), rtol=2e-2, atol=2e-3)


def test_a_scaled_loss_skips_the_steps_that_overflow(held):
    driver = PipelineDriver1F1B(pipeline(language(stages=2), token_loss), held)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    scaler = driver.instantiate_grad_scaler(init_scale=2.0**40, growth_interval=2)
    before, found = driver.state_dict(), tokens()
    with torch.autocast("cuda", dtype=torch.float16):
        driver.run(4, *found)
    scaler.step(optimizer)
    scaler.update()
    assert_bits(driver.state_dict(), before)
    assert scaler.get_scale() == 2.0**39


def test_a_checkpoint_of_a_gpu_goes_on_where_it_was(held, tmp_path):
    def new():
        driver = PipelineDriver1F1B(pipeline(language(dropout=0.1, stages=2), token_loss), held)
        return driver, driver.instantiate_optimizer(torch.optim.AdamW, lr=1e-2)

    def step(driver, optimizer):
        loss = driver.run(4, *tokens())
        update(optimizer)
        return loss

    driver, optimizer = new()
    for _ in range(2):
        step(driver, optimizer)
    driver.save(tmp_path, optimizer=optimizer, step=2)
    wanted = [step(driver, optimizer) for _ in range(2)]
    driver.close()
    driver, optimizer = new()
    assert driver.load(tmp_path, optimizer=optimizer) == {"step": 2}
    assert [step(driver, optimizer) for _ in range(2)] == wanted


def test_what_a_worker_holds_is_what_was_counted(held):
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(8))

        def forward(self, x):
            for number, layer in enumerate(self.layers):
                if number == 4:
                    pipe_split()
                x = torch.relu(layer(x))
            return x

    driver = PipelineDriver1F1B(pipeline(Wide(), nn.MSELoss()), held)
    x, target = torch.randn(2, 32768, 1024)
    for _ in range(3):
        driver.run(8, x, target)
        driver.zero_grad()
    counted = driver.memory(8, x, target).peaks
    with driver.record(memory=True) as recording:
        driver.run(8, x, target)
    for measured, expected in zip(recording.steps[-1].held_peaks, counted):
        assert abs(measured - expected) <= 0.05 * expected + WORKSPACE + 8 * VALUE, (
            recording.steps[-1].held_peaks,
            counted,
        )


def test_a_recorded_step_has_the_times_of_the_gpu(held):
    driver = PipelineDriver1F1B(pipeline(language(stages=2), token_loss), held)
    for _ in range(3):
        driver.run(4, *tokens())
        driver.zero_grad()
    with driver.record() as recording:
        driver.run(4, *tokens())
    (step,) = recording.steps
    assert [[span.compute for span in spans] for spans in step.timeline.spans] == [
        list(computes) for computes in driver.program(4).computations
    ]
    for spans in step.timeline.spans:
        for before, after in pairwise(spans):
            assert before.start < before.end <= after.start, "one after the other, as the GPU computes"


def test_a_profile_has_the_kernels_of_all_workers(held, tmp_path):
    driver = PipelineDriver1F1B(pipeline(language(stages=2), token_loss), held)
    driver.run(4, *tokens())
    with driver.profile(tmp_path / "trace.json"):
        driver.run(4, *tokens())
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    processes = {event["pid"] for event in events if event.get("cat") == "kernel"}
    assert len(processes) == 2, "rows of the GPU are told apart by worker"


def test_parameters_are_made_where_they_are_and_every_placement_makes_the_same(held):
    with torch.device("meta"):
        model = language()
    made = []
    for schedule in ("interleaved_1f1b", "zb_v"):
        driver = PipelineDriver(pipeline(model, token_loss), held, schedule=schedule)
        driver.initialize(seed=0)
        made.append(driver.state_dict())
        driver.close()
    assert_bits(*made)
    assert made[0]["blocks.3.out.weight"].std() > 0.1


def test_generation_gives_the_tokens_of_the_plain_model(held):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    options = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": WORDS, "pad_token_id": 0}
    config = transformers.GPT2Config(**options, bos_token_id=1, eos_token_id=2, use_cache=False)
    plain = transformers.GPT2LMHeadModel(config).double().eval()
    ids = torch.randint(9, WORDS, (4, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    pipe = pipeline(copy.deepcopy(plain), num_stages=2, example_kwargs={"input_ids": ids, "attention_mask": mask})
    driver = PipelineDriver1F1B(pipe, held)
    found = driver.generate(ids, attention_mask=mask, max_new_tokens=12, chunks=2)
    wanted = plain.cuda().generate(ids.cuda(), attention_mask=mask.cuda(), max_new_tokens=12, use_cache=True)
    assert torch.equal(found, wanted.cpu())


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="inductor compiles for GPUs by Triton")
def test_compiled_stages_are_those_of_the_plain_model(held):
    plain = language(stages=4)
    driver = PipelineDriver(pipeline(copy.deepcopy(plain), token_loss), held, schedule="zb_v", compile=True)
    plain.cuda()
    x, target = tokens()
    for _ in range(3):
        driver.zero_grad()
        found = driver.run(4, x, target)
    wanted = token_loss(plain(x.cuda()), target.cuda())
    wanted.backward()
    torch.testing.assert_close(found, wanted.detach().cpu())
    assert_gradients(driver, plain.cpu(), rtol=1e-3, atol=1e-5)
    assert set(driver.compiled.values()) == {"compiled graphs for 1 form of inputs"}, driver.compiled


def test_a_worker_of_a_gpu_that_is_killed_is_replaced():
    close_open_cluster()
    with local_cluster(2, device="cuda:0", timeout=30.0) as cluster:
        driver = PipelineDriver1F1B(pipeline(language(dropout=0.2, stages=2).double(), token_loss), cluster)
        optimizer = driver.instantiate_optimizer(torch.optim.AdamW, lr=1e-2)

        def step():
            loss = driver.run(4, *tokens())
            update(optimizer)
            return loss

        for _ in range(3):
            step()
        driver.protect(optimizer=optimizer, step=3)
        wanted = [step() for _ in range(4)]
        with within(5.0), pytest.raises(WorkerLostError, match="'worker1'"):
            os.kill(cluster.session.workers[1].pid, signal.SIGKILL)
            step()
        assert driver.recover() == {"step": 3}
        assert [step() for _ in range(4)] == wanted, "to the bit, also when values stay on the GPU again"
        assert cluster.routes.between(0, 1) == "GPU memory"
