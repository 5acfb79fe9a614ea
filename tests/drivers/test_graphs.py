"""With ``compile="graphs"`` the stages run as flat graphs, and everything is to the bit as without."""

import copy

import pytest
import torch
from torch import nn

import pippy
from pippy import MultiUseParameterConfig, PipelineDriver, pipeline
from pippy.drivers.base.errors import StepError
from pippy.drivers.batch.specs import MicroBatches
from pippy.ir.base.trees import leaves, map_tensors
from pippy.ir.call.signature import bind
from pippy.ir.reference import run_microbatches
from tests.drivers.test_driver import assert_bits, build
from tests.drivers.thread_cluster import thread_cluster
from tests.zoo import exhibits

pytestmark = [
    pytest.mark.usefixtures("in_float64", "seeded"),
    pytest.mark.filterwarnings("ignore:a mark after the model's last operation"),
]
SCHEDULES = ["1f1b", "zb_h1", "fill_drain", "zb_h2"]
# Exhibits with a stage that runs eagerly, and why.
EAGER = {
    "ConvBatchNorm": {"submod_1": "eager: it asks for the values of tensors (aten._local_scalar_dense.default)"},
}


@pytest.fixture(scope="module")
def workers():
    with thread_cluster(4) as cluster:
        yield cluster


def same_outputs(outputs, wanted, model):
    """What a step gives is what the micro-batches give, added up or one behind the other."""
    if model.loss_fn is not None:
        assert torch.equal(outputs, sum(wanted))
        return
    for one, *each in zip(leaves(outputs), *map(leaves, wanted), strict=True):
        assert torch.equal(one, torch.cat(each) if one.dim() else sum(each))


@pytest.mark.parametrize("name", [each for each in exhibits if not exhibits[each].draws])
def test_the_zoo_is_the_reference_to_the_bit(workers, name):
    number = list(exhibits).index(name)
    model, pipe = build(name, list(MultiUseParameterConfig)[number % 2])
    reference = copy.deepcopy(pipe)
    target = [model.target()] if model.loss_fn is not None else []
    microbatches = [map_tensors(torch.Tensor.detach, model.inputs()) for _ in range(3)]
    bound = [bind(reference, (*each, *target), {}) for each in microbatches]
    expected = run_microbatches(reference, bound)
    driver = PipelineDriver(
        pipe,
        workers,
        schedule=SCHEDULES[number % 4],
        world_size=min(4, pipe.num_stages),
        checkpoint="always" if number % 3 == 0 else "never",
        loss_reduction="sum",
        compile="graphs",
        check=False,
    )
    given = [MicroBatches(list(same)) for same in zip(*microbatches)]
    given += [MicroBatches([each] * 3) for each in target]
    same_outputs(driver.run(3, *given), expected, model)
    assert_bits(driver.gradients(), {name: reference.get_grad(name) for name, _ in pipe.named_parameters()})
    with torch.no_grad():
        same_outputs(driver.run(3, *given), run_microbatches(reference, bound), model)
    eager = {stage: said for stage, said in driver.compiled.items() if not said.startswith("graphs")}
    assert eager == EAGER.get(name, {}), eager


class Dropping(nn.Module):
    """Layers that draw, and a batch norm; in two stages."""

    def __init__(self):
        super().__init__()
        layers = [nn.Linear(8, 16), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.4), nn.Linear(16, 8)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


def losses(workers, model, batches, **options):
    """The losses of some steps of Adam, and the model's state afterwards."""
    pipe = pipeline(copy.deepcopy(model), nn.MSELoss(), split=["layers.3"])
    driver = PipelineDriver(pipe, workers, keyed_random=7, check=False, **options)
    optimizer = driver.instantiate_optimizer(torch.optim.Adam, lr=0.1)
    made = []
    for batch in batches:
        optimizer.zero_grad()
        made.append(driver.run(4, *batch))
        optimizer.step()
    with torch.no_grad():
        made.append(driver.run(4, *batches[0]))
    compiled, state = driver.compiled, driver.state_dict()
    driver.close()
    return made, state, compiled


