"""Programs of `torch.export` that a user has: a Pipe computes what they compute, and what the model computes."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from pippy import PippyWarning, pipe_split, pipeline
from pippy.errors import InputError, ModeError, SharedParameterError, TracingError
from pippy.ir.base.node_notes import SOURCE
from pippy.ir.base.trees import map_tensors, tensors
from tests.comparisons import assert_same, assert_same_gradients, assert_same_state, run_plain
from tests.ir.trace.exported_models import Classifier, Counted, Language, Normed

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")

ROWS = {0: Dim.AUTO}


def ids(rows=4, length=5):
    return torch.randint(10, (rows, length))


def numbers(rows=4):
    return torch.randn(rows, 4)


def classified(rows=4):
    return torch.randn(rows, 3, 4), torch.randint(3, (rows,)), None


# The model, the arguments of a call, those by name, dynamic_shapes, and the loss
CASES = {
    "language": (
        Language,
        lambda: ({"ids": ids()},),
        {"bonus": True},
        {"batch": {"ids": {0: Dim.AUTO, 1: Dim.AUTO}}, "bonus": None},
        None,
    ),
    "normed": (Normed, lambda: (numbers(),), {}, {"x": ROWS}, nn.MSELoss()),
    "counted": (Counted, lambda: (numbers(),), {}, {"x": ROWS}, nn.MSELoss()),
    "classifier": (Classifier, classified, {}, {"x": ROWS, "labels": ROWS, "weight": None}, None),
}


def exported(case, training=True, strict=False):
    make, inputs, kwargs, shapes, loss_fn = CASES[case]
    model, inputs = make().train(training), inputs()
    program = export(model, inputs, kwargs, dynamic_shapes=shapes, strict=strict)
    return model, program, inputs, kwargs, loss_fn


class Called(nn.Module):
    """A model, or the module of a program, called with further arguments."""

    def __init__(self, model, kwargs):
        super().__init__()
        self.model, self.kwargs = model, kwargs

    def forward(self, *args):
        return self.model(*args, **self.kwargs)


@pytest.mark.parametrize(
    "case, training, with_example",
    [
        ("language", True, True),
        ("normed", True, False),
        ("normed", False, True),
        ("counted", True, False),
        ("classifier", True, True),
        ("classifier", False, False),
    ],
)
def test_two_steps_are_those_of_the_model_and_of_the_program(case, training, with_example):
    model, program, inputs, kwargs, loss_fn = exported(case, training)
    plain, program_alone = copy.deepcopy(model), copy.deepcopy(program).module()
    target = torch.randn(4, 1) if loss_fn else None
    given, named = ((*inputs, target) if loss_fn else inputs), kwargs
    example = {"example_args": given, "example_kwargs": named} if with_example else {}
    spec = None if loss_fn else "loss"
    pipe = pipeline(program, loss_fn, output_loss_value_spec=spec, **example)
    assert pipe.num_stages == 2
    assert all(one is other for one, other in zip(pipe.parameters(), model.parameters(), strict=True))
    all_of_them = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, plain, program_alone)]
    for seed in range(2):
        expected = run_plain(Called(plain, kwargs), loss_fn, spec, inputs, target, seed)
        of_program = run_plain(Called(program_alone, kwargs), loss_fn, spec, inputs, target, seed)
        torch.manual_seed(seed)
        result = map_tensors(torch.Tensor.detach, pipe(*given, **named))
        assert type(result) is type(expected)
        assert_same(result, expected, "output")
        assert_same(result, of_program, "output")
        assert_same_gradients(pipe, plain)
        assert_same_state(pipe, plain)
        assert_same(pipe.state_dict(), program_alone.state_dict(), "state of the program")
        for optimizer in all_of_them:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("strict", [True, False])
def test_a_mark_stays_in_a_program(strict):
    _, program, inputs, kwargs, _ = exported("language", strict=strict)
    assert pipeline(program).num_stages == 2
    again = program.run_decompositions()
    assert_same(pipeline(again)(*inputs, **kwargs)["loss"], program.module()(*inputs, **kwargs)["loss"], "loss")
    assert pipeline(again).num_stages == 2
    assert "pipe_split" in str(program.graph)
    assert_same(program.module()(*inputs, **kwargs)["rows"], 4, "rows")


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])

    def forward(self, x):
        return self.blocks(x)


def stages_with_parameters(pipe):
    return [sorted({name.split(".")[1] for name, _ in stage.named_parameters()}) for _, stage in pipe.stages()]


def halves(program):
    return pipeline(program, num_stages=2, split="parameters")


def whole(program):
    with pytest.warns(PippyWarning, match="no mark"):
        return pipeline(program)


def test_a_program_is_cut_by_numbers_and_by_the_names_of_its_modules():
    x, model = numbers(), Blocks()
    program = export(model, (x,), dynamic_shapes={"x": ROWS})
    four = pipeline(program, nn.MSELoss(), num_stages=4, split="parameters")
    assert stages_with_parameters(four) == [["0"], ["1"], ["2"], ["3"]]
    measured = pipeline(program, nn.MSELoss(), num_stages=2, split="size", example_args=(x, x))
    assert_same(measured(x, x), nn.MSELoss()(model(x), x), "loss")
    named = pipeline(program, split=["blocks.1", "blocks.3"])
    assert stages_with_parameters(named) == [["0"], ["1", "2"], ["3"]]
    assert_same(named(x), model(x), "output")


def test_calls_that_the_program_was_not_exported_for_are_refused():
    _, program, _, kwargs, _ = exported("language")
    pipe = pipeline(program)
    for rows in (1, 7):
        pipe({"ids": ids(rows, 9)}, **kwargs)
    wrong = [
        (
            ({"ids": ids(4, 3)},),
            kwargs,
            r"exported for batch\['ids'\]\.size\(\)\[1\] > 3, and batch is .*dynamic_shapes",
        ),
        (({"ids": ids().int()},), kwargs, r"batch\['ids'\] is int32\[4, 5\].*it was int64\[any, any\].*dynamic_shapes"),
        (({"ids": ids(), "more": 3},), kwargs, r"batch\['more'\] is 3; .* not there"),
        (({"ids": ids()},), {"bonus": False}, r"bonus is False.*it was True.*export the model again"),
    ]
    for args, named, words in wrong:
        with pytest.raises(InputError, match=f"(?s){words}"):
            pipe(*args, **named)
    with pytest.raises(InputError, match=r"weight is float64\[4\].*it was None"):
        pipeline(exported("classifier")[1], output_loss_value_spec="loss")(*classified()[:2], torch.ones(4))
    with pytest.raises(InputError, match=r"x\.size\(0\) is 3; .*it was 4"):
        halves(export(Blocks(), (numbers(),)))(numbers(3))


def test_an_example_that_the_program_was_not_exported_for_is_refused():
    program = export(Blocks(), (numbers(),))
    with pytest.raises(InputError, match=r"x\.size\(0\) is 3"):
        pipeline(program, example_args=(numbers(3),))
    with pytest.raises(InputError, match=r"x is float32\[4, 4\]"):
        pipeline(program, example_args=(numbers().float(),))
    with pytest.raises(InputError, match="missing a required argument: 'x'"):
        pipeline(program, example_kwargs={"y": 3})


class Two(nn.Module):
    def forward(self, x, y):
        return x.reshape(-1, 2, 4).sum(1) + (x + y).sum()


def test_conditions_on_sizes_are_checked():
    shapes = {"x": {0: Dim("rows", max=8)}, "y": {0: Dim("rows", max=8)}}
    with pytest.raises(TracingError, match=r"x.*\[0\] == 2\*.*, a size that follows from another"):
        both = {"x": {0: 2 * Dim("pairs", max=8)}, "y": {0: 2 * Dim("pairs", max=8)}}
        pipeline(export(Two(), (numbers(), numbers()), dynamic_shapes=both))
    program = export(Two(), (numbers(), numbers()), dynamic_shapes={"x": ROWS, "y": ROWS})
    pipe = whole(program)
    pipe(numbers(6), numbers(6))
    with pytest.raises(InputError, match=r"exported for .*% 8\) == 0"):
        pipe(numbers(5), numbers(5))
    with pytest.raises(InputError, match=r"exported for .*x.size\(\)\[0\]"):
        pipe(numbers(4), numbers(6))

    class Sum(nn.Module):
        def forward(self, x, y):
            return x + y

    pipe = whole(export(Sum(), (numbers(), numbers()), dynamic_shapes=shapes))
    with pytest.raises(InputError, match=r"exported for x\.size\(\)\[0\] <= 8, and x is float64\[9, 4\]"):
        pipe(numbers(9), numbers(9))


@pytest.mark.parametrize("training", [True, False])
def test_a_program_has_one_mode(training):
    model, program, (x,), _, _ = exported("normed", training)
    pipe, target = pipeline(program, nn.MSELoss()), torch.randn(4, 1)
    assert pipe.training is training
    pipe(x, target)
    pipe.train(not training)
    with pytest.raises(ModeError, match=r"(?s)not traced in (eval|train) mode.*self\.drop\(.*make another Pipe"):
        pipe(x, target)
    pipe.train(training)
    pipe(x, target)
    either = halves(export(Blocks(), (x,)))
    assert torch.equal(either.eval()(x), either.train()(x))


def with_autocast(x):
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x


def with_a_condition(x):
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


class Acts(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), act

    def forward(self, x):
        return self.act(self.linear(x))


@pytest.mark.parametrize("act, words", [(with_autocast, "wrap_with_autocast"), (with_a_condition, "cond")])
def test_what_no_stage_does_is_refused_with_the_line(act, words):
    with pytest.raises(TracingError, match=rf"(?s)calls {words}, which no stage does:.*self\.act\(.*What to do"):
        pipeline(export(Acts(act), (numbers(),)))


class ChangesItsInput(nn.Module):
    def forward(self, x):
        x = x.add_(1)
        pipe_split()
        return x * 2


def test_a_change_of_an_input_is_as_in_the_program_or_refused():
    x = numbers()
    program = export(ChangesItsInput(), (x.clone(),))
    assert_same(pipeline(program)(x.clone()), program.module()(x.clone()), "output")
    with pytest.raises(TracingError, match=r"changes its input 'x' in place.*\n.*a new tensor"):
        pipeline(program.run_decompositions())


def test_what_is_read_and_changed_in_two_stages_is_refused():
    class Apart(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            x = x - self.mean
            pipe_split()
            self.mean = self.mean + x.mean(0)
            return x

    with pytest.raises(SharedParameterError, match="'mean' is changed in place in submod_1"):
        pipeline(export(Apart(), (numbers(),)))


def test_wrong_requests_are_refused_and_the_advice_works():
    program = export(Blocks(), (numbers(),))
    with pytest.raises(TracingError, match=r"was made by torch.export.*give the ExportedProgram itself"):
        pipeline(program.module())
    with pytest.raises(TracingError, match="concrete_args"):
        pipeline(program, concrete_args={"y": 3})
    with pytest.raises(ModeError, match=r"the program was exported with torch\.float64"):
        halves(program).float()(numbers())


def test_a_pipe_of_a_program_survives_pickling_and_copying():
    _, program, inputs, kwargs, _ = exported("language")
    pipe = pipeline(program)
    expected = pipe(*inputs, **kwargs)["loss"]
    for again in (pickle.loads(pickle.dumps(pipe)), copy.deepcopy(pipe), pipeline(program, deep_copy_module=True)):
        assert_same(again(*inputs, **kwargs)["loss"], expected, "loss")
        with pytest.raises(InputError, match=r"size\(\)\[1\] > 3"):
            again({"ids": ids(4, 2)}, **kwargs)
    copied = pipeline(program, deep_copy_module=True)
    assert not {id(each) for each in copied.parameters()} & {id(each) for each in pipe.parameters()}


def test_operations_have_the_users_lines():
    pipe = pipeline(exported("language")[1])
    (cat,) = pipe.split_gm.submod_1.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    assert SOURCE.of(cat).code.startswith("x = torch.cat([second, first]")


def test_tensors_that_forward_makes_are_on_the_device_of_the_stage():
    pipe = pipeline(exported("language")[1])
    stage = copy.deepcopy(pipe.split_gm.submod_0).to("meta")
    inputs = [node.name for node in stage.graph.find_nodes(op="placeholder")]
    assert inputs == ["batch"]
    assert all(tensor.is_meta for tensor in tensors(stage({"ids": ids().to("meta")})))


class Bounded(nn.Module):
    """It has an argument that is None, and a buffer on another device, which it does not use."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("unused", torch.zeros(2, device="meta"))

    def forward(self, x):
        return torch.clamp(self.linear(x), None, 0.1)


def test_an_argument_that_is_none_is_no_device():
    model, x = Bounded(), numbers()
    torch.testing.assert_close(pipeline(export(model, (x,)), num_stages=1)(x), model(x))
