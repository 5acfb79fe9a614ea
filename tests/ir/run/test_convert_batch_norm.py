"""A model's batch norms become deferred ones: what is kept, what is refused, and how they are traced."""

import copy
import pickle

import pytest
import torch
from torch import fx, nn
from torch.nn.utils import parametrize

import pippy
from pippy import DeferredBatchNorm, convert_deferred_batch_norm, pipe_split, pipeline
from pippy.errors import BatchNormError


def hook(*_):
    pass


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.frozen = nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False).eval()
        self.again, self.tied = self.norm, nn.BatchNorm1d(4)
        self.tied.weight = self.norm.weight

    def forward(self, x):
        x = self.first(x)
        x = self.norm(x)
        pipe_split()
        return self.last(self.frozen(self.tied(torch.relu_(x))))


def test_everything_but_the_class_is_kept():
    model = Net()
    model.norm.register_forward_hook(hook)
    before, norm, parameters = model.state_dict(keep_vars=True), model.norm, list(model.parameters())
    plain = copy.deepcopy(model)
    assert convert_deferred_batch_norm(convert_deferred_batch_norm(model)) is model
    after = model.state_dict(keep_vars=True)
    assert list(before) == list(after)
    assert all(after[name] is before[name] for name in before)
    assert model.norm is model.again is norm
    assert type(norm) is DeferredBatchNorm
    assert list(norm._forward_hooks.values()) == [hook]
    assert [each.training for each in model.modules()] == [each.training for each in plain.modules()]
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    x = torch.randn(6, 4)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(convert_deferred_batch_norm(Net())))):
        each.load_state_dict(plain.state_dict())
        assert torch.equal(each(x), copy.deepcopy(plain)(x))
    root = convert_deferred_batch_norm(nn.BatchNorm2d(3))
    assert isinstance(root, DeferredBatchNorm)


@pytest.mark.parametrize(("kind", "dims"), [(nn.BatchNorm1d, 4), (nn.BatchNorm2d, 2), (nn.BatchNorm3d, 4)])
def test_dimensions_are_checked_as_before(kind, dims):
    errors = []
    for norm in (kind(3), convert_deferred_batch_norm(kind(3))):
        with pytest.raises(ValueError, match="expected") as caught:
            norm(torch.randn((3,) * dims))
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    with pytest.raises(ValueError, match="expected at least 2D input"):
        DeferredBatchNorm(3)(torch.randn(3))


class Own(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x) * 2


class OwnDeferred(DeferredBatchNorm):
    def forward(self, x):
        return super().forward(x) * 2


def parametrized():
    return parametrize.register_parametrization(nn.BatchNorm1d(4), "weight", nn.Softplus())


def replaced():
    norm = nn.BatchNorm1d(4)
    norm.forward = hook
    return norm


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (
            lambda: Own(4),
            "Own is a class of its own, and may compute anything; derive it from pippy.DeferredBatchNorm, and let its "
            "forward call super().forward",
        ),
        (
            lambda: nn.SyncBatchNorm(4),
            "a SyncBatchNorm normalizes over several processes; take nn.BatchNorm1d, 2d or 3d",
        ),
        (nn.LazyBatchNorm1d, "a LazyBatchNorm1d does not know its channels yet; call the model once before"),
        (parametrized, "it is parametrized; convert it before"),
        (replaced, "its forward was replaced by a function; put that back"),
    ],
)
def test_others_are_refused_and_nothing_is_converted(kind, reason):
    model = nn.Sequential(nn.BatchNorm1d(4), kind(), nn.Sequential(nn.BatchNorm1d(4)))
    with pytest.raises(BatchNormError) as caught:
        convert_deferred_batch_norm(model)
    assert f"'1': {reason}\n" in str(caught.value)
    assert type(model[0]) is nn.BatchNorm1d
    assert convert_deferred_batch_norm(model[2])[0] is model[2][0]  # the advice
    assert type(model[2][0]) is DeferredBatchNorm


def test_what_has_no_running_statistics_is_left():
    model = convert_deferred_batch_norm(nn.Sequential(Own(4, track_running_stats=False), nn.InstanceNorm1d(4)))
    assert [type(each) for each in model] == [Own, nn.InstanceNorm1d]


@pytest.mark.parametrize("options", [{}, {"tracer": fx.Tracer}, {"example": True}], ids=str)
def test_a_stage_calls_the_module(options):
    """Whatever traces it. An operation in place after it may be in another stage, as after a batch norm of torch."""
    x, model, plain = torch.randn(6, 4), convert_deferred_batch_norm(Net()), Net()
    plain.load_state_dict(model.state_dict())
    if options.pop("example", False):
        options["example_args"] = (x,)
    pipe = pipeline(model, **options)
    assert [each.name for each in pipe.split_gm.submod_0.graph.nodes if each.op == "call_module"] == ["first", "norm"]
    assert torch.equal(pipe(x), plain(x))
    assert all(torch.equal(each, model.state_dict()[name]) for name, each in plain.state_dict().items())


def test_the_class_is_public():
    norm = pippy.DeferredBatchNorm(3, momentum=None, affine=False, dtype=torch.float64)
    assert norm.running_mean.dtype == torch.float64
    x = torch.randn(3, 4)
    assert torch.equal(OwnDeferred(4)(x), Own(4)(x))
