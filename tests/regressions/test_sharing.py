"""Parameters and buffers that went apart. Each test opens with the story of what went wrong."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from pippy import (
    MultiUseParameterConfig,
    pipe_split,
    pipeline,
    verify,
)
from pippy.ir.base.errors import (
    ModeError,
    SharedParameterError,
    SplitError,
)
from pippy.ir.pipe import compiled_of
from tests.comparisons import assert_same, assert_same_gradients, assert_same_state
from tests.regressions.common import REPLICATE, TRANSMIT, Base, TwoLayers, X, check, half_square, second

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


Tied = second(lambda self, x: F.linear(self.b(x), self.a.weight))


@pytest.mark.parametrize("config", MultiUseParameterConfig)
@pytest.mark.parametrize("owner", ["model", "pipe"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_training_with_either_ones_optimizer(config, owner, optimizer):
    """Copies of a replicated parameter drifted: `model.zero_grad()` and an optimizer of the model's missed them."""
    model = Tied()
    plain = copy.deepcopy(model)
    pipe = pipeline(model, half_square, multi_use_param_spec=config)
    trained = {"model": model, "pipe": pipe}[owner]
    theirs, mine = optimizer(plain.parameters(), lr=0.05), optimizer(trained.parameters(), lr=0.05)
    target = torch.randn(6, 4)
    for _ in range(5):
        plain.zero_grad()
        trained.zero_grad()
        half_square(plain(X), target).backward()
        pipe(X, target)
        theirs_norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert_same(nn.utils.clip_grad_norm_(trained.parameters(), 0.1), theirs_norm, "norm")
        theirs.step()
        mine.step()
        assert_same_state(pipe, plain)
    mine.load_state_dict(theirs.state_dict())


def test_copies_follow_what_is_loaded_or_frozen_in_the_model():
    model = Tied()
    pipe = pipeline(model, half_square, multi_use_param_spec=REPLICATE)
    other = Tied()
    model.load_state_dict(other.state_dict())
    model.a.weight.requires_grad_(False)
    other.a.weight.requires_grad_(False)
    target = torch.randn(6, 4)
    loss = half_square(other(X), target)
    loss.backward()
    assert_same(pipe(X, target), loss.detach(), "loss")
    assert_same_gradients(pipe, other)


def clamped(model):
    model.a.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return model


@pytest.mark.parametrize("config", [TRANSMIT, REPLICATE])
def test_a_gradient_hook_of_a_shared_parameter_has_the_sum(config):
    """Each copy saw a part of the gradient, and only one the hook; then they were refused."""
    model, target = Tied(), torch.randn(6, 4)
    plain, later = copy.deepcopy(model), copy.deepcopy(model)
    pipe = pipeline(clamped(model), half_square, multi_use_param_spec=config)
    copied = pipeline(model, half_square, multi_use_param_spec=config, deep_copy_module=True)
    pipe_later = pipeline(later, half_square, multi_use_param_spec=config)
    clamped(later)
    half_square(clamped(plain)(X), target).backward()
    for each in (pipe, copied, pipe_later):
        each(X, target)
        assert_same_gradients(each, plain)


def test_attributes_of_a_parameter_are_on_its_copies():
    model = Tied()
    model.a.weight.no_decay = True
    pipe = pipeline(model, multi_use_param_spec=REPLICATE)
    assert [parameter.no_decay for parameter in pipe.copies()[0]] == [True, True]


class Renormalizing(Base):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 4, max_norm=0.1)

    def forward(self, x):
        x = self.a(x) + self.embed(x.argmax(1))
        pipe_split()
        return F.linear(self.b(x), self.embed.weight)


def test_a_replicated_parameter_that_changes_in_forward():
    """One copy was renormalized while the other was not."""
    with pytest.raises(SharedParameterError, match=r"changed 'embed\.weight' in place"):
        pipeline(Renormalizing(), half_square, multi_use_param_spec=REPLICATE)(X, X)
    check(Renormalizing(), X, multi_use_param_spec=TRANSMIT)


def view_by_dropout(x):
    return F.dropout(x, 0.5, False)


@pytest.mark.parametrize(
    "view",
    [view_by_dropout, torch.atleast_3d, lambda x: torch.einsum("ij->ji", x), lambda x: torch.broadcast_to(x, (6, 4))],
)
def test_what_may_share_memory(view):
    """A later stage changed a view that was not known to be one; another use of its base did not see it."""

    class Views(Base):
        def forward(self, x):
            x = self.a(x)
            y = view(x)
            pipe_split()
            y.add_(1)
            pipe_split()
            return self.b(x)

    with pytest.raises(SplitError, match="in place"):
        pipeline(Views())


class ReturnsOwnedParameter(Base):
    def forward(self, x):
        x = self.a(x)
        pipe_split()
        return self.b(x), self.a.bias


@pytest.mark.parametrize("config", MultiUseParameterConfig)
def test_a_returned_parameter_that_a_leaf_holds(config):
    """It was put into the last stage too."""
    model = ReturnsOwnedParameter()
    pipe = pipeline(model, multi_use_param_spec=config)
    verify(pipe)
    assert_same(pipe(X), model(X), "outputs")


class PlainTensorWithGradient(Base):
    def __init__(self):
        super().__init__()
        self.scale = torch.rand(4).requires_grad_()

    def forward(self, x):
        x = self.a(x) * self.scale
        pipe_split()
        return self.b(x) * self.scale


