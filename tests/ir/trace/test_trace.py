"""What tracing must record, what it must leave alone, and how it refuses what it cannot follow."""

import copy

import pytest
import torch
from torch import fx, nn

from pippy import PipeTracer, PippyWarning, pipe_split, pipeline
from pippy.ir.base.errors import InputError, ModeError, PippyError, TracingError
from tests.ir.linear import OneLinear


class Cut(OneLinear):
    """Two stages around `second`; the tests override one of them."""

    def first(self, x):
        return self.lin(x)

    def second(self, x):
        return torch.relu(x)

    def forward(self, x):
        x = self.first(x)
        pipe_split()
        return self.second(x)


def two_stages(second):
    """A class of models whose second stage is ``second(self, x)``."""
    return type("TwoStages", (Cut,), {"second": second})


def refusal(model, error=TracingError, **options) -> str:
    before = copy.deepcopy(model.__dict__) if isinstance(model, nn.Module) else None
    with pytest.raises(error) as caught:
        pipeline(model, **options)
    assert isinstance(caught.value, PippyError)
    if before is not None:
        assert before.keys() == model.__dict__.keys()
    return str(caught.value)


class OnValues(Cut):
    def second(self, x):
        if x.sum() > 0:
            return x
        return -x


class MarkInBranch(Cut):
    def second(self, x):
        if x.mean() > 0:
            pipe_split()
        return -x


OverRows = two_stages(lambda self, x: sum(row for row in x))
LengthOf = two_stages(lambda self, x: x * len(x))
RangeOf = two_stages(lambda self, x: sum(x[i] for i in range(x.size(0))))
IntOf = two_stages(lambda self, x: x * int(x.size(0)))
Raises = two_stages(lambda self, x: x @ undefined_name)  # type: ignore[name-defined]  # noqa: F821


class Autocasts(Cut):
    def second(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.lin(x)


@pytest.mark.parametrize(
    ("model", "line", "why"),
    [
        (OnValues, "if x.sum() > 0:", "cannot be followed"),
        (MarkInBranch, "if x.mean() > 0:", "cannot be followed"),
        (OverRows, "sum(row for row in x)", "a loop over a tensor"),
        (LengthOf, "x * len(x)", "use x.size(0)"),
        (RangeOf, "sum(x[i] for i in range(x.size(0)))", "range()"),
        (IntOf, "x * int(x.size(0))", "int()"),
        (Raises, "x @ undefined_name", "NameError"),
    ],
)
def test_what_cannot_be_traced_is_refused_with_the_line_and_a_remedy(model, line, why):
    message = refusal(model())
    assert line in message
    assert why in message
    assert f"{__file__}:" in message
    assert "What to do:" in message


def test_autocast_in_forward_is_refused():
    assert "torch.autocast" in refusal(Autocasts())


@pytest.mark.parametrize("model", [torch.relu, "model", None, [nn.Linear(1, 1)]])
def test_what_is_no_module_is_refused(model):
    assert "not an nn.Module" in refusal(model)


@pytest.mark.parametrize("example", [None, (torch.ones(2, 4),)])
def test_a_forward_set_on_the_instance_is_what_is_traced(example):
    model = Cut()
    own = model.forward
    model.forward = lambda x: own(x) + 1
    x = torch.randn(3, 4)
    assert torch.equal(pipeline(model, example_args=example)(x), model(x))


def test_a_tracer_must_be_a_tracer():
    assert "must be a torch.fx.Tracer" in refusal(Cut(), tracer=lambda: 3)


class Nothing(nn.Module):
    def forward(self, x):
        return x


def test_a_model_without_operations_is_refused():
    assert "computes nothing" in refusal(Nothing(), PippyError)


class Sets(Cut):
    def second(self, x):
        self.last_seen = x
        self.calls = getattr(self, "calls", 0) + 1
        return x + torch.ones(4) * torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_the_model_is_left_as_it_was_and_what_forward_sets_is_said():
    model = Sets()
    before = dict(model.__dict__)
    with pytest.warns(PippyWarning, match=r"forward\(\) sets last_seen, calls on the model"):
        pipe = pipeline(model)
    assert model.__dict__ == before
    x = torch.randn(2, 4)
    assert torch.equal(pipe(x), model(x))


Draws = two_stages(lambda self, x: x + torch.rand(4) + torch.normal(0.0, 1.0, (4,)) * torch.randint(3, (4,)))


def test_random_tensors_are_drawn_when_the_pipe_runs():
    model, x = Draws(), torch.randn(2, 4)
    pipe = pipeline(model)
    torch.manual_seed(3)
    expected = [model(x), model(x)]
    torch.manual_seed(3)
    assert torch.equal(pipe(x), expected[0])
    assert torch.equal(pipe(x), expected[1])
    assert not torch.equal(expected[0], expected[1])


class TwoScales(Cut):
    """A forward with an argument that it branches on."""

    def forward(self, x, double=False, *, shift=None):
        x = self.lin(x)
        pipe_split()
        if double:
            x = x * 2
        return x if shift is None else x + shift


def test_concrete_arguments_specialize_the_graph():
    model, x = TwoScales(), torch.randn(2, 4)
    pipe = pipeline(model, concrete_args={"double": True, "shift": None})
    assert torch.equal(pipe(x), model(x, True))
    assert torch.equal(pipe(x, double=True), model(x, True))
    assert [node.name for node in pipe.split_gm.graph.find_nodes(op="placeholder")] == ["x"]
    with pytest.raises(InputError, match="traced with double=True"):
        pipe(x, double=False)


def test_concrete_arguments_must_be_plain_values():
    assert "must be None, a bool" in refusal(TwoScales(), concrete_args={"double": torch.ones(1)})


class WholeBlocks(PipeTracer):
    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, OnValues) or super().is_leaf_module(m, module_qualified_name)


