"""Arguments, results and values between stages that are containers, through the reference and through a driver."""

import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, fields

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import PipelineDriver1F1B, pipe_split, pipeline
from pippy.drivers.protocol.steps import Step
from pippy.ir.base.trees import children, leaves

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")

Pair = namedtuple("Pair", "one other")


@dataclass
class Plain:
    one: object
    other: object = None


@dataclass
class ModelOutput(OrderedDict):
    """As those of transformers: fields that are items too, unless they are None."""

    loss: object = None
    logits: object = None
    hidden: object = None

    def __post_init__(self):
        for field in fields(self):
            if getattr(self, field.name) is not None:
                OrderedDict.__setitem__(self, field.name, getattr(self, field.name))

    def __getitem__(self, key):
        return OrderedDict.__getitem__(self, key) if isinstance(key, str) else tuple(self.values())[key]


class Model(nn.Module):
    """What is given is read in the first stage. What ``make`` makes there is read in the last, and ``end`` makes the output."""

    def __init__(self, read, make, end):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.read, self.make, self.end = read, make, end

    def forward(self, x, given):
        first, last = self.read(given)
        x = torch.tanh(self.layers[0](x)) + first
        crossing = self.make(x, first * 2)
        pipe_split()
        y = torch.tanh(self.layers[1](x))
        pipe_split()
        one, other = self.read(crossing)
        return self.end(self.layers[2](y) + one * other, last * x)


def unpacked(value):
    one, other = value
    return one, other


KINDS = {
    "dict of lists": (lambda a, b: {"a": [a, {"b": b}], "c": "text"}, lambda v: (v["a"][0], v["a"][1]["b"])),
    "named tuple": (Pair, lambda v: (v.one, v[1])),
    "unpacked": (Pair, lambda v: unpacked(v)),
    "OrderedDict": (lambda a, b: OrderedDict(a=a, n=None, b=b), lambda v: (v["a"], v["b"])),
    "dataclass": (lambda a, b: Plain((a, "text"), [None, b]), lambda v: (v.one[0], v.other[1])),
    "model output": (lambda a, b: ModelOutput(logits=a, hidden=(b, None)), lambda v: (v.logits, v["hidden"][0])),
    "its items": (lambda a, b: ModelOutput(logits=a, hidden=b), lambda v: (v[0], v[1])),
    "numbers": (lambda a, b: (a, 2, b, 0.5, True, None, "s"), lambda v: (v[0], v[2])),
}


def types(value):
    inside = children(value)
    return type(value) if inside is None else (type(value), [types(item) for item in inside])


def check_same(found, expected):
    assert types(found) == types(expected)
    for mine, plain in zip(leaves(found), leaves(expected), strict=True):
        if isinstance(mine, torch.Tensor):
            torch.testing.assert_close(mine, plain.detach())
        else:
            assert mine == plain


def loss_of_tensors(output, target):
    return sum(F.mse_loss(each, target) for each in leaves(output) if isinstance(each, torch.Tensor))


def test_containers_in_between_and_out(threads):
    x, one, other, target = torch.randn(4, 6, 4)
    for make, read in KINDS.values():
        model = Model(read, make, make)
        plain = copy.deepcopy(model)
        given = make(one, other)
        output = plain(x, given)
        loss = loss_of_tensors(output, target)
        loss.backward()
        pipe = pipeline(model, loss_of_tensors)
        torch.testing.assert_close(pipe(x, given, target), loss.detach())
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(pipe.get_grad(name), parameter.grad)
        driver = PipelineDriver1F1B(pipe, threads, loss_reduction="mean")
        found, outputs = driver.run(2, x, given, target, outputs=True)
        torch.testing.assert_close(found, loss.detach())
        check_same(outputs, output)
        for name, gradient in driver.gradients().items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad)
        driver.close()


class OwnArguments(nn.Module):
    """Each stage has an argument of its own; one is a container of which two stages read a part."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, middle, scale, last):
        x = self.layers[0](x)
        pipe_split()
        x = self.layers[1](x) + middle
        pipe_split()
        return self.layers[2](x) * scale + last["bias"]


def test_an_argument_goes_straight_to_the_stages_that_use_it(threads, monkeypatch):
    model = OwnArguments()
    driver = PipelineDriver1F1B(pipeline(model, nn.MSELoss()), threads)
    x, middle, bias, target = torch.randn(4, 6, 4)
    given, send = {}, threads.session.send

    def watched(worker, message):
        if isinstance(message.body, Step):
            given[worker] = set(message.body.inputs.arguments)
        return send(worker, message)

    monkeypatch.setattr(threads.session, "send", watched)
    loss = driver.run(3, x, middle, 0.5, {"bias": bias}, target)
    torch.testing.assert_close(loss, F.mse_loss(model(x, middle, 0.5, {"bias": bias}), target).detach())
    assert given == {0: {"x"}, 1: {"middle"}, 2: {"scale", "last", "target"}}


class Checked(namedtuple("Checked", "value rows")):
    """As torch's PackedSequence: the constructor looks at what it is given."""

    def __new__(cls, value, rows):
        assert rows["of"].device.type == "cpu"
        return super().__new__(cls, value, rows)


class Packing(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.rnn, self.last = nn.Linear(3, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(self.embedding(x), lengths, batch_first=True, enforce_sorted=False)
        checked = Checked(x, {"of": lengths})
        padded, counts = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=5)
        return self.last(padded.sum(1) / counts[:, None] + checked.value.sum() * 0)


@pytest.mark.parametrize("on", ["cluster", "threads"])
def test_named_tuples_that_check_what_they_hold(on, request):
    """They were made again around what stands for tensors, and a PackedSequence could not go from stage to stage."""
    model, lengths = Packing(), torch.tensor([5, 2, 3, 1])
    x, target = torch.randn(4, 5, 3), torch.randn(4, 2)
    plain = copy.deepcopy(model)
    F.mse_loss(plain(x, lengths), target).backward()
    pipe = pipeline(model, nn.MSELoss(), example_args=(x, lengths, target), num_stages=3)  # weighed by running it
    driver = PipelineDriver1F1B(pipe, request.getfixturevalue(on))
    driver.run(2, x, lengths, target)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(driver.get_grad(name), parameter.grad)
