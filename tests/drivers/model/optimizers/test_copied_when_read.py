"""In a callback, the model of the script gets the workers' numbers when something reads them, and only then."""

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel

from pippy import pipeline
from pippy.drivers.driver.drivers import PipelineDriver1F1B
from pippy.ir.base.errors import PippyWarning

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


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
        copy_to = self.driver.parameters.copy_to

        def counted(model):
            self.copies += 1
            copy_to(model)

        self.driver.parameters.copy_to = counted


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
    other.driver.close()


def test_the_workers_can_be_asked_inside(trained):
    """As by a callback that evaluates: the function mode is no one of the script's, and no reason to copy."""
    with trained.driver.copied_when_read(), torch.no_grad():
        loss = trained.driver.run(1, torch.ones(4, 4), torch.ones(4, 1))
        assert trained.copies == 0
        trained.driver.copy_to(trained.model)
        function = partial(nn.functional.mse_loss, target=torch.ones(4, 1))
        torch.testing.assert_close(loss, function(trained.model(torch.ones(4, 4))))
