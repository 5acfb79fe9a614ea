"""What `pipeline(model, split=...)` does: the cuts of each policy, its numbers, its limits, its report and its errors."""

import copy
import io
import pickle
import random
import re
import warnings
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from pippy import (
    MultiUseParameterConfig,
    Pipe,
    PipelineDriver1F1B,
    PippyWarning,
    SplitPoint,
    annotate_split_points,
    pipeline,
    verify,
)
from pippy.balance.balancer import Balancer
from pippy.balance.policies import read_split
from pippy.balance.profile import OperationCost, Profile, ProfileProgress
from pippy.balance.weighing import Weighing, figures_of
from pippy.ir.base.errors import BalanceError, InputError, SplitError
from pippy.ir.base.names import named_state
from pippy.ir.cut.uses import marks
from pippy.ir.trace.trace import trace
from tests.balance.test_advice import Marked
from tests.comparisons import assert_same, assert_same_gradients, assert_same_state, fresh_inputs, run_plain, twin
from tests.drivers.thread_cluster import thread_cluster
from tests.test_random_models import Random, loss_of, steps
from tests.zoo import exhibits


def net(*widths):
    """Linear layers of these widths with relu between."""
    layers = [[nn.Linear(a, b), nn.ReLU()] for a, b in pairwise(widths)]
    return nn.Sequential(*[each for pair in layers for each in pair][:-1])


def layers_of(pipe):
    return [stage.layers for stage in pipe.balance.stages]


def held(pipe):
    """The names of the modules in each stage."""
    return [[name for name, _ in stage.named_children()] for _, stage in pipe.stages()]


# Numbers are those of the plain model.


class Unmarked:
    """A balancer for the zoo, whose models have marks."""

    def __init__(self, *args, **kwargs):
        self.balancer = Balancer(*args, **kwargs)

    def __call__(self, traced):
        for node in marks(traced):
            traced.graph.erase_node(node)
        return self.balancer(traced)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("split", ["parameters", "uniform", "size", "time", "type:Linear|Embedding|Conv"])
@pytest.mark.parametrize(
    "name", ["ExampleCode", "UNet", "TiedLanguageModel", "ConvBatchNorm", "KeywordInputs", "DictLoss"]
)
def test_a_balanced_pipe_gives_the_numbers_of_the_plain_model(name, split):
    torch.manual_seed(0)
    model = exhibits[name]()
    plain, inputs, target = twin(model), model.inputs(), model.target()
    given_too = (target,) if model.loss_fn is not None else ()
    config = MultiUseParameterConfig.REPLICATE if split == "time" else MultiUseParameterConfig.TRANSMIT
    examples = fresh_inputs((*inputs, *given_too))
    pipe = Pipe.from_tracing(
        model,
        config,
        loss_fn=model.loss_fn,
        output_loss_value_spec=model.output_loss_value_spec,
        cut=Unmarked(split, 2, loss_fn=model.loss_fn, multi_use_param_spec=config, example_args=examples),
    )
    assert pipe.num_stages == len(pipe.balance.stages) == 2
    verify(pipe)
    for step in range(2):
        expected = run_plain(
            plain, model.loss_fn, model.output_loss_value_spec, fresh_inputs(inputs), target, seed=step
        )
        torch.manual_seed(step)
        assert_same(pipe(*fresh_inputs(inputs), *given_too), expected, "loss")
        assert_same_gradients(pipe, plain)
        assert_same_state(pipe, plain)


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(steps, st.lists(st.integers(0, 30), min_size=1, max_size=4), st.sampled_from(["size", "parameters", "uniform"]))
def test_random_models_balanced_give_the_numbers_of_the_plain_model(program, outputs, split):
    torch.manual_seed(0)
    model = Random([(*step[:4], False) for step in program], outputs).double()
    plain, x, target = copy.deepcopy(model), torch.randn(3, 4, dtype=torch.float64), torch.tensor(0.5)
    before = {name: tensor.clone() for name, tensor in named_state(model)}
    try:
        pipe = pipeline(model, loss_of, split=split, num_stages=2, example_args=(x, target))
    except BalanceError as refusal:
        assert re.search("layer|stay together|no parameters", str(refusal))
        return
    finally:
        assert all(torch.equal(tensor, before[name]) for name, tensor in named_state(model))
    verify(pipe)
    torch.manual_seed(1)
    expected = loss_of(plain(x), target)
    if expected.requires_grad:
        expected.backward()
        torch.manual_seed(1)
        assert_same(pipe(x, target), expected.detach(), "loss")
        assert_same_gradients(pipe, plain)
        assert_same_state(pipe, plain)


