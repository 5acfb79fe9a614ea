"""What the balancer says that a stage keeps, and holds at its peak, is what drivers count."""

import random
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from pippy import MultiUseParameterConfig, PipeTracer, pipeline
from pippy.balance.figures import figures_of
from pippy.balance.kept_by_operations import kept_by_operations
from pippy.balance.policies import read_split
from pippy.balance.profile import profile
from pippy.balance.weighing import Weighing
from pippy.drivers.batch.divide_call import divide_call
from pippy.drivers.count.pipe_bytes import count_pipe
from pippy.drivers.driver.drivers import PipelineDriver1F1B
from pippy.drivers.lowering.lower import lower
from pippy.drivers.plan import make_schedule
from pippy.drivers.plan.cost.held_bytes import peak_bytes
from pippy.ir.base.errors import BalanceError
from pippy.ir.compile import compile_traced
from pippy.ir.cut.constraints import constraints
from pippy.ir.cut.cuts import mark
from pippy.ir.pipe import Pipe, compiled_of
from pippy.ir.request import Request
from pippy.ir.trace.trace import trace
from tests.drivers.thread_cluster import thread_cluster
from tests.test_random_models import BINARY, UNARY, WIDTH, Random


@pytest.fixture(scope="module")
def cluster():
    with thread_cluster(2) as found:
        yield found


CPU = torch.device("cpu")


class AllUsed(Random):
    """Returns each value that nothing in the loss would depend on otherwise."""

    def forward(self, x):
        values, used = [self.layers[0](x)], set()
        for kind, one, other, which, _ in self.program:
            operands = len(values) - 1 - one % len(values), len(values) - 1 - other % len(values)
            values.append(self.step(kind, *(values[each] for each in operands), which))
            used.update(
                operands if kind in (*BINARY, "iadd") else () if kind in ("detach", "no_grad") else operands[:1]
            )
        return tuple(value for number, value in enumerate(values) if number not in used)


def loss_of(outputs, target):
    return sum(((output - target) ** 2).mean() for output in outputs)


def counted(pipe, *args):
    """What each stage keeps of a micro-batch by the count of drivers: for its backward, with values that it takes or gives."""
    compiled = compiled_of(pipe)
    sizes = count_pipe(pipe, divide_call(compiled, 1, args, {}), CPU, halves=False)
    program = lower(pipe, make_schedule("fill_drain", workers=compiled.num_stages, chunks=1)).program
    found = {}
    for number in program.backward:
        given = sizes.stages[number].kept_outputs - sizes.owned
        taken = {edge.value for edge in program.flow if f"F{number}" in map(str, edge.targets)}
        inputs = sum(each.bytes for each in sizes.inputs if number in each.stages)
        stage = sizes.stages[number]
        found[number] = stage.kept - stage.results + sum(sizes.values[name] for name in given | taken) + inputs
    return found


def kept_and_counted(model, config, places, rows=64):
    """What each stage keeps by both counts, if a model is cut at these places."""
    traced, x, target = trace(model), torch.randn(rows, WIDTH), torch.tensor(0.5)
    found = profile(traced, {"x": x, "target": target}, loss_of, target, timed=False)
    figures = figures_of(traced, config)
    figures.constraints = constraints(traced, config, found.changed)
    kept = kept_by_operations(traced, found, True, config)
    edges = Weighing(traced, figures, found, read_split([1], None, False), None).edges[1:-1]
    cuts = sorted({edges[place % len(edges)] for place in places}) if edges else []
    mark(traced, [figures.nodes[cut] for cut in cuts])
    pipe = Pipe(traced, compile_traced(traced, Request(multi_use_param_spec=config, loss_fn=loss_of)))
    bounds = [0, *cuts, len(figures.nodes)]
    return [(kept.of(bounds[stage], bounds[stage + 1]), each) for stage, each in counted(pipe, x, target).items()]


@pytest.mark.parametrize("part", range(4))
def test_what_stages_of_random_models_keep(part):
    """Seeds, and no strategy of hypothesis: a failing example says enough, and each example takes long to make smaller."""
    exact = stages = 0
    for seed in range(8 * part, 8 * part + 8):
        drawn = random.Random(seed)
        torch.manual_seed(seed)
        steps = [
            (drawn.choice(UNARY + BINARY), *(drawn.randrange(each) for each in (6, 6, 3)), False)
            for _ in range(drawn.randrange(3, 14))
        ]
        places = [drawn.randrange(1000) for _ in range(drawn.randrange(1, 4))]
        for kept, real in kept_and_counted(AllUsed(steps, []), drawn.choice(list(MultiUseParameterConfig)), places):
            assert kept == pytest.approx(real, rel=0.05, abs=8), (seed, steps, places)
            stages, exact = stages + 1, exact + (abs(kept - real) <= 8)
    assert exact >= 0.9 * stages


class InPlace(nn.Module):
    """A result that is saved is written into memory that another operation made."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        for layer in self.layers:
            x = self.relu(layer(x))
        return (x,)


class Travelling(nn.Module):
    """A parameter that is larger than what is computed with it goes to each stage that uses it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(x @ self.weight)
        return (x,)


@pytest.mark.parametrize(("model", "rows"), [(InPlace, 64), (Travelling, 1)])
@pytest.mark.parametrize("places", [[0], [1], [0, 1]])
def test_what_stages_keep_to_the_byte(model, rows, places):
    found = kept_and_counted(model(), MultiUseParameterConfig.TRANSMIT, places, rows)
    assert len(found) == len(places) + 1
    assert all(abs(kept - real) <= 8 for kept, real in found), found  # but for the number that is the loss


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
