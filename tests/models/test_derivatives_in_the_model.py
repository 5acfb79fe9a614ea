"""Models that differentiate in forward or in the loss: physics-informed networks, forces of a potential, MAML's inner loop.

What is differentiated, and what it is differentiated by, must lie in one stage: a gradient does not cross a cut. A cut between
them is refused by an error that names the mark; with the mark moved, as it says, the numbers are the plain model's.
"""

import pytest
import torch
from torch import nn
from torch.autograd import grad
from torch.func import functional_call
from torch.nn import functional as F

from pippy import PipelineDriver, pipe_split, pipeline
from pippy.drivers.base.errors import MicrobatchError
from pippy.ir.base.errors import PippyError, TracingError
from tests.models.idioms import ROWS, assert_same_steps, in_all_ways, in_micro_batches

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


def network(inputs, outputs):
    return nn.ModuleList([nn.Linear(inputs, 6), nn.Linear(6, 6), nn.Linear(6, outputs)])


def applied(layers, x, cut=False):
    for index, layer in enumerate(layers):
        x = torch.tanh(layer(x)) if index < 2 else layer(x)
        if cut and index == 0:
            pipe_split()
    return x


class Burgers(nn.Module):
    """Residual and values of u in u_t + u u_x = nu u_xx, by derivatives of a network; nu is learnt in a stage after it."""

    def __init__(self, cut=False):
        super().__init__()
        self.u, self.log_nu, self.cut = network(2, 1), nn.Parameter(torch.tensor(-1.0)), cut

    def forward(self, points):
        points = points.requires_grad_()
        u = applied(self.u, points, self.cut)
        first = grad(u.sum(), points, create_graph=True)[0]
        second = grad(first[:, 0].sum(), points, create_graph=True)[0]
        if not self.cut:
            pipe_split()
        residual = first[:, 1] + u.squeeze(1) * first[:, 0] - self.log_nu.exp() * second[:, 0]
        return u.squeeze(1), residual


class Materialized(Burgers):
    """Asks for zeros where there is no gradient: over a cut all of them are zeros."""

    def forward(self, points):
        points = points.requires_grad_()
        u = applied(self.u, points, self.cut)
        first = grad(u.sum(), points, create_graph=True, materialize_grads=True)[0]
        return u.squeeze(1), first[:, 1] + first[:, 0]


class Branches(nn.Module):
    """Two networks, a stage each, and the equation that couples their derivatives."""

    def __init__(self):
        super().__init__()
        self.u, self.v = network(1, 1), network(1, 1)

    def forward(self, x):
        first = x.detach().requires_grad_()
        u = applied(self.u, first)
        u_x = grad(u, first, torch.ones_like(u), create_graph=True)[0]
        pipe_split()
        second = x.detach().requires_grad_()
        v = applied(self.v, second)
        v_x = grad(v, second, torch.ones_like(v), create_graph=True)[0]
        return u, u_x - v + v_x * u


def physics_informed(outputs, target):
    """On data and on the equation."""
    values, residual = outputs
    return F.mse_loss(values, target) + residual.square().mean()


def points(count=3):
    return [(torch.rand(ROWS, 2), torch.randn(ROWS)) for _ in range(count)]


class Potential(nn.Module):
    """Energy of atoms by their distances, and forces by its derivative. A second potential is a stage of its own."""

    def __init__(self, cut=False):
        super().__init__()
        self.near, self.far, self.cut = network(1, 1), network(1, 1), cut

    def energy(self, layers, positions):
        apart = (positions.unsqueeze(1) - positions.unsqueeze(2)).square().sum(-1, keepdim=True)
        return applied(layers, torch.exp(-apart), self.cut).sum((1, 2, 3))

    def forward(self, positions):
        positions = positions.requires_grad_()
        near = self.energy(self.near, positions)
        force = -grad(near.sum(), positions, create_graph=True)[0]
        pipe_split()
        far = self.energy(self.far, positions)
        return near + far, force - grad(far.sum(), positions, create_graph=True)[0]


class EnergyOnly(Potential):
    """The script's loss differentiates, which the last stage alone computes."""

    def forward(self, positions):
        return self.energy(self.near, positions)


def of_energy_and_forces(outputs, target):
    energy, forces = outputs
    return F.mse_loss(energy, target[:, 0, 0]) + 10 * F.mse_loss(forces, target)


def molecules(count=3):
    return [(torch.randn(ROWS, 4, 3), torch.randn(ROWS, 4, 3)) for _ in range(count)]


class MAML(nn.Module):
    """A row is a task: some examples to adapt to, and others to be judged by."""

    def __init__(self, steps=2):
        super().__init__()
        self.features, self.head, self.steps = nn.Linear(3, 5), nn.Linear(5, 1), steps

    def forward(self, support, labels, query):
        support, query = torch.tanh(self.features(support)), torch.tanh(self.features(query))
        pipe_split()
        weight = self.head.weight.expand(support.size(0), -1, -1)
        for _ in range(self.steps):
            loss = (support @ weight.transpose(1, 2) - labels).square().mean((1, 2)).sum()
            weight = weight - 0.1 * grad(loss, weight, create_graph=True)[0]
        return (query @ weight.transpose(1, 2)).squeeze(2) + self.head.bias


