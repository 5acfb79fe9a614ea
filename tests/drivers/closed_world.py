"""Models whose losses, hooks and parts reach parameters by a plain reference, and not by registering them."""

import functools
import types

import torch
from torch import nn
from torch.nn import functional as F

from pippy import pipe_split

DECAY = 0.1


class Net(nn.Module):
    """Three layers in three stages. ``middle`` is called as a whole."""

    def __init__(self, middle=None):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 5), middle or nn.Linear(5, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.temperature = nn.Parameter(torch.tensor(0.7))  # which forward does not use

    def forward(self, x):
        x = torch.tanh(self.a(x)) * self.scale
        pipe_split()
        x = torch.tanh(self.b(x))
        pipe_split()
        return self.c(x)

    def compute_loss(self, output, target):
        return F.mse_loss(output, target) + DECAY * self.a.weight.square().sum()

    def plain_loss(self, output, target):
        return F.mse_loss(output, target)

    def tempered_loss(self, output, target):
        return F.mse_loss(output * self.temperature, target)


HELD = types.SimpleNamespace(model=Net())  # a global of a module that workers can import; there it is another model


def decay_of(parameters):
    return DECAY * sum(each.square().sum() for each in parameters)


def decayed(model):
    return model, lambda output, target: F.mse_loss(output, target) + decay_of(model.parameters())


def decayed_first(model):
    return model, lambda output, target: F.mse_loss(output, target) + decay_of([model.a.weight])


def bound_method(model):
    return model, model.compute_loss


def harmless_method(model):
    return model, model.plain_loss


def unused_by_forward(model):
    return model, model.tempered_loss


class Unregistered(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.models = [model]

    def forward(self, output, target):
        return F.mse_loss(output, target) + decay_of(self.models[0].a.parameters())


class WithScale(Unregistered):
    def __init__(self, model):
        super().__init__(model)
        self.own = nn.Parameter(torch.tensor(2.0))

    def forward(self, output, target):
        return super().forward(output, target) * self.own


def module_without_registering(model):
    return model, Unregistered(model)


def module_with_its_own(model):
    loss_fn = WithScale(model)
    model.own = loss_fn.own  # so that its gradient is compared
    return model, loss_fn


def registered(model):
    loss_fn = Unregistered(model)
    loss_fn.model = model
    return model, loss_fn


def partial(model):
    def loss(output, target, weight):
        return F.mse_loss(output, target) + DECAY * weight.square().sum()

    return model, functools.partial(loss, weight=model.a.weight)


def default_argument(model):
    def loss(output, target, weight=model.b.weight):
        return F.mse_loss(output, target) + DECAY * weight.square().sum()

    return model, loss


def class_attribute(model):
    class Loss:
        weights = {"first": model.a.weight}

        def __call__(self, output, target):
            return F.mse_loss(output, target) + decay_of(self.weights.values())

    return model, Loss()


def attribute_of_a_parameter(model):
    model.c.weight.other = model.a.weight
    last = model.c.weight
    return model, lambda output, target: F.mse_loss(output, target) + decay_of([last.other])


def object_in_closure(model):
    holder = types.SimpleNamespace(inner={"weights": [model.a.weight, model.b.bias]})
    return model, lambda output, target: F.mse_loss(output, target) + decay_of(holder.inner["weights"])


def by_global(output, target):
    return F.mse_loss(output, target) + decay_of(HELD.model.parameters())


def global_of_a_module(model):
    HELD.model = model
    return model, by_global


def by_helper(output, target):
    return by_global(output, target) * 2.0


def global_of_a_helper(model):
    HELD.model = model
    return model, by_helper


class GlobalLoss(nn.Module):
    def forward(self, output, target):
        return F.mse_loss(output, target) + decay_of(HELD.model.a.parameters())


def global_of_a_class(model):
    HELD.model = model
    return model, GlobalLoss()


def forward_hook(model):
    model.b.register_forward_hook(lambda module, args, output: output * model.a.weight.mean())
    return model, F.mse_loss


def forward_hook_forwards(model):
    """It reads a parameter of a later stage, which is the first to use it then."""
    model.b.register_forward_hook(lambda module, args, output: output * model.c.weight.mean())
    return model, F.mse_loss


def pre_hook(model):
    model.c.register_forward_pre_hook(lambda module, args: (args[0] * model.a.weight.mean() + model.b.bias,))
    return model, F.mse_loss


def hook_of_its_own(model):
    model.b.register_forward_hook(lambda module, args, output: output * module.weight.mean())
    return model, F.mse_loss


def hook_on_unused(model):
    model.b.register_forward_hook(lambda module, args, output: output * model.temperature)
    return model, F.mse_loss


def by_global_hook(module, args, output):
    return output * HELD.model.a.weight.mean()


def hook_by_global(model):
    HELD.model = model
    model.b.register_forward_hook(by_global_hook)
    return model, F.mse_loss


class Whole(nn.Module):
    """A part that cannot be traced, because it asks for a value."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 5)
        self.parents = []

    def forward(self, x):
        if x.abs().sum() > 1e-6:
            x = x * self.factor()
        return self.lin(x)

    def factor(self):
        return self.parents[0].scale


class WholeByGlobal(Whole):
    def factor(self):
        return HELD.model.scale


def part_of_a_parent(model):
    model = Net(middle=(part := Whole()))
    part.parents.append(model)
    return model, F.mse_loss


def part_by_global(model):
    HELD.model = model = Net(middle=WholeByGlobal())
    return model, F.mse_loss


def gradient_hook(model):
    model.a.weight.register_hook(lambda gradient: gradient * model.c.weight.mean())
    return model, F.mse_loss


def by_global_gradient(gradient):
    return gradient * HELD.model.c.weight.mean()


def gradient_hook_by_global(model):
    HELD.model = model
    model.a.weight.register_hook(by_global_gradient)
    return model, F.mse_loss


def leaf_tensor(model):
    model.a.alpha = alpha = torch.tensor(0.5, requires_grad=True)
    model.extra = {"alpha": alpha}
    return model, lambda output, target: F.mse_loss(output * alpha, target)


def unregistered_parameter(model):
    alpha = nn.Parameter(torch.tensor(0.5))
    model.extra = {"alpha": alpha}
    return model, lambda output, target: F.mse_loss(output * alpha, target)


def view(model):
    weight = model.a.weight.t()
    return model, lambda output, target: F.mse_loss(output, target) + DECAY * weight.square().sum()


def data(model):
    weight = model.a.weight.data
    return model, lambda output, target: F.mse_loss(output * weight.mean(), target)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.lin = nn.Linear(5, 5)

    def forward(self, x):
        self.count += 1
        return self.lin(x) + 0 * self.count


def buffer_that_changes(model):
    model = Net(middle=(counting := nn.BatchNorm1d(5)))
    return model, lambda output, target: F.mse_loss(output * counting.running_mean.mean(), target)


def decayed_with_statistics(model):
    """It has all buffers, too, and reads none."""
    model = Net(middle=nn.Sequential(Counting(), nn.LayerNorm(5)))
    return model, lambda output, target: F.mse_loss(output, target) + decay_of(model.parameters())


def buffer_that_stays(model):
    model.register_buffer("weights", torch.rand(3))
    return model, lambda output, target: ((output - target).square() * model.weights).mean()


def constant_tensor(model):
    weights = torch.rand(3)
    return model, lambda output, target: ((output - target).square() * weights).mean()


def settings_of_the_model(model):
    return model, lambda output, target: F.mse_loss(output.view(-1, model.c.out_features), target)


def teacher(model):
    teacher = nn.Linear(4, 3)
    return model, lambda output, target: F.mse_loss(output, teacher(torch.ones(4)).expand_as(output))


def frozen_teacher(model):
    teacher = nn.Linear(4, 3).requires_grad_(False)
    return model, lambda output, target: F.mse_loss(output, teacher(torch.ones(4)).expand_as(output))


def view_of_the_parameter(model):
    return model, lambda output, target: F.mse_loss(output, target) + DECAY * model.a.weight.t().square().sum()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.5))

    def forward(self, output, target):
        return F.mse_loss(output * self.alpha, target)


def leaf_tensor_registered(model):
    loss_fn = Scaled()
    model.extra = {"alpha": loss_fn.alpha}
    return model, loss_fn


FOLLOWED = [
    decayed,
    decayed_first,
    bound_method,
    harmless_method,
    settings_of_the_model,
    unused_by_forward,
    module_without_registering,
    module_with_its_own,
    registered,
    partial,
    default_argument,
    class_attribute,
    object_in_closure,
    global_of_a_module,
    global_of_a_helper,
    global_of_a_class,
    forward_hook,
    forward_hook_forwards,
    pre_hook,
    hook_of_its_own,
    hook_on_unused,
    hook_by_global,
    part_of_a_parent,
    part_by_global,
    gradient_hook,
    gradient_hook_by_global,
    buffer_that_stays,
    constant_tensor,
    decayed_with_statistics,
]


def made(row):
    torch.manual_seed(3)
    model, loss_fn = row(Net())
    return model, loss_fn, torch.rand(7, 4), torch.rand(7, 3)


def gradients(model):
    named = {name: each.grad for name, each in model.named_parameters()}
    named |= {name: each.grad for name, each in getattr(model, "extra", {}).items()}
    return {name: None if each is None else each.clone() for name, each in named.items()}


def plain(row):
    """The loss and the gradients of the plain model."""
    model, loss_fn, x, target = made(row)
    loss = loss_fn(model(x), target)
    loss.backward()
    return loss.detach(), gradients(model)