# The policies.


def test_parameters():
    pipe = pipeline(net(2, 2, 2, 2, 50, 2), split="parameters", num_stages=3)
    assert held(pipe) == [["0", "1", "2", "3", "4", "5"], ["6", "7"], ["8"]]
    assert [stage.cost for stage in pipe.balance.stages] == [18, 150, 102]
    assert pipe.balance.alone == "6"
    assert pipe.balance.bound == 150


def test_a_shared_parameter_counts_once_where_it_is_first_used():
    model = net(4, 4, 4, 4)
    model[4].weight = model[0].weight
    stages = pipeline(model, split="parameters", num_stages=3).balance.stages
    assert [stage.parameters for stage in stages] == [20, 20, 4]
    assert sum(stage.parameters for stage in stages) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("stages", "expected"), [(1, [9]), (2, [4, 5]), (4, [2, 2, 2, 3]), (9, [1] * 9)])
def test_uniform(stages, expected):
    pipe = pipeline(net(*[3] * 10), split="uniform", num_stages=stages)
    assert sorted(layers_of(pipe)) == expected
    for children in held(pipe)[1:]:
        assert int(children[0]) % 2 == 0, "an activation goes with the layer before it"


def test_uniform_is_even_before_it_is_cheap():
    narrow_after_3_and_6 = net(9, 9, 9, 1, 9, 9, 1, 9)
    pipe = pipeline(narrow_after_3_and_6, split="uniform", num_stages=3, example_args=(torch.randn(2, 9),))
    assert sorted(layers_of(pipe)) == [2, 2, 3]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Transformer(nn.Module):
    """Blocks, one of them called twice, between an embedding and a head that are tied."""

    def __init__(self, blocks=4, width=4):
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, index, scale=1.0):
        x = self.embedding(index) * scale
        for block in [*self.blocks, self.blocks[-1]]:
            x = block(x)
        return self.head(x)


def test_type_counts_modules_by_their_class_and_leaves_them_whole():
    pipe = pipeline(Transformer(5), split="type:block", num_stages=3)
    assert [stage.cost for stage in pipe.balance.stages] == [2, 2, 2]
    for _, stage in pipe.stages():
        names = [str(node.target) for node in stage.graph.nodes if node.op == "call_module" and "block" in node.target]
        assert [name.rpartition(".")[2] for name in names] == ["norm", "up", "down"] * 2