def test_a_plain_tensor_that_requires_a_gradient():
    """It was taken for a parameter to replicate, though the model does not list it; on workers its gradient was lost."""
    model = PlainTensorWithGradient()
    with pytest.raises(SharedParameterError, match=r"^scale \(.* requires a gradient.*Register it as an nn.Parameter"):
        pipeline(model, half_square, multi_use_param_spec=REPLICATE)
    model.scale = nn.Parameter(model.__dict__.pop("scale").detach())
    pipeline(model, half_square, multi_use_param_spec=REPLICATE)(X, X)
    mine, model.scale.grad = model.scale.grad, None
    half_square(model(X), X).backward()
    assert_same(mine, model.scale.grad, "gradient")


class TensorOnALeaf(Base):
    def __init__(self):
        super().__init__()
        self.a.scale = torch.rand(4)

    def forward(self, x):
        x = self.a(x) * self.a.scale
        pipe_split()
        return self.b(x) * self.a.scale


def test_a_plain_tensor_on_a_leaf():
    """It was there already when it was put there."""
    check(TensorOnALeaf(), X)


def test_inside_inference_mode():
    """Copies made there could not be trained."""
    model = Tied()
    with torch.inference_mode():
        pipe = pipeline(model, half_square, multi_use_param_spec=REPLICATE)
    pipe(X, X)
    assert pipe.get_grad("a.weight") is not None


def test_unused_parameters_are_converted_too():
    """`pipe.float()` left behind what no stage uses."""
    model = TwoLayers()
    model.extra = nn.Linear(2, 2)
    pipe = pipeline(model)
    pipe.float()
    assert {tensor.dtype for tensor in pipe.state_dict().values()} == {torch.float32}


class ReturnsChangedBuffer(Base):
    def __init__(self):
        super().__init__()
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        count = self.count
        x = self.a(x)
        pipe_split()
        return self.b(x) + count


def test_the_result_of_an_in_place_change_travels_as_a_copy():
    """The next micro-batch changed it before a later stage had read it: the buffer itself was sent."""
    model = ReturnsChangedBuffer()
    pipe = check(model, X)
    outputs = [pipe.stage(0)(X), pipe.stage(0)(X)]
    counts = [float(value) for output in outputs for value in output if value.dim() == 0]
    assert counts == [3.0, 4.0]


def test_averaging_a_pipe():
    """torch's averaging listed parameters by the Pipe's inner names, and averaged each with another."""
    model = Tied()
    model.unused = nn.Parameter(torch.randn(4, 4))
    pipe = pipeline(model, multi_use_param_spec=REPLICATE)
    averaged = torch.optim.swa_utils.AveragedModel(pipe)
    for _ in range(2):
        averaged.update_parameters(pipe)
    assert_same(averaged.module.state_dict(), model.state_dict(), "average of equals")
    assert_same(averaged(X), model(X), "outputs")


def test_a_pipe_inside_another_module():
    """Its state dict had the user's names on the way out and others on the way in; replicas were listed."""
    holder = nn.ModuleDict({"inner": pipeline(Tied(), half_square, multi_use_param_spec=REPLICATE)})
    plain = nn.ModuleDict({"inner": Tied()})
    assert [name for name, _ in holder.named_parameters()] == [name for name, _ in plain.named_parameters()]
    holder.load_state_dict(plain.state_dict())
    assert_same(holder["inner"](X, X), half_square(plain["inner"](X), X).detach(), "loss")
    assert [type(module) for module in holder["inner"].modules() if isinstance(module, nn.Linear)] == [nn.Linear] * 2


@pytest.mark.parametrize("convert", ["model", "pipe"])
def test_converting_keeps_buffers_shared(convert):
    """A converted buffer was another tensor than the model's: its checkpoints were stale."""
    model = ReturnsChangedBuffer()
    pipe = pipeline(model, multi_use_param_spec=REPLICATE)
    if convert == "pipe":
        pipe.float().double()
        pipe(X)
        assert model.count == 1
    tied = Tied()
    pipe = pipeline(tied, half_square, multi_use_param_spec=REPLICATE)
    {"model": tied, "pipe": pipe}[convert].float()
    pipe(X.float(), X.float())
    assert {parameter.grad.dtype for copies in pipe.copies() for parameter in copies} == {torch.float32}


def test_a_parameter_replaced_by_another_is_refused():
    """The stages went on with the old one."""
    pipe = pipeline(Tied())
    state = {name: tensor * 0 for name, tensor in pipe.named_parameters()}
    linear = pipeline(TwoLayers())
    zeros = {name: tensor * 0 for name, tensor in linear.named_parameters()}
    assert not torch.func.functional_call(linear, zeros, (X,)).any()
    assert not torch.func.functional_call(pipe, state, (X,)).any()

    class ByName(Base):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.rand(4))

        def forward(self, x):
            x = self.a(x) * self.scale
            pipe_split()
            return self.b(x)

    pipe = pipeline(ByName())
    with pytest.raises(ModeError, match=r"'scale' of the model is another tensor now"):
        torch.func.functional_call(pipe, {"scale": torch.zeros(4)}, (X,))
    pipe(X)


class NamedLikeFields(Base):
    def __init__(self):
        super().__init__()
        self.loss, self.mode, self.qualnames, self.balance = (nn.Linear(4, 4) for _ in range(4))
        self.wiring = nn.Parameter(torch.ones(4))
        self.modes: torch.Tensor
        self.register_buffer("modes", torch.ones(4))

    def forward(self, x):
        x = self.mode(self.loss(self.a(x)))
        pipe_split()
        return self.b(self.balance(self.qualnames(x)) * self.wiring + self.modes)


def test_a_model_whose_parts_have_the_names_of_a_pipes_own_attributes():
    """A part called `loss` lost its parameters from the state dict, or the loss could not be attached."""
    model = NamedLikeFields()
    names = list(model.state_dict())
    assert list(check(model, X).state_dict()) == names
    pipe = pipeline(model)
    compiled = compiled_of(pipe)
    assert (list(pipe.state_dict()), compiled.loss) == (names, None)
