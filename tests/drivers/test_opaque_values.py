"""Objects that the pipeline takes for constants, with tensors somewhere inside of them."""

import pytest
import torch
from torch import fx, nn

from pippy import PipelineDriver1F1B, pipe_split, pipeline
from pippy.drivers.base.errors import StepError
from pippy.ir.base.errors import StageError

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


class Box:
    """No container that the pipeline knows."""

    def __init__(self, value):
        self.held = value


class Slots:
    __slots__ = ("held",)

    def __init__(self, value):
        self.held = value


class Linked:
    """Refers to itself."""

    def __init__(self, value):
        self.me, self.held = self, value


PACKINGS = {
    "attribute": (Box, "held"),
    "list": (lambda value: Box([1, value]), r"held\[1\]"),
    "dict": (lambda value: Box({"a": (value,)}), r"held\['a'\]\[0\]"),
    "object": (lambda value: Box(Box(value)), r"held\.held"),
    "object in a list": (lambda value: Box([Box(value)]), r"held\[0\]\.held"),
    "slots": (Slots, "held"),
    "linked": (Linked, "held"),
}


@fx.wrap
def packed(value, kind):
    return PACKINGS[kind][0](value)


@fx.wrap
def first_tensor(value):
    while not isinstance(value, torch.Tensor):
        if isinstance(value, dict):
            value = value["a"]
        elif isinstance(value, (list, tuple)):
            value = value[-1]
        else:
            value = value.held
    return value


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.first, self.last = kind, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        box = packed(self.first(x), self.kind)
        pipe_split()
        return self.last(first_tensor(box))


def loss_fn(output, target):
    return ((output - target) ** 2).mean()


@pytest.mark.parametrize("kind", PACKINGS)
def test_a_tensor_inside_that_requires_a_gradient(kind, threads):
    pipe = pipeline(Model(kind), loss_fn)
    given = torch.randn(4, 4), torch.randn(4, 4)
    message = rf"(?s)passes from stage to stage.*gradient, in.*{PACKINGS[kind][1]}.*dataclass"
    with pytest.raises(StageError, match=message):
        pipe(*given)
    driver = PipelineDriver1F1B(pipe, threads)
    with pytest.raises(StepError, match=message):
        driver.run(2, *given)
    driver.close()


@pytest.mark.parametrize("kind", PACKINGS)
def test_no_gradient_no_objection(kind, threads):
    model, x = Model(kind), torch.randn(4, 4)
    with torch.no_grad():
        torch.testing.assert_close(pipeline(model)(x), model(x))