OPTIONS = {
    "1f1b": {},
    "halves": {"schedule": "zb_h1"},
    "computed again": {"checkpoint": "always"},
    "one loss": {"schedule": "fill_drain", "single_loss": True},
    "out of order": {"out_of_order": True},
    "replicas": {"replicas": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_that_draw_are_to_the_bit(cluster, name):  # processes: threads would share torch's generator
    model = Dropping()
    if name == "replicas":
        pippy.convert_deferred_batch_norm(model)
    batches = [(torch.randn(16, 8), torch.randn(16, 8)) for _ in range(3)]
    batches[1] = tuple(each[:14] for each in batches[1])  # its micro-batches have two sizes
    plain, state, none = losses(cluster, model, batches, **OPTIONS[name])
    made, other, compiled = losses(cluster, model, batches, compile="graphs", **OPTIONS[name])
    assert not none and all(map(torch.equal, plain, made))
    assert_bits(other, state)
    wanted = dict.fromkeys(["submod_0", "submod_1"], "graphs for 3 forms of inputs")  # the third one in evaluation
    assert {stage: compiled[stage] for stage in wanted} == wanted


def test_under_autocast(cluster):
    model = Dropping().float()
    batches = [(torch.randn(8, 8, dtype=torch.float32), torch.randn(8, 8, dtype=torch.float32))] * 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain, state, _ = losses(cluster, model, batches)
        made, other, compiled = losses(cluster, model, batches, compile="graphs")
    assert all(map(torch.equal, plain, made)) and compiled["submod_0"] == "graphs for 2 forms of inputs"
    assert_bits(other, state)


class CountsLarge(nn.Module):
    """Its forward writes a buffer for micro-batches of more than two rows only."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.register_buffer("large", torch.zeros(()))

    def forward(self, x):
        if len(x) > 2:
            self.large += 1
        return self.layers[1](torch.tanh(self.layers[0](x))) * (self.large + 1)


def test_a_forward_that_writes_more_than_the_first_one_did_keeps_its_graph(workers):
    """It is not computed again, and the loss is: from what the forward gave."""
    model = nn.Sequential(nn.Linear(8, 8), CountsLarge())
    made = []
    for compile in (False, "graphs"):
        pipe = pipeline(copy.deepcopy(model), nn.MSELoss(), split=["1"])
        driver = PipelineDriver(pipe, workers, checkpoint="always", compile=compile, check=False)
        for rows in (4, 8):
            torch.manual_seed(rows)
            loss = driver.run(2, torch.randn(rows, 8), torch.randn(rows, 8))
        made.append((loss, driver.gradients(), driver.state_dict()))
        driver.close()
    assert torch.equal(made[0][0], made[1][0])
    assert_bits(made[1][1], made[0][1])
    assert_bits(made[1][2], made[0][2])


class Strict(nn.Module):
    """An index that is too large fails."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Embedding(5, 8), nn.Linear(8, 8)])

    def forward(self, tokens):
        return self.layers[1](self.layers[0](tokens))


def test_a_step_that_fails_names_the_line_and_the_next_one_is_right(workers):
    model = Strict()
    errors, made = [], []
    for compile in (False, "graphs"):
        pipe = pipeline(copy.deepcopy(model), nn.MSELoss(), split=["layers.1"])
        driver = PipelineDriver(pipe, workers, compile=compile, check=False)
        tokens, target = torch.tensor([0, 1, 2, 3]), torch.ones(4, 8)
        driver.run(2, tokens, target)
        with pytest.raises(StepError) as raised:
            driver.run(2, torch.tensor([0, 1, 2, 7]), target)
        errors.append(str(raised.value).split("\n")[1])
        driver.zero_grad()
        made.append((driver.run(2, tokens, target), driver.gradients()))
        assert not compile or driver.compiled["submod_0"].startswith("graphs")
        driver.close()
    assert errors[0] == errors[1] and "IndexError" in errors[0]
    assert torch.equal(made[0][0], made[1][0])
    assert_bits(made[1][1], made[0][1])
