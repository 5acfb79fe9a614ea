"""What `torch.autograd.grad` differentiates in forward lies in one stage, with all that lies between.

At each cut of these models the gradients are those of the plain model, or the cut is refused.
"""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import grad
from torch.nn import functional as F

from pippy import Pipe, annotate_split_points, pipe_split, pipeline
from pippy.ir.base.errors import SplitError, StageError
from pippy.ir.base.marks import SplitPoint
from pippy.ir.compile import compile_traced
from pippy.ir.cut.constraints import constraints
from pippy.ir.cut.uses import operations
from pippy.ir.loss.loss_function import WatchedLoss
from pippy.ir.request import Request
from pippy.ir.trace.trace import trace
from tests.comparisons import assert_same_gradients
from tests.ir.cut.test_constraints import cut_before

pytestmark = [pytest.mark.usefixtures("in_float64", "seeded"), pytest.mark.filterwarnings("ignore::pippy.PippyWarning")]
X, TARGET = torch.randn(7, 4).double(), torch.randn(7, 4).double()


class Forces(nn.Module):
    """Kept whole, as tracing cannot follow the branch."""

    def forward(self, energy, x):
        if energy.sum() > -1e9:
            return torch.autograd.grad(energy.sum(), x, create_graph=True, allow_unused=True, materialize_grads=True)[0]
        return x