def test_of_modules_inside_each_other_the_outermost_is_a_layer():
    class BlockPair(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = Block(4), Block(4)

        def forward(self, x):
            return self.other(self.one(x))

    pipe = pipeline(nn.Sequential(BlockPair(), Block(4), BlockPair()), split="type:block", num_stages=3)
    assert [(stage.first, stage.last) for stage in pipe.balance.stages] == [
        ("0.one.norm", "0.other.down"),
        ("1.norm", "1.down"),
        ("2.one.norm", "2.other.down"),
    ]


def test_type_matches_leaves_too():
    assert layers_of(pipeline(Transformer(), split="type:^Linear$", num_stages=2)) == [6, 5]


@pytest.mark.parametrize("examples", [{"example_args": (torch.tensor([[1, 2]]),)}, {}])
def test_auto_is_time_with_examples_and_parameters_without(examples):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", PippyWarning)
        pipe = pipeline(Transformer(), num_stages=2, **examples)
    assert pipe.balance.policy == ("time (auto)" if examples else "parameters (auto)")
    assert pipe.num_stages == 2
    if examples:
        assert not told
    else:
        (warning,) = told
        assert warning.filename == __file__
        assert re.search(r"num_stages=2 .*equal numbers of parameters.*2\.76.*split='parameters'", str(warning.message))
        pipeline(Transformer(), split="parameters", num_stages=2)  # and no warning


def test_as_many_stages_as_workers():
    with pytest.raises(BalanceError, match=r"num_stages='auto' .* no cluster is open; .*num_stages=4"):
        pipeline(net(4, 4, 4, 4), split="parameters", num_stages="auto")
    for workers in (2, 3):
        with thread_cluster(workers) as cluster:
            pipe = pipeline(net(4, 4, 4, 4), nn.MSELoss(), split="parameters", num_stages="auto")
            assert pipe.num_stages == workers
            driver = PipelineDriver1F1B(pipe, cluster)
            driver.run(1, torch.randn(2, 4), torch.randn(2, 4))
            driver.close()


def test_examples_by_name():
    x = torch.tensor([[1, 2]])
    pipe = pipeline(Transformer(), split="size", num_stages=2, example_kwargs={"index": x, "scale": 2.0})
    assert pipe.balance.stages[0].sends == 2 * 4 * 4


def test_of_cuts_that_are_alike_the_one_that_sends_fewest_bytes():
    class Waist(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = torch.relu(self.a(x))
            x = torch.cat([x, x], 1)[:, :4] + 1
            x = x.sum(1, keepdim=True)  # here it is narrowest
            return self.b(x.expand(-1, 4) + torch.zeros(4))

    pipe = pipeline(Waist(), split="parameters", num_stages=2, example_args=(torch.randn(3, 4),))
    assert pipe.balance.stages[0].sends == 3 * 4
    assert "expand" in str(pipe.stage(1))


class InTwo(nn.Module):
    """What is after the sum in a block sends as much as what is between blocks."""

    def __init__(self, width):
        super().__init__()
        self.one, self.other = Block(width), Block(width)

    def forward(self, x):
        return self.other(self.one(x))


@pytest.mark.parametrize(("blocks", "stages"), [(12, 4), (8, 2), (18, 3)])
def test_measured_times_that_differ_by_chance_cut_between_the_same_blocks(blocks, stages):
    """The cuts wandered into blocks, and sent more, for a heaviest stage that chance had made lighter."""
    model = nn.Sequential(nn.Linear(4, 4), *[InTwo(4) for _ in range(blocks)], nn.Linear(4, 4))
    traced = trace(model)
    figures, numbers = figures_of(traced), random.Random(0)
    times = [100 + 40 * count for count in figures.parameters]
    seen = set()
    for trial in range(20):
        costs = [OperationCost(round(each * numbers.uniform(0.97, 1.03) if trial else each)) for each in times]
        policy = read_split("time", stages, with_examples=True)
        cuts = Weighing(traced, figures, Profile(costs), policy, None).best_cuts()
        seen.add(tuple(str(figures.nodes[cut].target) for cut in cuts))
    assert len(seen) == 1
    assert all(name.endswith(".one.norm") for name in seen.pop())


@pytest.mark.parametrize(("at", "bytes_sent"), [(39, 2 * 1 * 4), (30, 2 * 10 * 4)])
def test_within_three_percent_the_fewest_bytes_win(at, bytes_sent):
    """80 layers, and a narrow place: one layer from the middle, or too far from it."""
    row = [nn.Linear(10, 10, bias=False) for _ in range(80)]
    row[at:at] = [nn.Linear(10, 1, bias=False), nn.Linear(1, 10, bias=False)]
    pipe = pipeline(nn.Sequential(*row), split="parameters", num_stages=2, example_args=(torch.randn(2, 10),))
    assert pipe.balance.stages[0].sends == bytes_sent
    assert pipe.balance.ratio < 1.03


# By hand.


def test_numbers_of_layers():
    pipe = pipeline(net(*[3] * 9), split=[3, 3, 2])
    assert layers_of(pipe) == [3, 3, 2]
    assert held(pipe)[2] == ["12", "13", "14"]


def test_names_are_where_stages_begin():
    pipe = pipeline(Transformer(), split=["blocks.1", "blocks.3.up"])
    assert pipe.num_stages == 3
    assert pipe.balance.stages[1].first == "blocks.1.norm"
    assert pipe.balance.stages[2].first == "blocks.3.up"
    twice = pipeline(Transformer(), split=["blocks.3"]).balance
    assert [stage.layers for stage in twice.stages] == [1 + 3 * 3, 2 * 3 + 1]  # cut before its first call
    annotated = Transformer()
    annotate_split_points(annotated, {"blocks.1": SplitPoint.BEGINNING})
    assert str(pipeline(annotated)) == str(pipeline(Transformer(), split=["blocks.1"]))


def test_a_cut_by_hand_that_the_splitter_refuses_is_explained_by_it():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.a(x)
            y = self.b(x)
            x.add_(1)
            return y + self.c(x) + x

    for split in (["b", "c"], [1, 1, 1]):
        with pytest.raises(SplitError, match=r"x\.add_\(1\)"):
            pipeline(InPlace(), split=split)
    assert layers_of(pipeline(InPlace(), split=[1, 2])) == [1, 2]  # only submod_1 uses what it changes
    assert layers_of(pipeline(InPlace(), split="uniform", num_stages=2)) == [2, 1]


def test_children_of_a_sequential_that_cannot_be_traced():
    class Branches(nn.Module):
        def __init__(self, pause):
            super().__init__()
            self.pause = pause

        def forward(self, x):
            return x * self.pause if x.sum() > 0 else x

    model = nn.Sequential(*[Branches(pause) for pause in (1.0, 2.0, 3.0, 4.0, 5.0)])
    pipe = Pipe.from_sequential(model, cut=Balancer([2, 1, 2]))
    assert held(pipe) == [["0", "1"], ["2"], ["3", "4"]]
    x = torch.ones(2)
    assert torch.equal(pipe(x), model(x))
    assert layers_of(Pipe.from_sequential(model, cut=Balancer("time", 5, example_args=(x,)))) == [1] * 5


@pytest.mark.parametrize("make", [Pipe.from_tracing, Pipe.from_sequential])
def test_a_cut_that_is_none_is_refused(make):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    with pytest.raises(
        BalanceError, match=r"^cut=\[2, 1\] is a list; give a pippy.balance.balancer.Balancer, or leave it out"
    ):
        make(model, cut=[2, 1])
    assert make(model, cut=Balancer([1, 1] if make is Pipe.from_tracing else [2, 1])).num_stages == 2


# Memory.


def test_memory_counts_parameters_gradients_optimizer_and_activations_in_flight():
    model, x = net(4, 8, 8, 2), torch.randn(16, 4)
    model[2].requires_grad_(False)
    stages = pipeline(model, split=[1, 1, 1], example_args=(x,), param_scale=3).balance.stages
    # What is kept: each input of a Linear whose weight is trained, and each result of relu.
    first = 40 * 4 * 3 + 3 * (16 * 4 * 4 + 16 * 8 * 4)
    second = 72 * 4 + 2 * (16 * 8 * 4)
    assert [stage.memory for stage in stages] == [first, second, 18 * 4 * 3 + 16 * 8 * 4]
    one = pipeline(model, split=[1, 1, 1], example_args=(x,), param_scale=1, in_flight=1).balance.stages
    assert one[0].memory == 40 * 4 + 16 * 4 * 4 + 16 * 8 * 4


def test_a_replicated_parameter_is_in_the_memory_of_each_stage_that_has_it():
    model = net(4, 4, 4, 4)
    model[4].weight = model[0].weight
    stages = pipeline(model, split=[1, 2], param_scale=1).balance.stages
    assert [stage.memory for stage in stages] == [80, 160]
    stages = pipeline(model, split=[3], param_scale=1).balance.stages
    assert [stage.memory for stage in stages] == [176]


def test_what_the_loss_saves_is_in_the_memory_of_the_last_stage():
    x, target = torch.randn(16, 4), torch.randn(16, 2)
    model = net(4, 8, 2)
    without, with_loss = (
        pipeline(model, loss_fn, split=[1, 1], example_args=args).balance.stages
        for loss_fn, args in ((None, (x,)), (nn.MSELoss(), (x, target)))
    )
    assert with_loss[1].memory == without[1].memory + 2 * 16 * 2 * 4  # the target, and what the last layer gives
    assert with_loss[0] == without[0]


def test_a_memory_limit_moves_the_cuts():
    model = net(10, 10, 10, 10, 40, 10)
    free = pipeline(model, split="uniform", num_stages=2)
    assert layers_of(free) == [3, 2] or layers_of(free) == [2, 3]
    least = min(greatest_memory(model, [first, 5 - first]) for first in range(1, 5))
    limited = pipeline(model, split="uniform", num_stages=2, memory_limit=least)
    assert max(stage.memory for stage in limited.balance.stages) == least
    with pytest.raises(BalanceError, match=rf"memory_limit={least - 1:,} .* one of them needs {least:,} "):
        pipeline(model, split="uniform", num_stages=2, memory_limit=least - 1)


def greatest_memory(model, counts):
    return max(stage.memory for stage in pipeline(model, split=counts).balance.stages)


def test_a_memory_limit_holds_for_cuts_by_hand():
    with pytest.raises(BalanceError, match=r"submod_1, cut by hand, needs 1,760 .* more than memory_limit=1,000 "):
        pipeline(net(2, 10, 10), split=["2"], memory_limit=1000)


# The report.


def test_the_report_is_data_and_survives_with_the_pipe():
    pipe = pipeline(net(2, 8, 8, 2), nn.MSELoss(), split="parameters", num_stages=2)
    again = pickle.loads(pickle.dumps(pipe))
    assert again.balance == pipe.balance
    assert str(again.balance) == str(pipe.balance)
    assert pipeline(Marked()).balance is None


def test_the_ratio_is_that_of_the_greatest_stage():
    balance = pipeline(net(2, 8, 8, 2), split="parameters", num_stages=2).balance
    costs = [stage.cost for stage in balance.stages]
    assert costs == [24, 90]
    assert balance.ratio == 90 / 57
    assert balance.greatest.name == "submod_1"
    text = str(balance)
    assert "the greatest stage, submod_1, is 1.58 times the mean; the bound is 1.26 (2 alone)" in text


def test_one_stage_is_a_pipe_of_one_stage_and_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", PippyWarning)
        pipe = pipeline(net(2, 2), num_stages=1)
    assert pipe.num_stages == 1
    assert "one stage" in str(pipe.balance)


def test_a_copy_is_balanced_and_the_model_is_not_touched():
    model = net(4, 4, 4)
    pipe = pipeline(model, split="time", num_stages=2, example_args=(torch.randn(2, 4),), deep_copy_module=True)
    assert pipe.stage(0).get_submodule("0").weight is not model[0].weight


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_shown_where_somebody_looks():
    terminal, file, silent = Terminal(), io.StringIO(), io.StringIO()
    for progress in (
        ProfileProgress(20, None, terminal),
        ProfileProgress(20, True, file),
        ProfileProgress(20, None, silent),
    ):
        for step in range(20):
            progress.step(f"layer{step}")
        progress.end()
    assert terminal.getvalue().count("\r") == 21
    assert file.getvalue().splitlines()[::9] == ["profiling 2/20: layer1", "profiling 20/20: layer19"]
    assert silent.getvalue() == ""


@pytest.mark.parametrize("shown", [True, False])
def test_progress_can_be_asked_for(shown, capsys):
    pipeline(net(4, 4, 4), split="time", num_stages=2, example_args=(torch.randn(2, 4),), progress=shown)
    assert ("profiling 3/3: 2\n" in capsys.readouterr().err) == shown


# The errors.


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"split": "auto"}, "needs to know into how many stages; give num_stages"),
        ({"split": "even", "num_stages": 2}, "split is 'even'; give one of 'auto', 'uniform'"),
        ({"split": "sizes", "num_stages": 2}, "did you mean 'size'"),
        ({"split": "type", "num_stages": 2}, "split is 'type'"),
        ({"split": "type:", "num_stages": 2}, "names no class"),
        ({"split": "type:(", "num_stages": 2}, "no regular expression"),
        ({"split": "type:Conv", "num_stages": 2}, "matches the class of no module .* it calls Linear, ReLU"),
        ({"split": "type:ReLU", "num_stages": 2}, "each needs a layer: it has 1 matching layer"),
        ({"split": "time", "num_stages": 2}, "needs arguments for that: give example_args"),
        ({"split": "size", "num_stages": 2}, "needs arguments for that: give example_args"),
        ({"num_stages": 3}, "cut into 3 stages, of which each needs a layer: it has 2 layers: 0, 2"),
        ({"num_stages": 0}, "num_stages is 0"),
        ({"num_stages": "all"}, "num_stages is 'all'; .*'auto' for as many as there are workers"),
        ({"num_stages": True}, "num_stages is True"),
        ({"num_stages": 2.0}, r"num_stages is 2\.0"),
        ({"split": []}, r"split is \[\]"),
        ({"split": [1, "0"]}, "a list of names"),
        ({"split": [2, 0]}, "stage without a layer"),
        ({"split": [2, 2]}, r"counts 4 layers, but the model has 2: 0, 2"),
        ({"split": [1, 1], "num_stages": 3}, "makes 2 stages, but num_stages=3"),
        ({"split": ["layer2"]}, "no module named 'layer2'"),
        ({"split": ["0"]}, "'0' is where the model begins"),
        ({"split": ["2", "2"]}, "begin with the same operation"),
        ({"split": 7}, "split is 7"),
        ({"memory_limit": 100}, "memory_limit: the model is only cut evenly if num_stages is given; give num_stages"),
        ({"num_stages": 2, "example_args": X}, "example_args is a Tensor; give a tuple"),
        ({"num_stages": 2, "example_kwargs": [X]}, "example_kwargs is a list"),
        ({"num_stages": 2, "memory_limit": "8G"}, "memory_limit='8G': give bytes"),
        ({"num_stages": 2, "memory_limit": 0}, "memory_limit=0: give bytes"),
        ({"num_stages": 2, "param_scale": 0.5}, r"param_scale is 0\.5"),
        ({"num_stages": 2, "in_flight": 0}, "in_flight=0: give the number of micro-batches whose .*, 1 or more"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_work_is_refused(options, words):
    with pytest.raises((BalanceError, InputError), match=words):
        pipeline(net(4, 4, 4), **options)


def test_marks_and_a_split_contradict_each_other():
    with pytest.raises(BalanceError, match=r"(?s)has 1 mark that cut it already:.*pipe_split\(\).*What to do"):
        pipeline(Marked(), split="uniform", num_stages=2)


def test_examples_that_do_not_fit():
    with pytest.raises(
        InputError, match=r"example_args are not arguments of this Pipe: .*missing.* pipe\(input, target\)"
    ):
        pipeline(net(4, 4, 4), nn.MSELoss(), num_stages=2, example_args=(X,))


def test_a_module_inside_a_leaf_is_no_place_to_cut():
    model = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2, 8))
    with pytest.raises(BalanceError, match=r"tracing saw no operation of '1\.linear1'"):
        pipeline(model, split=["1.linear1"])


def test_a_lazy_module_has_no_size():
    with pytest.raises(BalanceError, match=r"'0\.weight' has no size yet"):
        pipeline(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)), num_stages=2)


def test_without_parameters_operations_are_layers():
    class Plain(nn.Module):
        def forward(self, x):
            return torch.sin(torch.cos(torch.tanh(x)))

    assert layers_of(pipeline(Plain(), split="uniform", num_stages=3)) == [1, 1, 1]
    with pytest.raises(BalanceError, match="no parameters to balance"):
        pipeline(Plain(), num_stages=2)


def test_a_model_that_cannot_be_cut_says_what_holds_it_together():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.lin = nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x):
            return self.norm(self.lin(self.norm(x)))

    with pytest.raises(BalanceError, match=r"only 1 of 3 layers can be cut apart.*\n  a module changes norm\."):
        pipeline(Whole(), split="uniform", num_stages=2)
