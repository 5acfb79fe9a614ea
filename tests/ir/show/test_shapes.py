"""Fake shapes are the real ones, what cannot be known is said to be unknown, and the model is left alone."""

import random
import threading

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pippy import Pipe, pipe_split, pipeline
from pippy.ir.base.errors import InputError
from pippy.ir.base.trees import describe, tensors
from pippy.ir.call.signature import bind
from pippy.ir.reference import _Reference
from pippy.ir.show.shapes import Amount, propagate
from tests.ir.linear import OneLinear
from tests.ir.show.shown import Convolutions, ExampleCode, Guessing, Language, Structured
from tests.zoo import WAYS, exhibits

MODELS = {
    "example": (ExampleCode, (torch.randn(5, 8),)),
    "convolutions": (Convolutions, (torch.randn(2, 3, 9, 9),)),
    "language": (Language, (torch.zeros(2, 5, dtype=torch.int64),)),
    "structured": (Structured, (torch.randn(3, 4), {"a": "text", "b": torch.zeros(4, dtype=torch.float64)})),
}

NEEDS_NUMBERS = ["ConvBatchNorm"]  # in training: a running mean divides by the number of batches so far


class Remembering(_Reference):
    """A run that keeps all values."""

    def _value(self, node):
        self.__dict__.setdefault("made", {})[node] = made = super()._value(node)
        return made


def check_against_a_real_run(pipe, args):
    shapes = propagate(pipe, args, {})
    with torch.no_grad():
        real = Remembering(pipe, bind(pipe, args, {}), 1.0, lambda phase, call, takes, gives: gives)
        real.run()
    values = {node.name: value for node, value in real.made.items() if node.name in pipe.wiring.values}
    assert shapes.unknown == []
    assert set(shapes.values) == set(values)
    for name, shape in shapes.values.items():
        assert shape.text == describe(values[name])
        assert shape.nbytes == sum(tensor.nbytes for tensor in tensors(values[name]))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_shapes_are_those_of_a_real_run(name, training):
    make, args = MODELS[name]
    check_against_a_real_run(pipeline(make().train(training)), args)


@pytest.mark.filterwarnings("ignore:a mark after the model's last operation")
@pytest.mark.parametrize(("name", "sharing"), WAYS)
def test_shapes_are_those_of_a_real_run_in_the_zoo(name, sharing):
    model = exhibits[name]().train(name not in NEEDS_NUMBERS)
    loss, spec = type(model).loss_fn, model.output_loss_value_spec
    pipe = pipeline(model, loss, output_loss_value_spec=spec, multi_use_param_spec=sharing)
    target = () if pipe.target_name is None else (model.target(),)
    check_against_a_real_run(pipe, (*model.inputs(), *target))


def test_with_a_loss_there_is_the_target_and_the_loss():
    pipe = pipeline(ExampleCode(), nn.MSELoss())
    shapes = propagate(pipe, [torch.randn(5, 8)], {"target": torch.randn(5, 8)})
    assert shapes.values["target"].text == "float32[5, 8]"
    assert (shapes.values["_loss"].text, shapes.values["_loss"].nbytes) == ("float32[]", 4)


@pytest.mark.parametrize("batch", [1, 7])
def test_flops_are_those_of_the_matrix_products(batch):
    widths = [(3, 5), (5, 4), (4, 9)]
    pipe = Pipe.from_sequential(nn.Sequential(*(nn.Linear(*each) for each in widths)))
    flops = propagate(pipe, [torch.randn(batch, 3)], {}).flops
    assert flops == {f"submod_{i}": Amount(2 * batch * a * b) for i, (a, b) in enumerate(widths)}


def test_flops_of_a_convolution():
    flops = propagate(pipeline(Convolutions()), [torch.randn(2, 3, 9, 9)], {}).flops
    assert flops["submod_0"] == Amount(2 * (2 * 4 * 4 * 4) * (3 * 3 * 3))


@pytest.mark.parametrize("name", NEEDS_NUMBERS)
def test_a_branch_on_a_buffer_is_unknown(name):
    model = exhibits[name]()
    shapes = propagate(pipeline(model, model.loss_fn), [*model.inputs(), model.target()], {})
    assert [each.node for each in shapes.unknown] == ["bn2"]


