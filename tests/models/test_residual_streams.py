"""Models whose layers read many earlier ones: in 2, 3 and 4 stages, cut between layers and inside, under every schedule."""

from functools import cache

import pytest
import torch
from torch import nn

from exps.tried_models.residual_streams import (
    AttentionResiduals,
    EveryLayerReads,
    HyperConnections,
    LongSkips,
    MultiTokenPrediction,
    SharedKeysAndValues,
    TwoTowers,
    contrast,
)
from pippy import PipelineDriver, pipeline
from pippy.drivers.plan.language.instructions import Send
from pippy.drivers.plan.orders.registry import REGISTRY
from tests.comparisons import assert_same_gradient
from tests.drivers.thread_cluster import thread_cluster

pytestmark = pytest.mark.usefixtures("in_float64")

BETWEEN = {2: (4,), 3: (2, 4), 4: (2, 4, 6)}  # the parts that begin a stage: those of layer i are 2i and 2i + 1
INSIDE = {2: (3,), 3: (3, 5), 4: (3, 4, 7)}
MODELS = {
    "attention residuals, all layers": lambda begins: AttentionResiduals(4, full=True, begins=begins),
    "attention residuals, by blocks": lambda begins: AttentionResiduals(2, 2, begins=begins),
    "hyper-connections": lambda begins: HyperConnections(4, begins),
    "shared keys and values": lambda begins: SharedKeysAndValues(4, begins),
    "each layer reads the encoder": lambda begins: EveryLayerReads(4, begins),
    "long skips": lambda begins: LongSkips(3, begins),
    "several next tokens": lambda begins: MultiTokenPrediction(6, begins),
}
TRAINING = {name: entry for name, entry in REGISTRY.items() if entry.training}
STAGES = [2, 3, 4]  # on as many workers; with several stages on a worker, four on two


@pytest.fixture(scope="module")
def threads():
    with thread_cluster(4) as cluster:
        yield cluster


@cache
def case(name, begins):
    """A Pipe of a model, what it is called with, and the loss and gradients of plain PyTorch."""
    torch.manual_seed(0)
    model = TwoTowers(4, begins) if name == "two towers" else MODELS[name](begins)
    if name == "several next tokens":
        pipe, inputs = pipeline(model, output_loss_value_spec=True), (torch.randint(11, (8, 5)),)
        loss = model(*inputs)
    else:
        towers = name == "two towers"
        inputs = (torch.randn(8, 16), torch.arange(8)) if towers else (torch.randn(8, 3, 8), torch.randn(8, 3, 8))
        loss_fn = contrast if towers else nn.MSELoss()
        pipe, loss = pipeline(model, loss_fn), loss_fn(model(inputs[0]), inputs[1])
    names = [name for name, _ in model.named_parameters()]
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return pipe, inputs, loss.detach(), dict(zip(names, gradients))


def trained(threads, name, begins, schedule, workers, **options):
    """Hold a step to that of plain PyTorch. Returns the program that ran."""
    pipe, inputs, expected, gradients = case(name, begins)
    driver = PipelineDriver(pipe, threads, schedule=schedule, world_size=workers, check=False, **options)
    torch.testing.assert_close(driver.run(4, *inputs), expected, rtol=1e-12, atol=0)
    found = driver.gradients()
    for each, gradient in gradients.items():
        assert_same_gradient(found[each], gradient, each)
    program = driver.program(4)
    driver.close()
    return program


def cuts(name, schedule, stages):
    """Between layers for one half of the models and schedules, and inside of layers for the other."""
    number = [*MODELS, "two towers"].index(name) + list(TRAINING).index(schedule) + stages
    return (BETWEEN, INSIDE)[number % 2][stages]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stages", STAGES)
def test_a_step_is_that_of_plain_pytorch_under_every_schedule(threads, name, stages):
    on_two = {schedule for schedule, entry in TRAINING.items() if entry.placement != "linear"}
    for schedule in TRAINING if stages == 4 else TRAINING.keys() - on_two:
        program = trained(threads, name, cuts(name, schedule, stages), schedule, 2 if schedule in on_two else stages)
        assert program.stages == stages
        sent = [each.value for order in program.orders for each in order if isinstance(each, Send)]
        back = [each for each in sent if "_grad_from_" in each]
        assert len(back) <= len(sent) - len(back), schedule


@pytest.mark.parametrize(("schedule", "workers", "stages"), [("fill_drain", 3, 3), ("looped_bfs", 2, 4)])
def test_a_loss_over_the_whole_mini_batch_compares_all_rows(threads, schedule, workers, stages):
    trained(threads, "two towers", cuts("two towers", schedule, stages), schedule, workers, single_loss=True)
