"""Optimizers on workers, and copies of them that a script reads."""

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel

from pippy import MultiUseParameterConfig, Pipe, pipeline
from pippy.drivers.base.errors import OptimizerError
from pippy.drivers.driver.drivers import PipelineDriver1F1B
from pippy.drivers.model.optimizers.checks import check_separable
from pippy.ir.base.errors import PippyWarning
from tests.comparisons import assert_gradients, assert_state, update
from tests.drivers.models import Chain, TiedLanguage, cross_entropy, tokens

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


def batch(rows=7):
    return torch.randn(rows, 8), torch.randn(rows, 8)


def both(threads, model=None, loss=None, **options):
    """The plain model, and a driver for its twin."""
    model = Chain(3) if model is None else model
    return copy.deepcopy(model), PipelineDriver1F1B(pipeline(model, loss or nn.MSELoss(), **options), threads)


def test_parameters_that_no_group_names_are_left_alone(threads):
    plain, driver = both(threads)
    mine = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1, param_groups=[{"params": ["layers.0.*"]}])
    theirs = torch.optim.SGD([{"params": list(plain.layers[0].parameters())}], lr=0.1)
    x, target = batch()
    driver.run(2, x, target)
    F.mse_loss(plain(x), target).backward()
    mine.step(), theirs.step()
    assert_state(driver, plain)
    assert [group["params"] for group in mine.state_dict()["param_groups"]] == [["layers.0.weight", "layers.0.bias"]]


AS_TORCH = {
    "all": lambda model: model.parameters(),
    "those that train": lambda model: [each for each in model.parameters() if each.ndim > 1],
    "named": lambda model: model.named_parameters(),
    "groups": lambda model: [
        {"params": model.layers[0].parameters()},
        {"params": list(model.layers[2].parameters()), "weight_decay": 0.3},
    ],
}


@pytest.mark.parametrize("given", AS_TORCH.values(), ids=AS_TORCH)
def test_parameters_may_come_first_as_in_torch(threads, given):
    model = Chain(3)
    plain, driver = copy.deepcopy(model), PipelineDriver1F1B(pipeline(model, nn.MSELoss()), threads)
    mine = driver.instantiate_optimizer(torch.optim.SGD, given(model), 0.1, momentum=0.9)
    theirs = torch.optim.SGD(given(plain), 0.1, momentum=0.9)
    x, target = batch()
    for _ in range(2):
        driver.run(2, x, target)
        F.mse_loss(plain(x), target).backward()
        mine.step(), theirs.step()
    assert_state(driver, plain)
    with pytest.raises(OptimizerError, match="given twice"):
        driver.instantiate_optimizer(torch.optim.SGD, given(model), lr=0.1, param_groups=[{"params": "*"}])
    with pytest.raises(OptimizerError, match="not a parameter of the model"):
        driver.instantiate_optimizer(torch.optim.SGD, nn.Linear(2, 2).parameters(), lr=0.1)


def test_a_group_for_all_the_rest(threads):
    _, driver = both(threads)
    groups = [{"params": ...}, {"params": "*.bias", "lr": 0.5}]
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1, param_groups=groups)
    found = [(group["params"], group["lr"]) for group in optimizer.state_dict()["param_groups"]]
    layers = range(3)
    assert found == [([f"layers.{i}.weight" for i in layers], 0.1), ([f"layers.{i}.bias" for i in layers], 0.5)]
    for groups in ([{"params": ...}, {"params": ...}], [{"params": "*"}, {"params": ...}], []):
        with pytest.raises(OptimizerError, match=r"rest|group"):
            driver.instantiate_optimizer(torch.optim.SGD, lr=0.1, param_groups=groups)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_two_optimizers_on_one_driver(threads, accumulate):
    """Muon for matrices, AdamW for the rest; a matrix is replicated. Each drops the gradients of its own parameters."""
    plain, driver = both(threads, TiedLanguage(), cross_entropy, multi_use_param_spec=MultiUseParameterConfig.REPLICATE)
    matrices = [name for name, parameter in plain.named_parameters() if parameter.ndim == 2]
    mine = [
        driver.instantiate_optimizer(torch.optim.Muon, lr=1e-2, param_groups=[{"params": matrices}]),
        driver.instantiate_optimizer(
            torch.optim.AdamW, lr=1e-2, param_groups=[{"params": ["*.bias", "norm.*"], "weight_decay": 0.1}]
        ),
    ]
    theirs = [
        torch.optim.Muon([plain.get_parameter(name) for name in matrices], lr=1e-2),
        torch.optim.AdamW([p for p in plain.parameters() if p.ndim != 2], lr=1e-2, weight_decay=0.1),
    ]
    for step in range(5):
        for _ in range(accumulate):
            x, target = tokens()
            driver.run(3, x, target)
            cross_entropy(plain(x), target).backward()
        for each in (mine, theirs):
            each[0].step()
            each[0].zero_grad()
        if step % 2:  # the other's gradients are still there, and add up
            for each in (mine, theirs):
                each[1].step()
                each[1].zero_grad()
        assert_gradients(driver, plain)
    assert_state(driver, plain)