class Net(nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.compute, self.forces = compute, Forces()
        self.embed, self.hidden, self.energy, self.last = (
            nn.Linear(*sizes) for sizes in ((4, 4), (4, 8), (8, 1), (4, 4))
        )
        self.behind = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def potential(self, x):
        return self.energy(torch.tanh(self.hidden(x)))

    def forward(self, x):
        return self.behind(self.compute(self, x))


def of_an_input(net, x):
    x = x.requires_grad_()
    force = -grad(net.potential(x).sum(), x, create_graph=True)[0]
    return net.last(torch.tanh(force))


def of_an_input_under_its_first_name(net, x):
    x.requires_grad_()
    scale = net.embed(x.detach())
    force = grad(net.potential(x).sum(), x, create_graph=True)[0]
    return net.last(force) * scale


def of_an_input_under_two_names(net, x):
    flagged = x.requires_grad_()
    force = grad(net.potential(x).sum(), flagged, create_graph=True, allow_unused=True, materialize_grads=True)[0]
    return net.last(force)


def of_a_value(net, x):
    x = torch.tanh(net.embed(x))
    force = grad(net.potential(x).sum(), x, create_graph=True)[0]
    return net.last(force) + x


def of_several_ways(net, x):
    x = torch.tanh(net.embed(x))
    energy = (net.potential(x) + x.pow(3).sum(-1, keepdim=True)).sum()
    force = grad(energy, x, create_graph=True, allow_unused=True, materialize_grads=True)[0]
    return net.last(force)


def of_two_values(net, x):
    x = torch.tanh(net.embed(x))
    hidden = torch.tanh(net.hidden(x))
    first, second = grad(net.energy(hidden).sum(), [x, hidden], create_graph=True)
    return net.last(first) * second.sum()


def of_a_part(net, x):
    x = torch.tanh(net.embed(x))
    made = torch.zeros_like(x)
    made[:, :2] = torch.tanh(x[:, :2])
    force = grad((made.pow(2) + x).sum(), x, create_graph=True)[0]
    return net.last(force)


def of_a_parameter(net, x):
    x = torch.tanh(net.embed(x))
    loss = torch.tanh(x @ net.last.weight).pow(2).sum() + net.last.weight.pow(2).sum()
    return x * grad(loss, net.last.weight, create_graph=True)[0].sum()


def of_a_module_s_parameter(net, x):
    x = torch.tanh(net.embed(x))
    found = grad(net.potential(x).pow(2).sum(), net.embed.weight, create_graph=True)[0]
    return x * found.sum()


def past_what_carries_no_gradient(net, x):
    x = torch.tanh(net.embed(x))
    mask = x.detach() > 0
    with torch.no_grad():
        scale = x * 2
    force = grad((net.potential(x) * mask * scale * x.shape[1]).sum(), x, create_graph=True)[0]
    return net.last(force)


def in_a_part_kept_whole(net, x):
    x = torch.tanh(net.embed(x))
    return net.last(net.forces(net.potential(x) + x.pow(3).sum(-1, keepdim=True), x))


def twice(net, x):
    x = torch.tanh(net.embed(x))
    force = grad(net.potential(x).sum(), x, create_graph=True)[0]
    again = grad(force.pow(2).sum(), x, create_graph=True)[0]
    return net.last(again)


def inner_loop(net, x):
    """MAML's: a step of gradient descent on a weight, and the loss with the new one."""
    x = torch.tanh(net.embed(x))
    weight = net.last.weight
    new = weight - 0.1 * grad((x @ weight).pow(2).sum(), weight, create_graph=True)[0]
    return x @ new


def by_backward(net, x):
    leaf = x.detach().clone().requires_grad_()
    leaf.pow(3).sum().backward()
    return net.last(torch.tanh(net.embed(x)) * leaf.grad)


MODELS = {
    each.__name__.replace("_", " "): each
    for each in (
        of_an_input,
        of_an_input_under_its_first_name,
        of_an_input_under_two_names,
        of_a_value,
        of_several_ways,
        of_two_values,
        of_a_part,
        of_a_parameter,
        of_a_module_s_parameter,
        past_what_carries_no_gradient,
        in_a_part_kept_whole,
        twice,
        inner_loop,
        by_backward,
    )
}


def plain_step(model, loss_fn=F.mse_loss):
    plain = copy.deepcopy(model)
    loss_fn(plain(X.clone()), TARGET).backward()
    return plain


@pytest.mark.parametrize("name", MODELS)
def test_each_cut_gives_the_plain_gradients_or_is_refused(name):
    model = Net(MODELS[name])
    plain, traced = plain_step(model), trace(model)
    count, allowed = len(operations(traced)), []
    found = constraints(traced)
    for number in range(1, count):
        at = copy.deepcopy(traced)
        is_forbidden = any(each.is_cut([int(index >= number) for index in range(count)]) for each in found)
        try:
            pipe = Pipe(at, compile_traced(at, Request(loss_fn=F.mse_loss, cut=cut_before(number))))
        except SplitError as error:
            assert is_forbidden and "torch.autograd.grad" in str(error)
            continue
        pipe(X.clone(), TARGET)
        assert_same_gradients(pipe, plain)
        allowed.append(number)
    assert 0 < len(allowed) < count - 1, "some cuts are possible, and some are not"


def test_the_error_names_the_gradient_the_operation_and_the_mark_and_the_advice_works():
    def crossing(net, x):
        x = x.requires_grad_()
        hidden = torch.tanh(net.hidden(x))
        pipe_split()
        force = grad(net.energy(hidden).sum(), x, create_graph=True)[0]
        return net.last(force)

    with pytest.raises(SplitError) as caught:
        pipeline(Net(crossing), F.mse_loss)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("forward computes a gradient by torch.autograd.grad of what several stages compute.")
    at = {line: lines[number + 2].strip() for number, line in enumerate(lines[:-2])}
    assert at["the gradient, in submod_1:"] == "force = grad(net.energy(hidden).sum(), x, create_graph=True)[0]"
    assert at["the first operation that it goes through, in submod_0:"] == "hidden = torch.tanh(net.hidden(x))"
    assert at["marked between these two:"] == "pipe_split()"

    def behind(net, x):
        x = x.requires_grad_()
        force = grad(net.energy(torch.tanh(net.hidden(x))).sum(), x, create_graph=True)[0]
        pipe_split()
        return net.last(force)

    model = Net(behind)
    pipe = pipeline(model, F.mse_loss)
    pipe(X.clone(), TARGET)
    assert_same_gradients(pipe, plain_step(model))


@pytest.mark.parametrize("example", [None, (X[:3], TARGET[:3])], ids=["", "with an example"])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_num_stages_cuts_where_the_rule_holds(name, stages, example):
    model = Net(MODELS[name])
    pipe = pipeline(model, F.mse_loss, num_stages=stages, example_args=example)
    assert pipe.num_stages == stages
    pipe(X.clone(), TARGET)
    assert_same_gradients(pipe, plain_step(model))


def test_a_mark_on_a_module_is_named_too():
    model = annotated = Net(of_a_value)
    annotate_split_points(annotated, {"energy": SplitPoint.BEGINNING})
    with pytest.raises(SplitError, match=r"(?s)marked between these two:\n.*self.energy\("):
        pipeline(model, F.mse_loss)


class Critic(nn.Module):
    """Returns the scores of rows beside these rows, for a loss with a gradient penalty; or the penalty's gradient."""

    def __init__(self, with_gradient):
        super().__init__()
        self.with_gradient = with_gradient
        self.embed, self.hidden, self.score = nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        x = torch.tanh(self.embed(x))
        pipe_split()
        scores = self.score(torch.tanh(self.hidden(x)))
        return scores, grad(scores.sum(), x, create_graph=True)[0] if self.with_gradient else x


def penalty_of(gradient):
    return (gradient.norm(dim=1) - 1).pow(2).mean()


def penalized(output, target):
    scores, x = output
    return scores.mean() + penalty_of(grad(scores.sum(), x, create_graph=True)[0])


def penalized_silently(output, target):
    scores, x = output
    options = {"create_graph": True, "allow_unused": True, "materialize_grads": True}
    return scores.mean() + penalty_of(torch.autograd.grad(scores.sum(), x, **options)[0])


def penalized_in_part(output, target):
    scores, x = output
    return scores.mean() + penalty_of(grad((scores * x.pow(2)).sum(), x, create_graph=True)[0])


class PenaltyModule(nn.Module):
    def forward(self, output, target):
        return penalized_silently(output, target)


def physics_informed(output, target):
    """Differentiates by the tensor that the script gives to the model."""
    return grad(output[0].sum(), POINTS, create_graph=True, allow_unused=True, materialize_grads=True)[0].sum()


POINTS = torch.randn(7, 4).double()


@pytest.mark.parametrize(
    "loss_fn", [penalized, penalized_silently, penalized_in_part, PenaltyModule(), physics_informed]
)
def test_a_loss_whose_gradient_leads_into_the_model_is_refused(loss_fn):
    pipe = pipeline(Critic(with_gradient=False), loss_fn)
    with pytest.raises(
        StageError, match=r"(?s)_loss failed: LossError: the loss computes a gradient.*in the model's forward"
    ):
        pipe(X, TARGET)


def test_the_advice_for_a_loss_with_a_gradient_works():
    plain = Critic(with_gradient=False)
    advised = Critic(with_gradient=True)
    advised.load_state_dict(plain.state_dict())
    penalized(plain(X), TARGET).backward()
    pipe = pipeline(advised, lambda output, target: output[0].mean() + penalty_of(output[1]))
    pipe(X, TARGET)
    assert_same_gradients(pipe, plain)


def test_a_loss_may_differentiate_what_it_makes_itself():
    """A gradient penalty of a critic that the loss has."""
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).requires_grad_(False)

    def with_critic(output, target):
        mixed = 0.3 * output + 0.7 * target
        penalty = penalty_of(torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)[0])
        return penalty + grad(critic(output).sum(), output, create_graph=True)[0].pow(2).mean()

    def compute(net, x):
        x = torch.tanh(net.embed(x))
        pipe_split()
        return net.last(x)

    model = Net(compute)
    pipe = pipeline(model, with_critic)
    pipe(X, TARGET)
    assert_same_gradients(pipe, plain_step(model, with_critic))


@pytest.mark.parametrize(("loss_fn", "is_watched"), [(F.mse_loss, False), (penalized, True), (PenaltyModule(), True)])
def test_a_loss_is_watched_only_if_its_code_names_gradients(loss_fn, is_watched):
    assert isinstance(pipeline(Critic(with_gradient=False), loss_fn).split_gm._loss, WatchedLoss) == is_watched
