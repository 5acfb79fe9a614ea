"""What the loss's target is called: `target`, or with a number where an input of the model has that name."""

import pytest
import torch
from torch import nn

from pippy import PipelineDriver1F1B, pipe_split, pipeline, verify
from pippy.errors import VerificationError

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")
X, OTHER, MORE, TARGET = torch.randn(4, 6, 4).double()


class Net(nn.Module):
    """Modules by these names: the operation that calls a module has its name."""

    def __init__(self, first, last):
        super().__init__()
        self.names = first, last
        self.add_module(first, nn.Linear(4, 4))
        self.add_module(last, nn.Linear(4, 4))

    def forward(self, x):
        x = self.get_submodule(self.names[0])(x)
        pipe_split()
        return self.get_submodule(self.names[1])(x)


class WithInputs(nn.Module):
    """It has inputs by the names that a target could have."""

    def __init__(self, marked=True):
        super().__init__()
        self.first, self.last, self.marked = nn.Linear(4, 4), nn.Linear(4, 4), marked

    def forward(self, x, target, target_1):
        x = self.first(x) + target
        if self.marked:
            pipe_split()
        return self.last(x) * target_1


@pytest.mark.parametrize(
    "names",
    [("target", "last"), ("first", "target"), ("target", "target_value"), ("_loss", "last"), ("first", "_loss")],
)
def test_a_value_of_a_stage_has_another_name(names, threads):
    model = Net(*names)
    pipe = pipeline(model, nn.MSELoss())
    values = pipe.wiring.values
    assert len(set(values.values())) == len(values)
    expected = nn.functional.mse_loss(model(X), TARGET)
    torch.testing.assert_close(pipe(X, target=TARGET), expected)
    torch.testing.assert_close(PipelineDriver1F1B(pipe, threads).run(2, X, TARGET), expected.detach())


@pytest.mark.parametrize("how", [{}, {"num_stages": 2}], ids=["marked", "balanced"])
@pytest.mark.parametrize(
    "example",
    [
        {"example_args": (X, OTHER, MORE, TARGET)},
        {"example_args": (X, OTHER, MORE), "example_kwargs": {"target_2": TARGET}},
    ],
    ids=["by position", "by name"],
)
def test_an_example_gives_it_by_the_name_that_the_pipe_has(how, example):
    model = WithInputs(marked=not how)
    pipe = pipeline(model, nn.MSELoss(), **how, **example)
    assert pipe.target_name == "target_2"
    torch.testing.assert_close(
        pipe(X, OTHER, MORE, target_2=TARGET), nn.functional.mse_loss(model(X, OTHER, MORE), TARGET)
    )


def test_two_values_of_one_name_are_refused():
    pipe = pipeline(Net("first", "last"), nn.MSELoss())
    pipe.stage(0).graph.find_nodes(op="call_module")[0].name = "target"
    pipe.wiring.values["submod_0"] = "target"
    with pytest.raises(VerificationError, match="two values need two names"):
        verify(pipe)
