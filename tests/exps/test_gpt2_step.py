"""The three forms of GPT-2 that the experiment compares are one model, and pippy sends nearly as much for both of its forms."""

import pytest
import torch

from exps import gpt2_step
from exps.peers import gpt, gpt2
from pippy import PipelineDriver
from tests.drivers.thread_cluster import thread_cluster
from tests.exps.test_versus_torch import Fake

TINY = gpt2.SIZES["tiny"]


@pytest.fixture(scope="module")
def pipes():
    return {"example": gpt2.FromExample(TINY)(2), "written": gpt2.FromMarks(TINY)(2)}


@pytest.fixture
def expected():
    """The loss and the gradients of the plain model."""
    model, (x, target) = gpt2.hugging_face(TINY), gpt.batch(TINY)
    loss = gpt2.loss_fn(model(x), target)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def test_torchs_parts_are_the_model(expected):
    x, target = gpt.batch(TINY)
    parts = [gpt2.Parts(TINY)(stage, 2) for stage in range(2)]
    loss = gpt2.loss_fn(parts[1](parts[0](x)), target)
    loss.backward()
    found = {name: parameter.grad for part in parts for name, parameter in part.named_parameters()}
    torch.testing.assert_close((loss.detach(), found), expected)


def test_what_pippy_sends_for_both_forms(pipes, expected):
    """As many messages to workers, and as many gradients. Hugging Face's model makes a mask and a size in its first stage."""
    x, target = gpt.batch(TINY)
    counts = {}
    with thread_cluster(2) as cluster:
        for name, pipe in pipes.items():
            driver = PipelineDriver(pipe, cluster, schedule="1f1b")
            driver.run(gpt.CHUNKS, x, target)
            driver.zero_grad()
            before = counted(cluster)
            loss = driver.run(gpt.CHUNKS, x, target)
            counts[name] = [after - was for after, was in zip(counted(cluster), before)]
            names = [each for each, _ in pipe.named_parameters()]
            torch.testing.assert_close((loss, driver.gradients(names)), expected, rtol=1e-4, atol=1e-6)
            driver.close()
    rows = gpt.BATCH // gpt.CHUNKS
    hidden, mask = rows * TINY.length * TINY.width * 4, rows * TINY.length * TINY.length
    assert counts["written"] == [1, 1, *[gpt.CHUNKS, gpt.CHUNKS * hidden] * 2]
    assert counts["example"] == [1, 1, gpt.CHUNKS * 3, gpt.CHUNKS * (hidden + mask), gpt.CHUNKS, gpt.CHUNKS * hidden]


def counted(cluster):
    """Messages to each worker, then the values and bytes that each has sent to the other."""
    sent = [worker.context.transport.sent for worker in cluster.engine.workers]
    values = [sent[rank][1 - rank] for rank in range(2)]
    return [*cluster.session.counts[:2], *(number for each in values for number in (each.values, each.bytes))]


def test_the_table_compares_with_both_rivals(capsys):
    entries = gpt2_step.entries(keep_memory=False)
    assert set(gpt2_step.RIVALS) < set(entries)
    fakes = {name: lambda size: Fake(a=[1.0]) for name in entries}
    seconds = gpt2_step.measure("tiny", 2, fakes)
    assert seconds.keys() == entries.keys()
    assert "of torch 1F1B" in capsys.readouterr().out