class AroundALeaf(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.lin = OnValues(), nn.Linear(4, 4)

    def forward(self, x):
        x = self.lin(x)
        pipe_split()
        return self.inner(x)


@pytest.mark.parametrize("tracer", [WholeBlocks, WholeBlocks()])
def test_a_tracer_can_keep_a_module_whole(tracer):
    model, x = AroundALeaf(), torch.randn(2, 4)
    pipe = pipeline(model, tracer=tracer)
    with pytest.warns(PippyWarning, match="submod_1 calls pipe_split.. inside a module that tracing did not look into"):
        assert torch.equal(pipe(x), model(x))
    assert pipe.stage_qualnames("inner.lin.weight") == ("submod_1.inner.lin.weight",)


class Counts(Cut):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.count: torch.Tensor

    def second(self, x):
        self.count.add_(1)
        return x * self.count


class ProxiedBuffers(fx.Tracer):
    proxy_buffer_attributes = True


class PlusEquals(Counts):
    def second(self, x):
        self.count += 1
        return x * self.count


@pytest.mark.parametrize("tracer", [fx.Tracer, ProxiedBuffers, PipeTracer])
def test_any_tracer_records_what_changes_a_buffer(tracer):
    model, x = Counts(), torch.randn(2, 4)
    plain, pipe = copy.deepcopy(model), pipeline(model, tracer=tracer)
    assert model.count == 0
    for _ in range(2):
        assert torch.equal(pipe(x), plain(x))
    assert model.count == plain.count == 2


def test_an_in_place_operator_on_a_buffer_is_recorded():
    model, x = PlusEquals(), torch.randn(2, 4)
    plain, pipe = copy.deepcopy(model), pipeline(model)
    for _ in range(2):
        assert torch.equal(pipe(x), plain(x))
    assert model.count == plain.count == 2


TRACKER, INFINITE = torch.zeros((), dtype=torch.int32), torch.ones(())


class Behind(Counts):
    def second(self, x):
        torch._amp_update_scale_(self._buffers["count"], TRACKER, INFINITE, 2.0, 0.5, 1)
        return x


def test_a_buffer_changed_behind_the_tracer_is_refused():
    assert "cannot be recorded" in refusal(Behind())


def test_nothing_of_a_tracing_is_left_behind():
    before = torch.arange, torch.rand, torch.autograd.Function.__dict__["apply"], vars(nn.Module).get("training")
    pipeline(Draws())
    with pytest.raises(TracingError):
        pipeline(OnValues())
    assert (
        torch.arange,
        torch.rand,
        torch.autograd.Function.__dict__["apply"],
        vars(nn.Module).get("training"),
    ) == before


def test_tracing_happens_with_gradients_on_wherever_it_is_called():
    model, x = Cut(), torch.randn(2, 4)
    with torch.no_grad():
        pipe = pipeline(model)
    assert pipe(x).requires_grad


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.lin = nn.ModuleList([DroppingBlock() for _ in range(2)]), nn.Linear(4, 4)

    def forward(self, x):
        x = self.inner[0](x)
        pipe_split()
        return torch.dropout(self.lin(self.inner[1](x)), 0.4 if self.training else 0.0, self.training)


class DroppingBlock(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x + 1, 0.5, self.training)


@pytest.mark.parametrize("start", [True, False])
def test_a_pipe_follows_train_and_eval(start):
    model, x = Dropping().train(start), torch.randn(50, 4)
    plain, pipe = copy.deepcopy(model), pipeline(model)
    for mode in (True, False, True):
        torch.manual_seed(0)
        expected = plain.train(mode)(x)
        torch.manual_seed(0)
        assert torch.equal(pipe.train(mode)(x), expected)


def test_each_module_has_a_training_flag_of_its_own():
    model, x = Dropping(), torch.randn(50, 4)
    model.inner[0].eval()
    plain, pipe = copy.deepcopy(model), pipeline(model)
    torch.manual_seed(0)
    expected = plain(x)
    torch.manual_seed(0)
    assert torch.equal(pipe(x), expected)


class Auxiliary(Cut):
    def second(self, x):
        if self.training:
            return torch.relu(x), torch.sin(x)
        return torch.relu(x)


def test_a_model_whose_structure_depends_on_the_mode_keeps_to_the_mode_that_it_was_traced_in():
    model, x = Auxiliary(), torch.randn(2, 4)
    pipe = pipeline(model)
    assert len(pipe(x)) == 2
    with pytest.raises(ModeError, match=r"not traced in eval mode(.|\n)*torch.sin\(x\)(.|\n)*another Pipe"):
        pipe.eval()(x)
    assert torch.equal(pipeline(model.eval())(x), model(x))


TrainsOnly = two_stages(lambda self, x: torch.relu(x) if self.training else OnValues.second(self, x))


def test_a_model_that_can_be_traced_in_one_mode_only_is_bound_to_it():
    pipe = pipeline(TrainsOnly())
    with pytest.raises(ModeError, match="control flow"):
        pipe.eval()(torch.randn(2, 4))


class ReadsOthersFlags(Cut):
    """The constants of the second stage depend on the flags of children."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def second(self, x):
        x = self.two(self.one(x) * (2.0 if self.one.training else 3.0))
        x = x * (5.0 if self.two.training else 7.0) + (0.5 if self.one.training and self.two.training else 0.25)
        return x + (1.0 if self.one.training else 2.0 if self.two.training else 3.0)


@pytest.mark.parametrize("evaluated", [(), ("one",), ("two",), ("one", "two"), ("",), ("lin",)])
def test_constants_depend_on_the_flags_that_forward_read(evaluated):
    model, x = ReadsOthersFlags(), torch.randn(2, 4)
    for name in evaluated:
        model.get_submodule(name).eval()
    plain, pipe = copy.deepcopy(model), pipeline(model)
    assert torch.equal(pipe(x), plain(x))
    for mode in (False, True, False):
        assert torch.equal(pipe.train(mode)(x), plain.train(mode)(x))


class KeepsOneFrozen(ReadsOthersFlags):
    def train(self, mode=True):
        super().train(mode)
        self.one.eval()
        return self


def test_a_flag_that_train_keeps_and_forward_reads():
    model, x = KeepsOneFrozen(), torch.randn(2, 4)
    plain, pipe = copy.deepcopy(model), pipeline(model)
    assert torch.equal(pipe(x), plain(x))
    for mode in (False, True, False):
        assert torch.equal(pipe.train(mode)(x), plain.train(mode)(x))


class OneModeBranches(ReadsOthersFlags):
    def second(self, x):
        x = torch.sin(x) if self.one.training and self.two.training else x
        return x * (2.0 if self.two.training else 3.0)


def test_of_two_other_modes_the_one_that_differs_in_constants_is_followed():
    model, x = OneModeBranches(), torch.randn(2, 4)
    model.one.eval()
    plain, pipe = copy.deepcopy(model), pipeline(model)
    assert torch.equal(pipe(x), plain(x))
    assert torch.equal(pipe.eval()(x), plain.eval()(x))
    with pytest.raises(ModeError, match=r"not traced in train mode(.|\n)*pipe.eval"):
        pipe.train()(x)


ConstantTensorByMode = two_stages(lambda self, x: x * torch.tensor(0.5 if self.training else 0.25))


def test_a_constant_tensor_that_depends_on_the_mode():
    model, x = ConstantTensorByMode(), torch.randn(2, 4)
    pipe = pipeline(model)
    assert torch.equal(pipe(x), model(x))
    with pytest.raises(ModeError, match=r"x . torch.tensor\(0.5 if self.training"):
        pipe.eval()(x)


class ScaledByMask(Cut):
    def forward(self, x, mask=None):
        x = self.lin(x)
        pipe_split()
        return x * (1.0 if mask is None else 2.0)


class TensorByMask(ScaledByMask):
    def forward(self, x, mask=None):
        x = self.lin(x)
        pipe_split()
        return x * torch.tensor(1.0 if mask is None else 2.0)


class MaskWithoutDefault(ScaledByMask):
    def forward(self, x, mask):
        x = self.lin(x)
        pipe_split()
        return x * (1.0 if mask is None else 2.0)


@pytest.mark.parametrize("model", [ScaledByMask, TensorByMask, MaskWithoutDefault])
def test_an_input_that_changes_a_constant_by_being_none(model):
    model, x = model(), torch.randn(2, 4)
    pipe = pipeline(model)
    assert torch.equal(pipe(x, x), model(x, x))
    with pytest.raises(InputError, match=r"'mask' is None(.|\n)*concrete_args={'mask': None}"):
        pipe(x, None)
    assert torch.equal(pipeline(model, concrete_args={"mask": None})(x, None), model(x, None))


class HandsOnItsMask(Cut):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1)

    def forward(self, x, mask):
        x = self.lin(x)
        pipe_split()
        return self.attention(x, x, x, attn_mask=mask)[0]


def test_a_none_that_is_only_handed_on():
    model, x = HandsOnItsMask(), torch.randn(2, 4)
    assert torch.equal(pipeline(model)(x, None), model(x, None))


def test_two_models_can_be_traced_one_inside_the_tests_of_another():
    model, x = Cut(), torch.randn(2, 4)
    one, two = pipeline(model), pipeline(model)
    assert torch.equal(one(x), two(x))


def test_deep_copy_module_leaves_the_model_alone():
    model, x = Cut(), torch.randn(2, 4)
    pipe = pipeline(model, nn.MSELoss(), deep_copy_module=True)
    pipe(x, torch.randn(2, 4))
    assert model.lin.weight.grad is None
    assert pipe.get_grad("lin.weight") is not None
    assert pipeline(model).stage(0).lin.weight is model.lin.weight
