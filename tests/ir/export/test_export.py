"""Models traced by `torch.export`: they compute what plain PyTorch computes, and what they cannot is refused."""

import copy
import cProfile
import pickle
import random
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pippy import PippyWarning, SplitPoint, annotate_split_points, is_recomputing, pipe_split, pipeline
from pippy.ir.base.errors import InputError, MarkError, ModeError, TracingError
from pippy.ir.base.trees import map_tensors, tensors
from pippy.ir.trace.tracer import PipeTracer
from tests.comparisons import assert_same, assert_same_gradients, assert_same_state, run_plain
from tests.ir.export.models import Classifier, Language, Normed

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


def ids(rows=4, length=5):
    return torch.randint(10, (rows, length))


CASES = {
    "language": (Language, lambda: ({"ids": ids()},), None),
    "normed": (Normed, lambda: (torch.randn(4, 4),), nn.MSELoss()),
    "classifier": (Classifier, lambda: (torch.randn(4, 3, 4), torch.tensor([0, 1, 2, 0])), None),
}


@pytest.mark.parametrize(
    "case, training", [("language", True), ("normed", True), ("normed", False), ("classifier", True)]
)
def test_two_steps_are_those_of_the_plain_model(case, training):
    make, inputs, loss_fn = CASES[case]
    model, inputs = make().train(training), inputs()
    plain, target = copy.deepcopy(model), torch.randn(4, 1) if loss_fn else None
    example = (*inputs, target) if loss_fn else inputs
    spec = None if loss_fn else "loss"
    pipe = pipeline(model, loss_fn, front_end="export", example_args=example, output_loss_value_spec=spec)
    assert pipe.num_stages == 2
    both = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, plain)]
    for seed in range(2):
        expected = run_plain(plain, loss_fn, spec, inputs, target, seed)
        torch.manual_seed(seed)
        result = map_tensors(torch.Tensor.detach, pipe(*example))
        assert type(result) is type(expected)
        assert_same(result, expected, "output")
        assert_same_gradients(pipe, plain)
        assert_same_state(pipe, plain)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("case", ["language", "normed"])
def test_the_pipe_follows_the_mode(case):
    make, inputs, loss_fn = CASES[case]
    model, inputs = make(), inputs()
    target = torch.randn(4, 1) if loss_fn else None
    pipe = pipeline(model, loss_fn, front_end="export", example_args=(*inputs, target) if loss_fn else inputs)
    for mode in (False, True):
        plain = copy.deepcopy(model).train(mode)
        expected = run_plain(plain, loss_fn, None if loss_fn else "loss", inputs, target, 3)
        torch.manual_seed(3)
        pipe.train(mode)
        assert_same(pipe(*inputs, target) if loss_fn else pipe(*inputs), expected, f"output in mode {mode}")
        assert_same_state(pipe, plain)


def test_a_pipe_is_cut_by_numbers_names_and_annotations():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])

        def forward(self, x):
            return self.blocks(x) if x.shape[0] > 0 else x

    example = (torch.randn(2, 4),)
    assert pipeline(Net(), front_end="export", example_args=example, num_stages=4).num_stages == 4
    named = pipeline(Net(), front_end="export", example_args=example, split=["blocks.1", "blocks.3"])
    assert [list(stage.blocks._modules) for _, stage in named.stages()] == [["0"], ["1", "2"], ["3"]]
    net = Net()
    annotate_split_points(net, {"blocks.1": SplitPoint.END})
    annotated = pipeline(net, front_end="export", example_args=example)
    assert [list(stage.blocks._modules) for _, stage in annotated.stages()] == [["0", "1"], ["2", "3"]]
    net = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 4), nn.Linear(4, 4))
    annotate_split_points(net, {"0.linear1": SplitPoint.END})
    with pytest.raises(MarkError, match=r"'0\.linear1'"):
        pipeline(net, front_end="export", example_args=example)