class InnerLoop(nn.Module):
    """A head that is adapted to one task, the whole batch, by parameters that a call is given."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 1)

    def forward(self, support, labels, query):
        parameters = dict(self.head.named_parameters())
        for _ in range(2):
            loss = F.mse_loss(functional_call(self.head, parameters, (support,)), labels)
            gradients = grad(loss, list(parameters.values()), create_graph=True)
            parameters = {
                name: value - 0.1 * gradient for (name, value), gradient in zip(parameters.items(), gradients)
            }
        return functional_call(self.head, parameters, (query,)).squeeze(2)


class MAMLByFunctionalCall(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.inner_loop = nn.Linear(3, 5), InnerLoop()

    def forward(self, support, labels, query):
        query, support = torch.tanh(self.features(query)), torch.tanh(self.features(support))
        pipe_split()
        return self.inner_loop(support, labels, query)


class LoopInForward(MAMLByFunctionalCall):
    """The same without a module of its own."""

    def forward(self, support, labels, query):
        query, support = torch.tanh(self.features(query)), torch.tanh(self.features(support))
        pipe_split()
        return InnerLoop.forward(self.inner_loop, support, labels, query)


class FirstOrder(MAML):
    """The inner steps are numbers, through which nothing is differentiated."""

    def forward(self, support, labels, query):
        support, query = torch.tanh(self.features(support)), torch.tanh(self.features(query))
        pipe_split()
        weight = self.head.weight.expand(support.size(0), -1, -1)
        loss = (support @ weight.transpose(1, 2) - labels).square().mean((1, 2)).sum()
        weight = weight - 0.1 * grad(loss, weight, retain_graph=True)[0]
        return (query @ weight.transpose(1, 2)).squeeze(2) + self.head.bias


class WholeLearner(MAML):
    """The features are adapted, too: their inner gradient crosses the cut."""

    def forward(self, support, labels, query):
        hidden = torch.tanh(self.features(support))
        pipe_split()
        loss = F.mse_loss(self.head(hidden), labels)
        gradient = grad(loss, self.features.weight, create_graph=True)[0]
        adapted = torch.tanh(F.linear(query, self.features.weight - 0.1 * gradient, self.features.bias))
        return self.head(adapted).squeeze(2)


def tasks(count=3):
    return [
        (torch.randn(ROWS, 4, 3), torch.randn(ROWS, 4, 1), torch.randn(ROWS, 5, 3), torch.randn(ROWS, 5))
        for _ in range(count)
    ]


EQUAL = {
    "physics-informed": (Burgers, physics_informed, points),
    "two networks": (Branches, physics_informed, lambda: [(x[:, :1], y.unsqueeze(1)) for x, y in points()]),
    "forces": (Potential, of_energy_and_forces, molecules),
    "MAML": (MAML, nn.MSELoss(), tasks),
    "first-order MAML": (FirstOrder, nn.MSELoss(), tasks),
}
REFUSED = {
    "physics-informed": (lambda: Burgers(cut=True), physics_informed, points),
    "materialized": (lambda: Materialized(cut=True), physics_informed, points),
    "forces": (lambda: Potential(cut=True), of_energy_and_forces, molecules),
    "MAML of all layers": (WholeLearner, nn.MSELoss(), tasks),
}


@pytest.mark.parametrize("name", EQUAL)
@in_all_ways
def test_a_derivative_within_a_stage(name, workers, schedule, chunks):
    model, loss_fn, batches = EQUAL[name]
    assert_same_steps(model(), loss_fn, batches(), workers, schedule, chunks)


@pytest.mark.parametrize("name", REFUSED)
@in_micro_batches
def test_a_derivative_over_a_cut_is_refused_by_the_mark(name, schedule, workers):
    """The mark that the error names is the one that EQUAL's models have elsewhere, or not."""
    model, loss_fn, batches = REFUSED[name]
    with pytest.raises(PippyError, match=r"autograd\.grad[\s\S]*pipe_split") as found:
        PipelineDriver(pipeline(model(), loss_fn), workers, schedule=schedule).run(3, *batches()[0])
    assert __file__.rpartition("/")[2] in str(found.value)


def test_a_loop_over_gradients_wants_a_module_of_its_own():
    """Which the next test has."""
    with pytest.raises(TracingError, match="move this code into the forward of a module of its own"):
        pipeline(LoopInForward(), nn.MSELoss(), example_args=tasks()[0])


@in_micro_batches
def test_an_inner_step_on_the_whole_batch_needs_one_micro_batch(schedule, workers):
    """One task for all rows: the step is taken by a mean over all of them."""
    loss_fn, batches = nn.MSELoss(), tasks()
    with pytest.raises(MicrobatchError, match="chunks=1"):
        PipelineDriver(pipeline(MAMLByFunctionalCall(), loss_fn), workers, schedule=schedule).run(3, *batches[0])
    assert_same_steps(MAMLByFunctionalCall(), loss_fn, batches, workers, schedule, chunks=1)
