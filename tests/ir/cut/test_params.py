"""Tensors that several stages use, their names, and state dicts."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pippy import MultiUseParameterConfig, PippyError, convert_deferred_batch_norm, pipe_split, pipeline
from pippy.ir.base.errors import NameLookupError, SharedParameterError, SplitError, StateDictError
from tests.zoo import (
    WAYS,
    CountingBuffer,
    ExampleCode,
    ReadBuffers,
    SharedByNested,
    TiedInsideAndElsewhere,
    UsedThrice,
    exhibits,
)

TRANSMIT, REPLICATE = MultiUseParameterConfig.TRANSMIT, MultiUseParameterConfig.REPLICATE


class TwoShared(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        x = x @ self.one @ self.two
        pipe_split()
        x = x @ self.one
        pipe_split()
        return x @ self.one @ self.two


def test_each_parameter_can_be_configured_by_itself():
    pipe = pipeline(TwoShared(), multi_use_param_spec={"one": REPLICATE})
    assert pipe.replicated_params == [{"submod_0": "one", "submod_1": "one", "submod_2": "one"}]
    assert pipe.stage_qualnames("two") == ("submod_0.two",)


def test_three_users_of_a_transmitted_parameter_each_get_it_from_the_first():
    pipe = pipeline(SharedByNested())
    code = pipe.split_gm.code
    assert pipe.stage_qualnames("one.weight") == pipe.stage_qualnames("three.weight") == ("submod_0.one.weight",)
    assert code.count("submod_0[1]") == 1
    assert [len(node.args) for node in pipe.split_gm.graph.find_nodes(op="call_module")] == [1, 2, 2]


def test_the_pipe_shares_the_models_parameters_and_only_further_copies_are_new():
    model = TiedInsideAndElsewhere()
    pipe = pipeline(model)
    assert pipe.stage(0).a.weight is model.a.weight
    assert pipe.stage(1).b.weight is pipe.stage(1).c.weight
    assert pipe.stage(1).b.weight is not model.a.weight
    assert pipe.stage(1).b.bias is model.b.bias
    assert model.b.weight is model.c.weight is model.a.weight


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"mm_param": "replicate"}, "multi_use_param_spec['mm_param'] is 'replicate'"),
        ({"mm_parm": REPLICATE}, "no parameter named 'mm_parm'; did you mean 'mm_param'"),
        ({"zzz": REPLICATE}, "it has 'mm_param', 'mm_param2', 'lin.weight'"),
        ({"lin.weight": TRANSMIT}, "asks to TRANSMIT 'lin.weight', but submod_1, submod_2 use it inside a leaf module"),
    ],
)
def test_a_wrong_configuration_names_the_value_and_the_parameter(spec, words):
    with pytest.raises(SharedParameterError) as caught:
        pipeline(ExampleCode(), multi_use_param_spec=spec)
    assert words in str(caught.value)


def test_tied_names_must_agree():
    with pytest.raises(SharedParameterError, match=r"names of one tied parameter"):
        pipeline(SharedByNested(), multi_use_param_spec={"one.weight": REPLICATE, "two.weight": TRANSMIT})
    pipeline(SharedByNested(), multi_use_param_spec={"one.weight": REPLICATE, "two.weight": REPLICATE})


class NormTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        x = self.norm(x)
        pipe_split()
        return self.norm(torch.sin(x))


def test_a_batch_norm_that_two_stages_call_is_refused_in_training_and_when_it_runs():
    with pytest.raises(SharedParameterError, match=r"'norm' \(BatchNorm1d\) updates its running statistics"):
        pipeline(NormTwice())
    model, x = NormTwice().eval(), torch.randn(5, 4)
    pipe = pipeline(model)
    assert torch.equal(pipe(x), model(x))
    with pytest.raises(SharedParameterError, match=r"submod_0 changed 'norm\.num_batches_tracked'"):
        pipe.train()(x)


class WritesLate(CountingBuffer):
    def forward(self, x):
        x = self.a(x) + self.count
        pipe_split()
        self.count.add_(1)
        return self.b(x)


class WritesTwice(CountingBuffer):
    def forward(self, x):
        self.count.add_(1)
        x = self.a(x)
        pipe_split()
        self.count.mul_(2)
        return self.b(x)


@pytest.mark.parametrize(("model", "line"), [(WritesLate, "self.count.add_(1)"), (WritesTwice, "self.count.mul_(2)")])
def test_a_buffer_whose_change_an_earlier_stage_must_see_is_refused(model, line):
    with pytest.raises(
        SharedParameterError, match="'count' is changed in place in submod_1 and used in submod_0, submod_1"
    ) as caught:
        pipeline(model())
    assert line in str(caught.value)


class ChangesSkip(nn.Module):
    def forward(self, x):
        y = torch.sin(x)
        pipe_split()
        z = y.mul_(2)
        pipe_split()
        return z + y


def test_a_change_that_another_stage_must_see_is_refused_with_both_lines():
    with pytest.raises(SplitError, match=r"submod_1 changes 'sin' in place(.|\n)*y\.mul_\(2\)(.|\n)*return z \+ y"):
        pipeline(ChangesSkip())


def test_the_callers_input_is_not_changed():
    class Changes(nn.Module):
        def forward(self, x):
            x += 1
            pipe_split()
            return torch.sin(x)

    x = torch.zeros(2)
    assert torch.equal(pipeline(Changes())(x), torch.sin(torch.ones(2)))
    assert torch.equal(x, torch.zeros(2))


@pytest.mark.parametrize(("name", "config"), WAYS)
@pytest.mark.filterwarnings("ignore:a mark after")
def test_every_parameter_and_buffer_is_accounted_for_once(name, config):
    model = exhibits[name]()
    pipe = pipeline(model, multi_use_param_spec=config, output_loss_value_spec=False)
    held = [f"{stage}.{local}" for stage, module in pipe.stages() for local, _ in module.named_parameters()]
    names = [name for name, _ in model.named_parameters()]
    placed = [place for name in names for place in pipe.stage_qualnames(name)]
    assert sorted(placed) == sorted(held)
    for place in held:
        assert place in pipe.stage_qualnames(pipe.remap_qualname(place))
        assert pipe.remap_qualname(f"split_gm.{place}") == pipe.remap_qualname(place)
    assert [name for name, _ in pipe.named_parameters()] == names
    assert all(mine is theirs for mine, theirs in zip(pipe.parameters(), model.parameters(), strict=True))
    copies = [[f"{stage}.{name}" for stage, name in group.items()] for group in pipe.replicated_params]
    assert copies == [[*pipe.stage_qualnames(name)] for name in names if len(pipe.stage_qualnames(name)) > 1]


def test_unused_parameters_are_in_the_state_dict_and_nowhere_else():
    model = UsedThrice()
    model.extra = nn.Linear(3, 3)
    pipe = pipeline(model)
    assert [*pipe.state_dict()] == [*model.state_dict()]
    assert pipe.stage_qualnames("extra.weight") == ()
    assert pipe.get_grad("extra.weight") is None
    assert "extra.weight" in dict(pipe.named_parameters())


def test_names_of_modules_are_mapped_too():
    assert pipeline(ExampleCode()).remap_qualname("submod_1.lin") == "lin"


@pytest.mark.parametrize("name", ["lin.weight", "submod_0", "submod_x.lin", ""])
def test_a_name_that_is_not_inside_a_stage_is_refused(name):
    with pytest.raises(NameLookupError, match=r"look like 'submod_0\.layer\.weight'"):
        pipeline(ExampleCode()).remap_qualname(name)


def test_a_name_that_the_model_does_not_have_is_refused():
    with pytest.raises(NameLookupError, match=r"no parameter or buffer named 'lin.weigt'; did you mean 'lin.weight'"):
        pipeline(ExampleCode()).stage_qualnames("lin.weigt")
    assert issubclass(NameLookupError, PippyError)


@pytest.mark.parametrize("config", MultiUseParameterConfig)
@pytest.mark.parametrize("model", [ExampleCode, TiedInsideAndElsewhere, CountingBuffer, ReadBuffers])
def test_a_state_dict_goes_both_ways(model, config):
    torch.manual_seed(0)
    trained, x = model(), torch.randn(6, 8)
    pipe = pipeline(model(), multi_use_param_spec=config)
    result = pipe.load_state_dict(trained.state_dict())
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    other = model()
    other.load_state_dict(pipe.state_dict())
    expected = copy.deepcopy(trained)(x)
    assert torch.equal(other(x), expected)
    assert torch.equal(pipe(x), expected)


def test_a_state_dict_under_a_prefix():
    holder = nn.ModuleDict({"inner": pipeline(ExampleCode())})
    assert [*holder.state_dict()] == [f"inner.{name}" for name in ExampleCode().state_dict()]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("mm_param"), "missing: mm_param"),
        (lambda state: state.update(other=torch.ones(1)), "unknown: other"),
        (lambda state: state.update(mm_param=torch.ones(1)), "mm_param is float32[1]; the model has float32[8, 8]"),
        (lambda state: state.update(mm_param="text"), "mm_param is 'text'"),
    ],
)
def test_a_state_dict_that_does_not_fit_writes_nothing(change, words):
    pipe = pipeline(ExampleCode())
    before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    state = {name: tensor + 1 for name, tensor in before.items()}
    change(state)
    with pytest.raises(StateDictError) as caught:
        pipe.load_state_dict(state)
    assert words in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in pipe.state_dict().items())


def test_a_partial_state_dict_can_be_loaded_without_strict():
    pipe = pipeline(ExampleCode())
    result = pipe.load_state_dict({"mm_param": torch.ones(8, 8), "other": 1}, strict=False)
    assert result.unexpected_keys == ["other"]
    assert "mm_param2" in result.missing_keys
    assert torch.equal(pipe.state_dict()["mm_param"], torch.ones(8, 8))


class TiedRecurrent(nn.Module):
    """A recurrent layer, which keeps its weights in a list beside its attributes, called in two stages."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(8, 8)

    def forward(self, x):
        x = self.gru(x)[0]
        pipe_split()
        return self.gru(torch.sin(x))[0]


