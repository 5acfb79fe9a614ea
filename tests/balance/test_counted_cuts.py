"""The memory by which the balancer cuts is what drivers count."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from pippy import PipeTracer, pipeline
from pippy.drivers.driver.drivers import PipelineDriver1F1B
from pippy.drivers.plan.cost.held_bytes import peak_bytes
from pippy.ir.base.errors import BalanceError
from tests.drivers.thread_cluster import thread_cluster


@pytest.fixture(scope="module")
def cluster():
    with thread_cluster(2) as found:
        yield found


CPU = torch.device("cpu")


class Summed(nn.Module):
    """Each layer's input goes on beside it, and no addition saves what it adds. The first half keeps more."""

    def __init__(self, layers=8, width=64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        skip = x
        for number, layer in enumerate(self.layers):
            x = layer(x) if number > 3 else layer(x).sin()
            skip = skip + x
        return skip


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def peaks_of_driver(pipe, cluster, x, chunks=2):
    """By `driver.memory`, with an optimizer whose state is as large as the parameters."""
    driver = PipelineDriver1F1B(pipe, cluster)
    several = torch.cat([x] * chunks)
    found = driver.memory(chunks, several, several, optimizer=momentum)
    driver.close()
    return found


def balanced(memory_limit=None, split="parameters"):
    x = torch.randn(256, 64)
    stages = 2 if isinstance(split, str) else None
    how = {"example_args": (x, x), "memory_limit": memory_limit, "param_scale": 3}
    return pipeline(Summed(), nn.MSELoss(), split=split, num_stages=stages, **how), x


def layers_of(pipe):
    return [stage.layers for stage in pipe.balance.stages]


def test_a_limit_is_kept_by_what_drivers_count(cluster):
    """The balancer counted what autograd saves, and took cuts whose stages hold more."""
    free, x = balanced()
    limit = max(peaks_of_driver(free, cluster, x).peaks) - 1
    pipe, _ = balanced(limit)
    assert layers_of(free) == [4, 4]
    assert max(peaks_of_driver(pipe, cluster, x).peaks) <= limit
    # On a GPU only the inputs of micro-batches in flight are held, and the balancer does not know how many there are.
    several = peaks_of_driver(pipe, cluster, x, chunks=3)
    real = peak_bytes(several.program, replace(several.sizes, inputs_stay=False))
    assert [stage.peak for stage in pipe.balance.stages] == pytest.approx(real, rel=0.02)
    assert all(stage.memory < stage.peak for stage in pipe.balance.stages)


def test_by_size_no_cut_between_layers_is_lighter_and_a_limit_finds_the_lightest():
    """The search knows nearly what stages keep; what it finds is counted, and searched again with that."""
    by_hand = [balanced(10**9, [first, 8 - first])[0].balance for first in range(1, 8)]
    lightest = min(max(stage.peak for stage in each.stages) for each in by_hand)
    by_size = balanced(split="size")[0].balance
    assert max(stage.peak for stage in by_size.stages) <= lightest * 1.03
    assert [stage.cost for stage in by_size.stages] == [stage.peak for stage in by_size.stages]
    assert max(stage.peak for stage in balanced(lightest)[0].balance.stages) <= lightest


def test_what_the_refusal_names_is_enough():
    with pytest.raises(BalanceError, match="memory_limit=") as refusal:
        balanced(1000)
    least = int(re.search(r"one of them needs ([\d,]+) ", str(refusal.value))[1].replace(",", ""))
    pipe, _ = balanced(least)
    assert max(stage.peak for stage in pipe.balance.stages) == least
    with pytest.raises(BalanceError, match=f"one of them needs {least:,} "):
        balanced(least - 1)


@pytest.mark.parametrize("split", [["layers.4"], [4, 4]])
def test_cuts_by_hand_are_held_to_their_peaks(split):
    free, _ = balanced(split=split)
    limit = max(stage.memory for stage in free.balance.stages)
    with pytest.raises(BalanceError, match=r"needs [\d,]+ "):
        balanced(limit, split)
    found, _ = balanced(10**9, split)
    assert max(stage.peak for stage in found.balance.stages) > limit


class AsksForNumbers(nn.Module):
    def forward(self, x):
        return x[x > -100].view_as(x)


def test_without_fake_tensors_a_limit_is_for_what_is_kept():
    x = torch.randn(16, 8)
    model = nn.Sequential(nn.Linear(8, 8), AsksForNumbers(), nn.Linear(8, 8))
    how = {"split": ["2"], "example_args": (x, x)}
    held = max(stage.memory for stage in pipeline(model, nn.MSELoss(), **how, tracer=Whole).balance.stages)
    balance = pipeline(model, nn.MSELoss(), **how, tracer=Whole, memory_limit=held).balance
    why = "peaks are not counted, as the model cannot run with fake tensors: forward of submod_0 failed: "
    assert why in str(balance).splitlines()[-1]
    assert all(stage.peak is None for stage in balance.stages)
    with pytest.raises(BalanceError, match=f"needs {held:,} .* more than memory_limit"):
        pipeline(model, nn.MSELoss(), **how, tracer=Whole, memory_limit=held - 1)


class Whole(PipeTracer):
    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, AsksForNumbers) or super().is_leaf_module(m, module_qualified_name)
