"""What tracing lost or misunderstood. Each test opens with the story of what went wrong."""

import copy
import random
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from numpy.random import rand as numpy_rand
from torch import fx, nn
from torch import randn as aliased_randn

from pippy import (
    PippyWarning,
    SplitPoint,
    annotate_split_points,
    pipe_split,
    pipeline,
)
from pippy.ir.base.errors import (
    ModeError,
    SharedParameterError,
    StageError,
    TracingError,
)
from tests.comparisons import assert_same, assert_same_state
from tests.regressions.common import Base, TwoLayers, X, check, half_square, second
from tests.zoo import AsksForTypes

rng_of_the_file = numpy.random.default_rng(0)
rngs_of_the_file: dict[str, Any] = {"a": 1, "b": [numpy.random.default_rng(0)]}

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


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
    check(Checkpointed(), torch.randn(6, 4))


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


DrawsInPython = second(lambda self, x: self.b(x) if random.random() < 2 else x)


class DrawsOfItsOwn(Base):
    def __init__(self):
        super().__init__()
        self.rng = [random.Random(3)]

    def forward(self, x):
        x = self.a(x)
        pipe_split()
        return self.b(x) * self.rng[0].gauss(0, 1)


DrawsInNumpy = second(lambda self, x: self.b(x) * numpy.random.normal())
DrawsByImportedName = second(lambda self, x: self.b(x) * numpy_rand())


class DrawsFromGenerator(Base):
    def __init__(self):
        super().__init__()
        self.rng = numpy.random.default_rng(0)

    def forward(self, x):
        x = self.a(x)
        pipe_split()
        return self.b(x) * self.rng.normal()


class Noise:
    """An object with slots, which holds a generator in a dict of lists, and a method of another."""

    __slots__ = ("draw", "held")

    def __init__(self):
        self.held, self.draw = {"noise": [numpy.random.RandomState(0)]}, numpy.random.default_rng(0).normal


class Holder:
    def __init__(self):
        self.noise = (Noise(), self)


class DrawsFromNested(Base):
    def __init__(self):
        super().__init__()
        self.holder = Holder()

    def forward(self, x):
        x = self.a(x)
        pipe_split()
        return self.b(x) * self.holder.noise[0].held["noise"][0].normal()


class DrawsByItsMethod(DrawsFromNested):
    def forward(self, x):
        x = self.a(x)
        pipe_split()
        return self.b(x) * self.holder.noise[0].draw()


class DrawsOfItsOwnInAList(DrawsFromNested):
    def __init__(self):
        super().__init__()
        self.all = {"mine": [random.Random(0)]}

    def forward(self, x):
        x = self.a(x)
        pipe_split()
        return self.b(x) * self.all["mine"][0].choice([1.0, 2.0])


DrawsFromGlobalList = second(lambda self, x: self.b(x) * rngs_of_the_file["b"][0].normal())
DrawsFromGlobalGenerator = second(lambda self, x: self.b(x) * rng_of_the_file.normal())
SeedsAGenerator = second(lambda self, x: self.b(x) * numpy.random.default_rng().normal())


class Seeds(Base):
    def forward(self, x):
        torch.manual_seed(3)
        x = self.a(x)
        pipe_split()
        return self.b(x)


@pytest.mark.parametrize(
    ("model", "where"),
    [
        (DrawsInPython, "Python's random(.|\n)*: self.b.x. if random.random"),
        (DrawsOfItsOwn, "Python's random(.|\n)*return self.b.x. . self.rng.0..gauss"),
        (DrawsInNumpy, "numpy's(.|\n)*: self.b.x. . numpy.random.normal"),
        (DrawsByImportedName, "numpy's(.|\n)*: self.b.x. . numpy_rand"),
        (DrawsFromGenerator, "numpy's"),
        (DrawsFromGlobalGenerator, "numpy's"),
        (DrawsFromNested, "numpy's"),
        (DrawsByItsMethod, "numpy's"),
        (DrawsOfItsOwnInAList, "Python's random(.|\n)*choice"),
        (DrawsFromGlobalList, "numpy's"),
        (SeedsAGenerator, "the system's(.|\n)*default_rng"),
        (Seeds, "torch(.|\n)*torch.manual_seed.3."),
    ],
)
def test_random_numbers_that_would_be_frozen(model, where):
    """What Python's random, and then numpy's and those of one's own, said while tracing was said for ever after."""
    built = model()
    states = random.getstate, torch.get_rng_state, numpy.random.get_state, lambda: rng_of_the_file.bit_generator.state
    before = [repr(state()) for state in states]
    with pytest.raises(TracingError, match=where):
        pipeline(built)
    assert [repr(state()) for state in states] == before


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


def test_hooks_that_no_stage_would_call():
    """Hooks of the model itself, and backward hooks of what is taken apart, were dropped."""
    model = TwoLayers()
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(TracingError, match=r"hooks of its own \(forward_hooks\)"):
        pipeline(model)
    inner = nn.Sequential(TwoLayers(), nn.ReLU())
    inner[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(TracingError, match=r"'0' has backward hooks.*a mark inside"):
        pipeline(inner)


def test_hooks_of_leaves_are_called():
    model, seen = TwoLayers(), []
    model.a.register_forward_hook(lambda *_: seen.append("forward"))
    model.b.register_full_backward_hook(lambda *_: seen.append("backward"))
    pipeline(model, half_square)(X, X)
    assert seen == ["forward", "backward"]


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


class Numpy(Base):
    def forward(self, x):
        numpy = pytest.importorskip("numpy")
        x = self.a(x) * numpy.sqrt(2.0)
        pipe_split()
        return self.b(x) * numpy.float32(0.5)


def test_numbers_of_numpys():
    """Generated code cannot write them."""
    check(Numpy(), X)


def test_a_block_that_is_scripted():
    """A scripted module could not be asked what tracing asks."""
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)), nn.ReLU())
    annotate_split_points(model, {"0": SplitPoint.END})
    assert_same(pipeline(model)(X), model(X), "outputs")