def test_calls_that_differ_from_the_example_are_refused():
    pipe = pipeline(Language(), front_end="export", example_args=({"ids": ids()},))
    for rows in (1, 7):
        pipe({"ids": ids(rows, 9)})
    with pytest.raises(InputError, match=r"size\(1\) > 3.*\n.*models.py.*\n.*if x.shape\[1\] > 3:"):
        pipe({"ids": ids(4, 2)})
    with pytest.raises(InputError, match=r"batch\['ids'\] is int32\[4, 5\].*it was int64\[any, any\]"):
        pipe({"ids": ids().int()})
    with pytest.raises(InputError, match=r"batch\['more'\] is 3; .* not there"):
        pipe({"ids": ids(), "more": 3})
    with pytest.raises(InputError, match=r"bonus=True"):
        pipe({"ids": ids()}, bonus=False)
    given = (torch.randn(4, 3, 4), torch.tensor([0, 1, 2, 0]), torch.rand(4))
    pipe = pipeline(Classifier(), front_end="export", example_args=given, output_loss_value_spec="loss")
    with pytest.raises(InputError, match=r"weight is None"):
        pipe(*given[:2])


def test_a_pipe_survives_pickling():
    batch = {"ids": ids()}
    pipe = pipeline(Language(), front_end="export", example_args=(batch,))
    again = pickle.loads(pickle.dumps(pipe))
    assert_same(again(batch)["loss"], pipe(batch)["loss"], "loss")
    with pytest.raises(InputError, match=r"size\(1\) > 3"):
        again({"ids": ids(4, 2)})


