"""Each test opens with the story of what went wrong."""

import collections
import copy
import dataclasses
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch import randn as aliased_randn

from pippy import (
    LossWrapper,
    MultiUseParameterConfig,
    Pipe,
    PippyWarning,
    SplitPoint,
    annotate_split_points,
    pipe_split,
    pipeline,
    verify,
)
from pippy.ir.errors import (
    InputError,
    ModeError,
    PippyError,
    SharedParameterError,
    SplitError,
    StageError,
    TracingError,
)
from tests.compare import assert_same, assert_same_gradients, assert_same_state
from tests.zoo import AsksForTypes

REPLICATE, TRANSMIT = MultiUseParameterConfig.REPLICATE, MultiUseParameterConfig.TRANSMIT


pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


def half_square(output, target):
    return ((output - target) ** 2).mean()


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


def check(model: nn.Module, *inputs: Any, steps: int = 2, **options: Any) -> Pipe:
    """Train a Pipe and the plain model side by side."""
    plain = copy.deepcopy(model)
    pipe = pipeline(model, half_square, **options)
    target = torch.randn(6, 4)
    for seed in range(steps):
        torch.manual_seed(seed)
        expected = half_square(plain(*inputs), target)
        expected.backward()
        torch.manual_seed(seed)
        assert_same(pipe(*inputs, target), expected.detach(), "loss")
        assert_same_gradients(pipe, plain)
        assert_same_state(pipe, plain)
    return pipe


X = torch.randn(6, 4, dtype=torch.float64)


class Encoder(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, self.training)


class FrozenEncoder(Base):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder().eval()

    def forward(self, x):
        x = self.encoder(x)
        pipe_split()
        return self.a(x)


def test_a_module_in_another_mode_than_the_model():
    """The flag of a frozen encoder was ordered by the mode of the whole model, so that dropout ran where it was off."""
    check(FrozenEncoder(), X)


class DropoutInTwoStages(Base):
    def forward(self, x):
        x = F.dropout(self.a(x), 0.5, self.training)
        pipe_split()
        return F.dropout(self.b(x), 0.2, self.training)


def test_a_training_flag_read_in_two_stages():
    """The flag was taken for a tensor that two stages share."""
    check(DropoutInTwoStages(), X)


class BranchesOnItsMode(nn.Module):
    def forward(self, x):
        return x * 2 + 1 if self.training else x


class ChildBranches(Base):
    def __init__(self):
        super().__init__()
        self.child = BranchesOnItsMode().eval()

    def forward(self, x):
        x = self.child(self.a(x))
        pipe_split()
        return self.b(x)


def test_a_childs_mode_that_the_structure_depends_on():
    """Only the mode of the whole model was checked; `train()` then ran a child's graph of the other mode."""
    pipe = check(ChildBranches(), X)
    with pytest.raises(ModeError, match="not traced in train mode"):
        pipe.train()(X, X)
    pipe.eval()(X, X)


class KeepsNormFrozen(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        x = self.norm(self.a(x))
        pipe_split()
        return self.b(x)


def test_a_train_of_the_models_own():
    """`pipe.train()` set every flag, where the model's own train keeps some."""
    model = KeepsNormFrozen()
    plain, pipe = copy.deepcopy(model).train(), pipeline(model).train()
    assert_same(pipe(X), plain(X), "outputs")
    assert_same_state(pipe, plain)
    assert model.norm.training is False


class Checkpointed(Base):
    def forward(self, x):
        x = self.a(x)
        x = torch.utils.checkpoint.checkpoint(self.b, x, use_reentrant=True)
        pipe_split()
        return self.b(x)


def test_reentrant_checkpointing():
    """Its autograd function runs the wrapped part without gradients, so everything before it lost its own."""
    check(Checkpointed(), X)


class OptionalBias(Base):
    def forward(self, x, bias=None):
        x = self.a(x)
        pipe_split()
        if bias is None:
            bias = self.b.bias
        return F.linear(x, self.b.weight, bias)


def test_an_optional_input_that_forward_asks_about():
    """The placeholder of an input was never None while tracing, so the branch for None was silently lost."""
    with pytest.raises(InputError, match=r"'bias' is None(.|\n)*concrete_args=\{'bias': None\}"):
        pipeline(OptionalBias())(X)
    bias, model = torch.randn(4), OptionalBias()
    assert_same(pipeline(model)(X, bias), model(X, bias), "with a bias")
    check(OptionalBias(), X, concrete_args={"bias": None})


class OptionalMask(Base):
    def forward(self, x, mask=None, scale=None):
        x = self.a(x)
        pipe_split()
        q = x.view(1, 6, 4)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask, scale=scale).view(6, 4)