def test_dropping_the_gradients_of_one_optimizer_survives_a_step_that_fails(threads):
    plain, driver = both(threads)
    first = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1, param_groups=[{"params": "layers.0.*"}])
    x, target = batch()
    driver.run(2, x, target)
    first.zero_grad()
    with pytest.raises(RuntimeError):
        driver.run(2, torch.randn(7, 9), target)
    assert_gradients_of(driver, {"layers.1.weight", "layers.1.bias", "layers.2.weight", "layers.2.bias"})


def assert_gradients_of(driver, names):
    assert {name for name, gradient in driver.gradients().items() if gradient is not None} == names


class NormedSGD(torch.optim.Optimizer):
    """Divides by the norm of all gradients of a group."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            there = [p for p in group["params"] if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in there]).norm()
            for parameter in there:
                parameter -= group["lr"] * parameter.grad / norm


def test_an_optimizer_that_mixes_the_parameters_of_a_group_is_refused(threads):
    _, driver = both(threads)
    before = list(threads.session.counts)
    with pytest.raises(OptimizerError, match=r"NormedSGD .* other parameters .*clip_grad_norm_"):
        driver.instantiate_optimizer(NormedSGD, lr=0.1)
    assert threads.session.counts == before


class NoisySGD(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.randn_like(parameter), alpha=1e-3)


def test_an_optimizer_that_draws_random_numbers_mixes_nothing():
    state = torch.get_rng_state()
    check_separable(NoisySGD, (), {"lr": 0.1})
    assert torch.equal(torch.get_rng_state(), state)


class ByPlace(torch.optim.SGD):
    """Goes by the place of a parameter in its group."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] / (1 + place) * parameter.grad)


def test_an_optimizer_that_counts_the_place_in_its_group_is_refused_and_the_advice_works(threads):
    """The parameters of later stages were updated as the first ones."""
    plain, driver = both(threads)
    with pytest.raises(OptimizerError, match=r"depends on the place of the parameter.*an option of the group") as told:
        driver.instantiate_optimizer(ByPlace, lr=0.1)
    assert 'param_groups=[{"params": "first.*", "lr": 0.01}, ...]' in str(told.value)
    groups = [{"params": [name], "lr": 0.1 / (1 + place)} for place, (name, _) in enumerate(plain.named_parameters())]
    mine, theirs = (
        driver.instantiate_optimizer(torch.optim.SGD, param_groups=groups),
        ByPlace(plain.parameters(), lr=0.1),
    )
    x, target = batch()
    driver.run(2, x, target)
    F.mse_loss(plain(x), target).backward()
    mine.step(), theirs.step()
    for name, expected in plain.named_parameters():
        torch.testing.assert_close(driver.state_dict()[name], expected.detach())


OPTIMIZERS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and kind not in (torch.optim.Optimizer, torch.optim.LBFGS)
]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_each_optimizer_of_torch(threads, kind):
    """None of them mixes parameters. LBFGS does, and is refused by its name."""
    check_separable(kind, (), {})
    plain, driver = both(threads)
    names = [name for name, p in plain.named_parameters() if kind is not torch.optim.Muon or p.ndim == 2]
    if kind is torch.optim.SparseAdam:  # takes nothing but sparse gradients
        plain = nn.Sequential(nn.Embedding(13, 8, sparse=True), nn.Flatten())
        driver.close()
        driver = PipelineDriver1F1B(Pipe.from_sequential(copy.deepcopy(plain), F.mse_loss), threads)
        names = ["0.weight"]
    mine = driver.instantiate_optimizer(kind, lr=1e-2, param_groups=[{"params": names}])
    theirs = kind([plain.get_parameter(name) for name in names], lr=1e-2)
    for _ in range(3):
        x, target = batch()
        if kind is torch.optim.SparseAdam:
            x, target = torch.randint(13, (7, 1)), torch.randn(7, 8)
        driver.run(2, x, target)
        F.mse_loss(plain(x), target).backward()
        update(mine, theirs)
    assert_state(driver, plain)


# In a callback, the model of the script gets the workers' numbers when something reads them, and only then.