def test_the_model_stays_as_it_was():
    model = Classifier()
    model.plan = {"a": ["b", {"c": 1}], "d": {"e"}}
    before, state = dict(model.memory.__dict__), random.getstate()
    example = (torch.randn(4, 3, 4), torch.tensor([0, 1, 2, 0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline(model, front_end="export", example_args=example, output_loss_value_spec="loss")
    assert random.getstate() == state
    assert all(module.training for module in model.modules())
    assert model.plan == {"a": ["b", {"c": 1}], "d": {"e"}}
    assert all(model.memory.__dict__[name] is value for name, value in before.items())
    model(*example)


def test_operations_have_the_users_lines_and_modules():
    pipe = pipeline(Language(), front_end="export", example_args=({"ids": ids()},))
    (cat,) = pipe.split_gm.submod_1.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    assert cat.meta["source"].code.startswith("x = torch.cat([second, first]")
    assert [node.target for node in pipe.split_gm.submod_1.graph.find_nodes(op="call_module")] == ["first", "head"]


class Lossy(nn.Module):
    """Does in its forward what it is given to do."""

    def __init__(self, act):
        super().__init__()
        self.lin, self.act = nn.Linear(4, 4), act

    def forward(self, x):
        y = self.lin(x)
        pipe_split()
        return self.act(self, x, y).sum() + y.sum()


def with_autocast(module, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        return y @ y


def with_a_hook(module, x, y):
    y.register_hook(lambda gradient: gradient * 2)
    return y


def with_saved_tensors(module, x, y):
    with torch.autograd.graph.save_on_cpu():
        return y * y


LOST = {
    "autocast": (with_autocast, "autocast"),
    "hook": (with_a_hook, "registers a hook"),
    "saved tensors": (with_saved_tensors, "hooks for the tensors that autograd saves"),
    "checkpoint": (lambda module, x, y: checkpoint(torch.sin, y, use_reentrant=False), "checkpoint"),
    "reentrant checkpoint": (lambda module, x, y: checkpoint(torch.sin, y, use_reentrant=True), "checkpoint"),
    "gradients": (lambda module, x, y: torch.autograd.grad(y.sum(), module.lin.weight)[0], "computes gradients"),
    "recompute": (lambda module, x, y: y * 2 if is_recomputing() else y, "asks whether it is computed again"),
    "random": (lambda module, x, y: y if random.random() < 0.5 else y * 2, "Python's random"),
    "seed": (lambda module, x, y: y * torch.manual_seed(3).initial_seed(), "torch"),
    "control flow": (lambda module, x, y: y if y.sum() > 0 else y * 2, "cannot trace"),
}


@pytest.mark.parametrize("what", LOST)
def test_what_export_would_lose_is_refused_with_the_line(what):
    act, text = LOST[what]
    with pytest.raises(TracingError, match=text) as caught:
        pipeline(Lossy(act), front_end="export", example_args=(torch.randn(2, 4),))
    assert "test_export.py" in str(caught.value)
    assert any(advice in str(caught.value) for advice in ("is_leaf_module", "torch.rand", "x.to(dtype)"))


class Counts(nn.Module):
    """Counts its calls, by an assignment."""

    def __init__(self, writes):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.writes = writes

    def forward(self, x):
        if self.writes:
            self.count.copy_(self.count + 1)
        else:
            self.count = self.count + 1
        return x * 2


def test_a_buffer_that_an_inner_module_assigns_is_refused_and_the_advice_works():
    """torch.export records assignments to the buffers of the outermost module, and loses all others."""
    x = torch.randn(3, 4)
    model = nn.Sequential(nn.Linear(4, 4), Counts(writes=False))
    with pytest.raises(TracingError, match=r"'1\.count'.*self\.count\.copy_") as caught:
        pipeline(model, nn.MSELoss(), front_end="export", example_args=(x, x))
    assert "self.count = self.count + 1" in str(caught.value)
    with pytest.warns(PippyWarning, match="no mark"):
        pipe = pipeline(model, nn.MSELoss(), example_args=(x, x))  # torch.fx keeps it whole
    pipe(x, x)
    assert list(pipe.kept_whole) == ["1"] and pipe.state_dict()["1.count"] == 1
    model = nn.Sequential(nn.Linear(4, 4), Counts(writes=True))
    with pytest.warns(PippyWarning, match="no mark"):
        pipe = pipeline(model, nn.MSELoss(), front_end="export", example_args=(x, x))
    pipe(x, x)
    assert pipe.state_dict()["1.count"] == 1


@pytest.mark.filterwarnings("ignore:a profiler is on")
def test_random_numbers_are_refused_beside_another_profiler():
    model, called = Lossy(LOST["random"][0]), []
    sys.setprofile(lambda frame, event, arg: called.append(event))
    try:
        with pytest.raises(TracingError, match=r"(?s)Python's random.*test_export.py"):
            pipeline(model, front_end="export", example_args=(torch.randn(2, 4),))
    finally:
        sys.setprofile(None)
    assert "c_call" in called
    with cProfile.Profile(), pytest.raises(TracingError, match="Python's random"):
        pipeline(model, front_end="export", example_args=(torch.randn(2, 4),))


class Kept(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.inner, self.head = Inner(act), nn.Linear(4, 1)

    def forward(self, x):
        x = self.inner(x)
        pipe_split()
        return self.head(x)


class Inner(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.lin, self.act = nn.Linear(4, 4), act

    def forward(self, x):
        return self.act(self, x, self.lin(x))


class WholeInner(PipeTracer):
    def is_leaf_module(self, m, module_qualified_name):
        return module_qualified_name == "inner" or super().is_leaf_module(m, module_qualified_name)


@pytest.mark.parametrize("what", ["hook", "saved tensors", "checkpoint", "reentrant checkpoint"])
def test_a_module_that_is_kept_whole_may_do_it(what):
    model, x, target = Kept(LOST[what][0]), torch.randn(2, 4, requires_grad=True), torch.randn(2, 1)
    plain = copy.deepcopy(model)
    pipe = pipeline(model, nn.MSELoss(), front_end="export", example_args=(x, target), tracer=WholeInner)
    expected = run_plain(plain, nn.MSELoss(), None, (x,), target)
    assert_same(pipe(x, target), expected, "loss")
    assert_same_gradients(pipe, plain)


def test_backward_hooks_of_modules_that_are_taken_apart_are_refused():
    model = Kept(lambda module, x, y: y)
    model.inner.register_full_backward_hook(lambda module, inputs, outputs: None)
    with pytest.raises(TracingError, match=r"'inner'.*backward hooks"):
        pipeline(model, front_end="export", example_args=(torch.randn(2, 4),))
    seen = []
    model = Kept(lambda module, x, y: y)
    model.inner.lin.register_full_backward_hook(lambda *_: seen.append(1))
    x = torch.randn(2, 4, requires_grad=True)
    pipe = pipeline(model, nn.MSELoss(), front_end="export", example_args=(x, torch.randn(2, 1)))
    pipe(x, torch.randn(2, 1))
    assert seen == [1]


def test_wrong_requests_are_refused():
    with pytest.raises(TracingError, match=r"front_end is 'dynamo'; give 'fx' or 'export'"):
        pipeline(Language(), front_end="dynamo")
    with pytest.raises(TracingError, match="example_args"):
        pipeline(Language(), front_end="export")
    with pytest.raises(InputError, match="missing a required argument: 'batch'"):
        pipeline(Language(), front_end="export", example_kwargs={"bonus": True})


class Attention(nn.Module):
    """In training, attention gives rows in another order in memory, and drops some."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 1)

    def forward(self, x, keys, **options):
        heads, other = (each.view(*each.shape[:2], 2, 2).transpose(1, 2) for each in (x, keys))
        rate = 0.5 if self.training else 0.0
        x = nn.functional.scaled_dot_product_attention(heads, other, other, dropout_p=rate)
        x = x.transpose(1, 2).contiguous().flatten(2)
        x = x.masked_fill(x < 0, 0.0) * options.get("scale", 1.0)
        pipe_split()
        return self.out(x)


def test_what_is_one_tensor_in_the_example_is_two_arguments():
    x, keys = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    model = Attention().eval()
    pipe = pipeline(model, front_end="export", example_args=(x, x))
    assert_same(pipe(x, keys), model(x, keys), "output")


def test_attention_follows_the_mode():
    x = torch.randn(2, 3, 4)
    model = Attention()
    pipe = pipeline(model, front_end="export", example_args=(x, x.clone()), example_kwargs={"scale": torch.tensor(2.0)})
    for mode in (False, True):
        model.train(mode)
        torch.manual_seed(1)
        expected = model(x, x.clone(), scale=torch.tensor(2.0))
        torch.manual_seed(1)
        assert_same(pipe(x, x.clone(), scale=torch.tensor(2.0)), expected, f"output in mode {mode}")


class Rotary(nn.Module):
    """Computes a part without autocast, if that is on, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        x = self.lin(x)
        pipe_split()
        if torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return x @ x.T
        return x.to(x.dtype) @ x.T


def test_autocast_and_dtypes_are_those_of_the_example():
    x, model = torch.randn(3, 4), Rotary()
    with torch.autocast("cpu", torch.bfloat16):
        pipe = pipeline(model, front_end="export", example_args=(x,))
        with pytest.raises(InputError, match=r"asks whether autocast is on(.|\n)*if torch.is_autocast_enabled"):
            pipe(x)
    assert_same(pipe(x), model(x), "output")
    model.float()
    with pytest.raises(ModeError, match=r"'lin.weight' was torch.float64"):
        pipe(x)
    again = pipeline(model, front_end="export", example_args=(x.float(),))
    assert_same(again(x.float()), model(x.float()), "output")


def test_tensors_that_forward_makes_are_on_the_device_of_the_stage():
    pipe = pipeline(Language(), front_end="export", example_args=({"ids": ids()},))
    stage = copy.deepcopy(pipe.split_gm.submod_0).to("meta")
    assert all(tensor.is_meta for tensor in tensors(stage({"ids": ids().to("meta")})))


def test_an_example_made_in_inference_mode_will_do():
    model = Normed()
    with torch.inference_mode():
        example = (torch.randn(4, 4), torch.randn(4, 1))
        pipe = pipeline(model, nn.MSELoss(), front_end="export", example_args=example)
    pipe(torch.randn(4, 4), torch.randn(4, 1))
    assert pipe.out.weight.grad is not None