class Restless(nn.Module):
    """Changes all that a module can change: buffers, plain attributes, random states, its own parameters."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("steps", torch.zeros(()))
        self.hidden, self.calls = [torch.zeros(4)], 0

    def forward(self, x):
        self.steps.add_(1)
        self.calls += 1
        self.hidden[0].add_(1)
        with torch.no_grad():
            self.weight.add_(1)
        torch.manual_seed(random.randrange(100) + numpy.random.randint(100))
        (self.weight.sum() * 2).backward()
        return torch.dropout(x * self.weight, 0.5, self.training) + torch.rand(4)


def snapshot(module):
    tensors = [*module.parameters(), *module.buffers()]
    return {
        "state": [tensor.detach().clone().tolist() for tensor in tensors],
        "versions": [tensor._version for tensor in tensors],
        "same": [id(tensor) for tensor in tensors],
        "gradients": [None if tensor.grad is None else tensor.grad.tolist() for tensor in tensors],
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": [str(part) for part in numpy.random.get_state()],
    }


@pytest.mark.parametrize("training", [True, False])
def test_nothing_changes(training):
    restless = Restless()
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), restless).train(training)
    net[0](torch.randn(2, 4)).sum().backward()
    pipe = Pipe.from_sequential(net, nn.MSELoss())
    x = torch.randn(3, 4, requires_grad=True)
    target, given = torch.randn(3, 4), x.detach().clone()
    before = snapshot(pipe)
    shapes = propagate(pipe, [x, target], {})
    assert shapes.unknown == []
    assert snapshot(pipe) == before
    assert (restless.calls, restless.hidden[0].tolist()) == (0, [0.0] * 4)
    assert torch.equal(x, given)
    assert x.grad is None
    assert torch.is_grad_enabled()


def test_the_restless_module_would_have_changed_it_all():
    net = nn.Sequential(Restless())
    before = snapshot(net)
    net(torch.randn(3, 4))
    after = snapshot(net)
    assert [key for key in before if before[key] == after[key]] == ["same"]


def test_containers_given_as_arguments_stay():
    extra = {"b": torch.zeros(4), "a": [1]}
    held = extra["b"]
    propagate(pipeline(Structured()), [torch.randn(3, 4), extra], {})
    assert extra == {"b": held, "a": [1]}
    assert type(extra["b"]) is torch.Tensor


def test_what_needs_real_numbers_is_unknown_with_all_that_depends_on_it():
    shapes = propagate(pipeline(Guessing()), [torch.randn(3, 4)], {})
    assert [(each.stage, each.node) for each in shapes.unknown] == [("submod_0", "item"), ("submod_1", "nonzero")]
    assert "depends on the numbers in a tensor" in shapes.unknown[0].explain()
    assert "shown.py" in shapes.unknown[0].explain()
    texts = [(shape.text, shape.nbytes) for shape in shapes.values.values()]
    known, scale, places = ("float32[3, 4]", 48), ("unknown (item in submod_0)", None), "unknown (nonzero in submod_1)"
    assert sorted(texts, key=str) == sorted([known, known, scale, known, (places, None), scale, scale], key=str)


def test_flops_beside_the_unknown_still_count():
    flops = propagate(pipeline(Guessing()), [torch.randn(3, 4)], {}).flops
    assert flops == {
        "submod_0": Amount(96, complete=False),
        "submod_1": Amount(96, complete=False),
        "submod_2": Amount(0, complete=False),
    }


class Branch(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Locked(nn.Module):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Branch(), "depends on the numbers"),
        (Locked(), "cannot be copied"),
        (nn.Linear(9, 9), "must have same reduction dim"),
    ],
)
def test_a_stage_that_fakes_cannot_run_is_unknown(module, reason, capfd, caplog):
    pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(4, 4), module, nn.ReLU()), nn.MSELoss())
    shapes = propagate(pipe, [torch.randn(3, 4), torch.randn(3, 4)], {})
    (unknown,) = shapes.unknown
    assert unknown.stage == "submod_1"
    assert reason in unknown.explain()
    assert shapes.values["submod_0"].nbytes == 48
    assert [shapes.values[name].nbytes for name in ("submod_1", "submod_2", "_loss")] == [None] * 3
    assert (capfd.readouterr(), caplog.records) == (("", ""), [])


def test_a_loss_that_needs_numbers_is_unknown():
    pipe = Pipe.from_sequential(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), lambda output, target: output.sum() * target.item()
    )
    shapes = propagate(pipe, [torch.randn(3, 4), torch.tensor(2.0)], {})
    assert shapes.values["_loss"].nbytes is None
    assert shapes.unknown[0].stage == "_loss"


class NoGrad(OneLinear):
    def forward(self, x):
        with torch.no_grad():
            y = torch.nonzero(x)
            x = self.lin(x)
        pipe_split()
        return x + 1, y


def test_gradients_are_on_again_after_a_region_without():
    assert propagate(pipeline(NoGrad()), [torch.randn(3, 4)], {}).values["getitem"].nbytes == 48
    assert torch.is_grad_enabled()


def test_fake_arguments_are_as_good_as_real_ones():
    with FakeTensorMode():
        x = torch.empty(1000, 8)
    assert propagate(pipeline(ExampleCode()), [x], {}).values["x"].text == "float32[1000, 8]"


def test_under_inference_mode():
    pipe = pipeline(ExampleCode())
    with torch.inference_mode():
        assert propagate(pipe, [torch.randn(5, 8)], {}).unknown == []


def test_arguments_that_do_not_fit_the_call_are_refused():
    with pytest.raises(InputError, match="missing a required argument"):
        propagate(pipeline(ExampleCode(), nn.MSELoss()), [torch.randn(5, 8)], {})