class MakesParameter(Base):
    def forward(self, x):
        self.a.weight = nn.Parameter(self.a.weight * 2)
        x = self.a(x)
        pipe_split()
        return self.b(x)


NeedsFloat = second(lambda self, x: self.b(x) * float(x.sum()))


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


class ChangesTensorsInContainers(Base):
    def __init__(self):
        super().__init__()
        self.seen, self.named = [torch.zeros(4)], {"a": torch.ones(4), "b": torch.ones(4)}

    def forward(self, x):
        x = self.a(x)
        self.seen[0] += 1
        self.seen[0].mul_(2)
        pipe_split()
        self.named["a"][0] = 3.0
        self.named["b"][1].add_(1)
        return self.b(x) * self.named["a"] + self.named["b"] + 1 - (1 - self.named["b"])


class UsesTensorInAList(Base):
    def __init__(self):
        super().__init__()
        self.seen = [torch.zeros(4)]

    def forward(self, x):
        x = self.a(x)
        pipe_split()
        self.seen[0] += 1
        fresh = torch.tensor([1.0, 2.0, 3.0, 4.0])
        fresh += 1
        return self.b(x) * self.seen[0] + (1 - self.seen[0]) + fresh


@pytest.mark.parametrize("model", [ChangesTensorsInContainers, UsesTensorInAList])
def test_tensors_in_lists_and_dicts_that_change_in_place(model):
    """They were taken for constants that forward had written: each call began with the same numbers. Some operations on them
    ran while tracing, and changed the model."""
    built = model()
    before = copy.deepcopy(built.__dict__.get("named"))
    pipeline(built)
    assert str(built.__dict__.get("named")) == str(before)
    check(model(), X, steps=3)


class ChangesViews(Base):
    """Of constants: all of one, parts of one that is not used as a whole, and a transposed one that is cut off at once."""

    def __init__(self):
        super().__init__()
        self.seen = [torch.zeros(2, 4)]

    def forward(self, x):
        fresh = torch.tensor([0.0, 1.0, 2.0, 3.0])
        fresh[0].add_(x.sum())
        pair = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        first, column = pair[0], pair.T[0]
        column *= 2
        x = self.a(x) * fresh + first.sum()
        nn.init.ones_(self.seen[0][1, :2])
        self.seen[0][0] += 1
        pipe_split()
        last = torch.tensor([[9.0] * 4, [6.0] * 4])[1:]
        last[0, 0] = 5.0
        return self.b(x) * self.seen[0][0] + self.seen[0].sum() + last


def test_constants_that_change_through_their_views():
    """Each view was a constant of its own, so nobody else saw that it changed."""
    check(ChangesViews(), X, steps=3)


class SharesBuffers(Base):
    def __init__(self, cut_apart):
        super().__init__()
        self.cut_apart = cut_apart
        self.register_buffer("whole", torch.zeros(4))
        self.register_buffer("part", self.whole[:2])

    def forward(self, x):
        x = self.a(x) + (self.whole if self.cut_apart else 0)
        pipe_split()
        self.part.add_(1)
        return self.b(x) + self.whole


class TakesViews(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("whole", torch.zeros(4))

    def forward(self, x):
        x = self.a(x)
        pipe_split()
        self.whole[:2].add_(1)
        return self.b(x) + self.whole


def test_buffers_that_share_memory():
    """Two stages had a copy each of what a buffer and its view share, and did not see each other's changes."""
    words = r"part, whole share memory(.|\n)*self.part.add_\(1\)(.|\n)*take the others as views"
    with pytest.raises(SharedParameterError, match=words):
        pipeline(SharesBuffers(cut_apart=True))
    check(SharesBuffers(cut_apart=False), X)
    check(TakesViews(), X)


class WritesConstants(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4))
        self.plain = torch.ones(4)

    def forward(self, x):
        x = self.a(x)
        pipe_split()
        return self.b(x) * self.scale * torch.tensor([1.1, 2.2, 3.3, 4.4]) + self.plain


def test_constants_keep_their_dtype_when_a_pipe_is_converted():
    """`pipe.bfloat16()` converted what `torch.tensor(...)` in forward makes anew in each call of the model."""
    model, x = WritesConstants(), X.bfloat16()
    pipe, plain = pipeline(copy.deepcopy(model)).bfloat16(), model.bfloat16()
    assert pipe(x).dtype == plain(x).dtype == torch.float64
    assert_same(pipe(x), plain(x), "outputs")


class AddsInPlace(Base):
    def forward(self, x):
        x = self.a(x)
        same = x
        same += 1
        pipe_split()
        return self.b(x)


class OwnProxy(fx.Proxy):
    pass


class OwnTracer(fx.Tracer):
    def proxy(self, node):
        return OwnProxy(node, self)


@pytest.mark.parametrize("tracer", [fx.Tracer, OwnTracer])
def test_in_place_operators_under_another_tracer(tracer):
    """`x += 1` became `x = x + 1`, which leaves the other names of the tensor as they were."""
    check(AddsInPlace(), X, tracer=tracer)