@pytest.mark.parametrize("make", [ExampleCode, TiedInsideAndElsewhere, TiedRecurrent])
def test_without_a_loss_a_backward_of_ones_own_leaves_gradients_where_the_model_has_them(make):
    torch.manual_seed(0)
    model = make().double()
    plain, x = copy.deepcopy(model), torch.randn(5, 8, dtype=torch.float64)
    pipe = pipeline(model, multi_use_param_spec=REPLICATE)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, plain)]
    for _ in range(3):
        for each, optimizer in zip((pipe, plain), optimizers):
            optimizer.zero_grad()
            for _ in range(2):  # the second backward accumulates
                F.mse_loss(each(x), x).backward()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(pipe.get_grad(name), parameter.grad)
        for optimizer in optimizers:
            optimizer.step()
    assert all(mine is not theirs for copies in pipe.copies() for mine, theirs in itertools.pairwise(copies))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        x = x @ self.weight
        pipe_split()
        return x @ self.weight


@pytest.mark.parametrize(
    "way",
    [lambda pipe: pipe, copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))],
    ids=["same", "copied", "pickled"],
)
def test_the_top_level_graph_follows_the_owners_too(way):
    """After an optimizer's step it computed with the copies as they had been, and left gradients in them."""
    pipe, x = way(pipeline(Twice(), multi_use_param_spec=MultiUseParameterConfig.REPLICATE)), torch.randn(3, 4)
    plain = Twice()
    plain.load_state_dict(pipe.state_dict())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, plain)]
    for _ in range(3):
        outputs = [pipe.split_gm(x), plain(x)]
        torch.testing.assert_close(*outputs)
        for output, optimizer in zip(outputs, optimizers):
            optimizer.zero_grad()
            output.sum().backward()
            optimizer.step()
        torch.testing.assert_close(pipe.weight.grad, plain.weight.grad)
    copies = pipe.copies()[0]
    assert len(copies) == 2 and copies[0] is pipe.weight


class ReadsStatistics(nn.Module):
    def __init__(self, late):
        super().__init__()
        self.norm, self.late = nn.BatchNorm1d(4), late

    def forward(self, x):
        mean = 0 if self.late else self.norm.running_mean.clone()
        x = self.norm(x)
        x = x + (self.norm.running_mean.clone() if self.late else mean)
        pipe_split()
        return 2 * x


def test_statistics_that_change_when_the_step_ends_are_not_read_before():
    pipeline(ReadsStatistics(late=True))
    pipeline(convert_deferred_batch_norm(ReadsStatistics(late=True)).eval())
    pipeline(convert_deferred_batch_norm(ReadsStatistics(late=False)))
    line = r"'norm.running_mean' is read after .*\n.*\n +x = x \+ \(self.norm.running_mean.*\n.* before the norm"
    with pytest.raises(SharedParameterError, match=line):
        pipeline(convert_deferred_batch_norm(ReadsStatistics(late=True)))