class Trained:
    """A model whose driver has made an update, and how often its numbers were copied since."""

    def __init__(self, threads):
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
        self.held, self.average = list(self.model.parameters()), AveragedModel(self.model)
        pipe = pipeline(self.model, nn.MSELoss(), num_stages=2, split="parameters")
        self.driver, self.copies = PipelineDriver1F1B(pipe, threads, check=False), 0
        optimizer = self.driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
        self.driver.run(1, torch.randn(4, 4), torch.randn(4, 1))
        optimizer.step()
        copy_to = self.driver.copy_to

        def counted(model):
            self.copies += 1
            copy_to(model)

        self.driver.copy_to = counted


@pytest.fixture
def trained(threads):
    made = Trained(threads)
    yield made
    made.driver.close()


def saved(trained):
    file = io.BytesIO()
    torch.save(trained.model, file)
    file.seek(0)
    return torch.load(file, weights_only=False).state_dict()["0.weight"]


def averaged(trained):
    trained.average.update_parameters(trained.model)
    return trained.average.module[0].weight.clone()


def called(trained):
    return trained.model.eval()(torch.ones(1, 4))


READS = {
    "an argument": lambda trained: torch.zeros(4, 4).add(trained.model[0].weight, alpha=0.5),
    "in a list": lambda trained: torch._foreach_norm([trained.model[0].weight])[0],
    "a method": lambda trained: trained.model[0].weight.norm(),
    "detach": lambda trained: trained.model[0].weight.detach().clone(),
    "data": lambda trained: trained.model[0].weight.data.clone(),
    "an element": lambda trained: torch.tensor(trained.model[0].weight[0, 0].item()),
    "numpy": lambda trained: torch.from_numpy(trained.model[0].weight.detach().numpy().copy()),
    "a list of numbers": lambda trained: torch.tensor(trained.model[0].weight.tolist()),
    "held before": lambda trained: parameters_to_vector(trained.held),
    "a buffer": lambda trained: trained.model[1].running_mean.clone(),
    "a state dict": lambda trained: trained.model.state_dict()["0.weight"].clone(),
    "a copy": lambda trained: copy.deepcopy(trained.model)[0].weight,
    "a file": saved,
    "an average": averaged,
    "a call": called,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_is_read_is_what_the_workers_have(read, trained):
    """The same read of a model that has the trained numbers beforehand gives the same."""
    with trained.driver.copied_when_read():
        found = read(trained)
        assert trained.copies == 1
        read(trained)
    assert trained.copies == 1
    if read is not averaged:
        assert torch.equal(found, read(trained))
    assert torch.equal(trained.model[0].weight, trained.driver.state_dict()["0.weight"])


ASKS = {
    "sizes": lambda model: [(each.shape, each.numel(), each.size(), each.dim()) for each in model.parameters()],
    "kinds": lambda model: [
        (each.dtype, each.device, each.is_leaf, each.is_floating_point()) for each in model.parameters()
    ],
    "freezing": lambda model: [each.requires_grad_(each.requires_grad) for each in model.parameters()],
    "modes": lambda model: model.train(),
    "other tensors": lambda model: torch.ones(3).sum(),
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_what_asks_for_no_numbers_copies_nothing(ask, trained):
    with trained.driver.copied_when_read():
        ask(trained.model)
    assert trained.copies == 0


def test_outside_of_a_callback_nothing_is_copied(trained):
    with trained.driver.copied_when_read():
        pass
    trained.model[0].weight.norm()
    assert trained.copies == 0


def test_a_model_that_is_as_on_the_workers_is_not_looked_at(trained):
    trained.driver.copy_to(trained.model)
    inside = trained.driver.copied_when_read()
    assert not isinstance(inside, torch.overrides.TorchFunctionMode)


def test_a_model_of_another_driver_is_told_as_ever(trained, threads):
    other = Trained(threads)
    with trained.driver.copied_when_read(), pytest.warns(PippyWarning, match="does not use the trained parameters"):
        other.model.state_dict()
    assert (trained.copies, other.copies) == (0, 0)


def test_the_workers_can_be_asked_inside(trained):
    """As by a callback that evaluates: the function mode is no one of the script's, and no reason to copy."""
    with trained.driver.copied_when_read(), torch.no_grad():
        loss = trained.driver.run(1, torch.ones(4, 4), torch.ones(4, 1))
        assert trained.copies == 0
        trained.driver.copy_to(trained.model)
        function = partial(nn.functional.mse_loss, target=torch.ones(4, 1))
        torch.testing.assert_close(loss, function(trained.model(torch.ones(4, 4))))