def test_an_optional_input_that_is_only_passed_on():
    """Refusing every None would refuse this one for nothing."""
    check(OptionalMask(), X)
    mask, model = torch.randn(6, 6), OptionalMask()
    assert_same(pipeline(model)(X, mask=mask), model(X, mask), "with a mask")


def test_questions_for_the_type_and_assertions():
    """A proxy is no tensor, and an assert is control flow; both took the wrong way."""
    model = AsksForTypes()  # it lives in the zoo, since pytest rewrites the assertions in test files
    with pytest.raises(StageError, match=r"assert x.size\(1\) == 8"):
        pipeline(model)(torch.randn(6, 3))


class Untraced(Base):
    def __init__(self):
        super().__init__()
        self.count = torch.zeros(())

    def forward(self, x):
        self.count.add_(1)
        x = self.a(x) + aliased_randn(4) + torch.hann_window(4)
        pipe_split()
        return self.b(x) * self.count + 0.01 * sum(parameter.pow(2).sum() for parameter in self.parameters())


def test_operations_that_take_nothing_traced():
    """Functions under another name, plain tensors and the model's own parameters were computed once, while tracing."""
    check(Untraced(), X)


class DrawsInPython(Base):
    def forward(self, x):
        x = self.a(x)
        pipe_split()
        return self.b(x) if random.random() < 2 else x


class Seeds(Base):
    def forward(self, x):
        torch.manual_seed(3)
        x = self.a(x)
        pipe_split()
        return self.b(x)


@pytest.mark.parametrize(("model", "where"), [(DrawsInPython, "Python's random"), (Seeds, "torch")])
def test_random_numbers_that_would_be_frozen(model, where):
    """What Python's random said while tracing was said for ever after."""
    built = model()
    before = random.getstate(), torch.get_rng_state()
    with pytest.raises(TracingError, match=where):
        pipeline(built)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


class ChangesAttributes(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("ema", torch.ones(4))

    def forward(self, x):
        x = self.a(x)
        self.ema.data.mul_(0.5)
        transposed = x.T
        transposed += 1
        pipe_split()
        y = self.b(x)
        y.T[0] = 0.0
        return y


def test_in_place_changes_through_attributes():
    """`x.T += 1` and `buffer.data.mul_()` went to a stand-in and were dropped."""
    check(ChangesAttributes(), X)


class SetsData(Base):
    def forward(self, x):
        x = self.a(x)
        x.data = x.data * 2
        pipe_split()
        return self.b(x)


def test_setting_an_attribute_of_a_tensor_is_refused():
    """It set the attribute of a stand-in, and was dropped."""
    with pytest.raises(TracingError, match=r"sets \.data of a tensor"):
        pipeline(SetsData())


class TwoLayers(Base):
    def forward(self, x):
        x = self.a(x)
        pipe_split()
        return self.b(x)


def test_hooks_that_no_stage_would_call():
    """Hooks of the model itself, and backward hooks of what is taken apart, were dropped."""
    model = TwoLayers()
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(TracingError, match=r"hooks of its own \(forward_hooks\)"):
        pipeline(model)
    inner = nn.Sequential(TwoLayers(), nn.ReLU())
    inner[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(TracingError, match=r"'0' \(TwoLayers\) has backward hooks"):
        pipeline(inner)


def test_hooks_of_leaves_are_called():
    model, seen = TwoLayers(), []
    model.a.register_forward_hook(lambda *_: seen.append("forward"))
    model.b.register_full_backward_hook(lambda *_: seen.append("backward"))
    pipeline(model, half_square)(X, X)
    assert seen == ["forward", "backward"]


class Tied(Base):
    def forward(self, x):
        x = self.a(x)
        pipe_split()
        return F.linear(self.b(x), self.a.weight)


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


def test_gradient_hooks_on_a_replicated_parameter_are_refused():
    """Each copy saw a part of the gradient, and only one the hook."""
    model = Tied()
    model.a.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    with pytest.raises(SharedParameterError, match="gradient hooks"):
        pipeline(model, multi_use_param_spec=REPLICATE)
    check(model := Tied(), X, multi_use_param_spec=TRANSMIT)


def test_attributes_of_a_parameter_are_on_its_copies():
    model = Tied()
    model.a.weight.no_decay = True
    pipe = pipeline(model, multi_use_param_spec=REPLICATE)
    assert [parameter.no_decay for parameter in pipe.replicas()[0]] == [True, True]


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


class Scaled(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * 2


def test_a_sequential_with_a_forward_of_its_own():
    """from_sequential called its children in turn, whatever its forward did."""
    with pytest.raises(TracingError, match="call pipeline"):
        Pipe.from_sequential(Scaled(nn.Linear(4, 4), nn.ReLU()))


class WithoutAutocast(Base):
    def forward(self, x):
        x = self.a(x)
        pipe_split()
        with torch.autocast("cpu", enabled=False):
            return self.b(x)


def test_a_region_that_turns_autocast_off():
    """Traced outside of autocast it changed nothing, and was lost to a run inside of it."""
    with pytest.raises(TracingError, match="autocast"):
        pipeline(WithoutAutocast())


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


class Collects(Base):
    def __init__(self):
        super().__init__()
        self.seen, self.named, self.order = [], {"first": 1}, [3, 2]

    def forward(self, x):
        x = self.a(x)
        self.seen.append(x)
        self.named["x"] = x
        pipe_split()
        return self.b(x)


def test_lists_and_dicts_of_the_model():
    """They kept stand-ins for tensors."""
    model = Collects()
    with pytest.warns(PippyWarning, match="sets seen, named on the model"):
        pipeline(model)
    assert (model.seen, model.named, model.order) == ([], {"first": 1}, [3, 2])


class TwoConsumers(Base):
    def forward(self, x, y):
        z = self.a(x) * y
        pipe_split()
        return self.b(z) + x


def test_inputs_from_one_graph():
    """Their common graph was run backward once for each stage that uses them."""
    model = TwoConsumers()
    plain, pipe = copy.deepcopy(model), pipeline(model, half_square)
    first = nn.Linear(4, 4)
    twin, target = copy.deepcopy(first), torch.randn(6, 4)
    hidden = first(X)
    pipe(hidden, hidden * 2, target)
    hidden = twin(X)
    half_square(plain(hidden, hidden * 2), target).backward()
    assert_same(first.weight.grad, twin.weight.grad, "gradient through the inputs")


class Keywords(Base):
    def forward(self, x, **more):
        x = self.a(x)
        pipe_split()
        return self.b(x) * more["scale"]


def test_keyword_inputs_with_a_loss():
    """The target came after ``**more`` in the generated signature."""
    model, target = Keywords(), torch.randn(6, 4)
    assert_same(
        pipeline(model, half_square)(X, target, scale=2.0), half_square(model(X, scale=2.0), target).detach(), "loss"
    )


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
    """It was taken for a parameter to replicate, though the model does not list it."""
    model = PlainTensorWithGradient()
    pipe = pipeline(model, half_square, multi_use_param_spec=REPLICATE)
    pipe(X, X)
    mine, model.scale.grad = model.scale.grad, None
    half_square(model(X), X).backward()
    assert_same(mine, model.scale.grad, "gradient")


class Names(nn.Module):
    """Children and inputs with the names that the Pipe itself uses."""

    def __init__(self):
        super().__init__()
        self.graph, self.code, self.submod_0, self._loss, self.target = (nn.Linear(4, 4) for _ in range(5))
        self.graph_ = nn.Linear(4, 4)

    def forward(self, submod_1, _loss, target):
        x = self.graph(submod_1) + self._loss(_loss)
        pipe_split()
        return self.code(self.submod_0(x)) + self.target(target) + self.graph_(x)


def test_names_that_the_pipe_uses_itself():
    """They clashed with those of calls, of graph modules and of the loss."""
    model = Names()
    pipe = check(model, X, X * 2, X * 3)
    assert pipe.get_grad("_loss.weight") is not None
    assert {pipe.remap_qualname(place) for name in model.state_dict() for place in pipe.stage_qualnames(name)} == {
        *model.state_dict()
    }
    assert_same(pipe(X, target_1=X, _loss=X, target=X), pipe(X, X, X, X), "by name")


class Numbered(Base):
    def forward(self, x, n_1, n):
        x = self.a(x) * n_1
        pipe_split()
        return self.b(x) * n


def test_a_concrete_argument_beside_one_that_is_named_like_its_placeholder():
    """fx names a specialized argument `n_1`, which was taken for the other."""
    model = Numbered()
    assert_same(pipeline(model, concrete_args={"n": 2})(X, 3.0), model(X, 3.0, 2), "outputs")
    with pytest.raises(TracingError, match=r"no argument of that name; did you mean 'n_1'"):
        pipeline(model, concrete_args={"n_11": 2})


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


class Numpy(Base):
    def forward(self, x):
        numpy = pytest.importorskip("numpy")
        x = self.a(x) * numpy.sqrt(2.0)
        pipe_split()
        return self.b(x) * numpy.float32(0.5)


def test_numbers_of_numpys():
    """Generated code cannot write them."""
    check(Numpy(), X)


def test_inside_inference_mode():
    """Copies made there could not be trained."""
    model = Tied()
    with torch.inference_mode():
        pipe = pipeline(model, half_square, multi_use_param_spec=REPLICATE)
    pipe(X, X)
    assert pipe.get_grad("a.weight") is not None


@pytest.mark.parametrize("result", [None, 1.0, (torch.ones(1), 2)])
def test_a_loss_that_is_no_tensor(result):
    """It failed somewhere inside, with somebody else's error."""
    with pytest.raises(StageError, match="it must be a single number"):
        pipeline(TwoLayers(), lambda output, target: result)(X, X)


def test_unused_parameters_are_converted_too():
    """`pipe.float()` left behind what no stage uses."""
    model = TwoLayers()
    model.extra = nn.Linear(2, 2)
    pipe = pipeline(model)
    pipe.float()
    assert {tensor.dtype for tensor in pipe.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize(
    "call",
    [
        lambda model: annotate_split_points(model, ["a"]),  # type: ignore[arg-type]
        lambda model: pipeline(model, tracer=3),  # type: ignore[arg-type]
        lambda model: pipeline(model, concrete_args=[1]),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_a_wrong_kind(call):
    """They came back as an AttributeError from inside."""
    with pytest.raises(PippyError):
        call(TwoLayers())


def test_children_that_begin_in_place():
    """A child of a Sequential changed the leaf that it was given."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), nn.ReLU(inplace=True))
    plain, target = copy.deepcopy(model), torch.randn(6, 4)
    pipe = Pipe.from_sequential(model, half_square)
    loss = half_square(plain(X), target)
    loss.backward()
    assert_same(pipe(X, target), loss.detach(), "loss")
    assert_same_gradients(pipe, plain)


class Output(collections.OrderedDict):
    """A model's output as libraries make it: a dict whose keys are attributes too."""

    def __getattr__(self, name):
        return self[name]


@dataclasses.dataclass
class Fields(collections.OrderedDict):
    loss: Any = None
    logits: Any = None

    def __post_init__(self):
        self.update({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})


@pytest.mark.parametrize("make", [Output, Fields, lambda **items: collections.OrderedDict(items)])
def test_outputs_of_a_class_of_their_own(make):
    """They came back as plain dicts."""

    class Model(Base):
        def forward(self, x):
            x = self.a(x)
            pipe_split()
            logits = self.b(x)
            return make(loss=(logits**2).mean(), logits=logits)

    model = Model()
    plain, pipe = copy.deepcopy(model), pipeline(model)
    expected, found = plain(X), pipe(X)
    assert type(found) is type(expected)
    assert_same(found["loss"], expected["loss"].detach(), "loss")
    assert_same(found["logits"], expected["logits"].detach(), "logits")
    expected["loss"].backward()
    assert_same_gradients(pipe, plain)


class Point(collections.namedtuple("Point", ["loss", "y"])):
    pass


@pytest.mark.parametrize("spec", ["loss", 0, (True, False), -2])
def test_a_loss_inside_a_named_tuple(spec):
    """Its fields could not be named."""

    class Model(Base):
        def forward(self, x):
            x = self.a(x)
            pipe_split()
            return Point((self.b(x) ** 2).mean(), x)

    model = Model()
    plain, pipe = copy.deepcopy(model), pipeline(model, output_loss_value_spec=spec)
    expected = plain(X)
    expected.loss.backward()
    assert_same(pipe(X).loss, expected.loss.detach(), "loss")
    assert_same_gradients(pipe, plain)


class TakesWeights(LossWrapper):
    def forward(self, x, targets, weight=2.0):
        return self.loss_fn(self.module(x), targets) * weight


def test_a_loss_wrapper_with_further_inputs():
    model = TakesWeights(TwoLayers(), nn.MSELoss())
    plain, target = copy.deepcopy(model), torch.randn(6, 4)
    pipe = pipeline(model)
    loss = plain(X, target, weight=3.0)
    loss.backward()
    assert_same(pipe(X, target, weight=3.0), loss.detach(), "loss")
    assert_same_gradients(pipe, plain)


def test_a_block_that_is_scripted():
    """A scripted module could not be asked what tracing asks."""
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)), nn.ReLU())
    annotate_split_points(model, {"0": SplitPoint.END})
    assert_same(pipeline(model)(X), model(X), "outputs")


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


class MakesParameter(Base):
    def forward(self, x):
        self.a.weight = nn.Parameter(self.a.weight * 2)
        x = self.a(x)
        pipe_split()
        return self.b(x)


class NeedsFloat(Base):
    def forward(self, x):
        x = self.a(x)
        pipe_split()
        return self.b(x) * float(x.sum())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (MakesParameter, "makes an nn.Parameter"),
        (NeedsFloat, "float() of one is unknown"),
    ],
)
def test_refusals_that_were_cryptic(model, words):
    with pytest.raises(TracingError) as caught:
        pipeline(model())
    assert words in str(caught.value)


def test_a_wrapper_without_a_forward_says_so_and_nothing_else():
    with pytest.raises(TracingError) as caught:
        pipeline(LossWrapper(TwoLayers(), nn.MSELoss()))
    assert "no forward of its own" in str(caught.value)
    assert "concrete_args" not in str(caught.value)


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
    assert {parameter.grad.dtype for copies in pipe.replicas() for parameter in copies} == {torch.float32}


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
    with pytest.raises(ModeError, match=r"'scale' of the Pipe was replaced"):
        torch.func.functional_call(pipe, {"scale": torch.zeros(4)}, (X,))
    pipe(X)


class Specialized(Base):
    def forward(self, x, mask=None, scale=None):
        x = self.a(x) if mask is None else self.a(x) * mask
        pipe_split()
        return self.b(x) if scale is None else self.b(x) * scale


def test_concrete_arguments_keep_their_place():
    """A value given for one went to the next argument without a word."""
    model = Specialized()
    pipe = pipeline(model, concrete_args={"mask": None})
    assert_same(pipe(X, None, X), model(X, None, X), "by position")
    assert_same(pipe(X, scale=X), model(X, scale=X), "by name")
    with pytest.raises(InputError, match=r"'mask' is float64.6, 4., but the model was traced with mask=None"):
        pipe(X, X)


class AsksForSize(Base):
    def forward(self, x):
        x = self.a(x)
        if isinstance(x.size(0), int):
            x = x * 3
        pipe_split()
        return self.b(x)


def test_an_answer_about_a_type_that_is_not_so_when_it_runs():
    """A number was taken for a tensor, and the wrong branch recorded."""
    with pytest.raises(StageError, match=r"forward asked for the type of a value(.|\n)*isinstance\(x.size\(0\), int\)"):
        pipeline(AsksForSize())(X)


class TakesSizes(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(4, 4).tril())

    def forward(self, x):
        x = self.a(x) + torch.zeros(x.size(0), 4) + torch.ones(x.shape[0], 1) * torch.finfo(x.dtype).eps
        pipe_split()
        rows = sum(x @ self.mask[i] for i in range(self.mask.size(0))) if self.mask.shape[0] == 4 else 0
        return self.b(x) + torch.rand(x.size(0), 4) + rows.unsqueeze(1)


def test_sizes_one_by_one_and_shapes_of_the_models_own_tensors():
    """The parser of torch.zeros refused a traced size before it was recorded; a buffer's size was called unknown."""
    check(TakesSizes(), X)


class Arrays(Base):
    def forward(self, x):
        numpy = pytest.importorskip("numpy")
        x = self.a(x) * torch.from_numpy(numpy.arange(4.0))
        pipe_split()
        return self.b(x) + torch.tensor(numpy.ones(1)) * torch.as_tensor(numpy.full((2, 4), 3.0))[0]


def test_arrays_are_constants():
    """Every array was taken for a single number."""
    check(Arrays(), X)


def test_hooks_put_on_a_replicated_parameter_afterwards():
    model = Tied()
    pipe = pipeline(model, half_square, multi_use_param_spec=REPLICATE)
    model.a.weight.register_hook(lambda gradient: gradient * 0.5)
    with pytest.raises(SharedParameterError, match="has got gradient hooks"):
        pipe(X, X)


@pytest.mark.parametrize(
    "call",
    [
        lambda pipe: pipe.load_state_dict(3),
        lambda pipe: pipe.stage(7),
        lambda pipe: pipe.stage("foo"),
        lambda pipe: pipe.remap_qualname(3),
        lambda pipe: pipeline(pipe),
    ],
)
def test_mistakes_get_errors_of_the_librarys_own(call):
    with pytest.raises(PippyError):
        call(pipeline(TwoLayers()))
