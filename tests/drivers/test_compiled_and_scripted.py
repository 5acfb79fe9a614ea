"""Models that torch.compile and torch.jit were called on, whole and in parts, train as the plain model."""

import copy

import pytest
import torch
from torch import nn

from pippy import PipelineDriver1F1B, SplitPoint, annotate_split_points, pipeline
from pippy.ir.base.errors import TracingError

X, TARGET = torch.randn(6, 4).double(), torch.randn(6, 2).double()


class Net(nn.Module):
    def __init__(self, wrap=lambda part: part):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.part = wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double())
        self.double()

    def forward(self, x):
        return self.last(self.part(self.first(x).relu()))


@torch.compile(backend="eager")  # every process that collects tests would import inductor, which takes seconds
def doubled(x):
    return x * 2


@torch.jit.script
def shifted(x, by: float = 1.0):
    if bool(x.sum() > 1000):  # no tracer could follow it
        by = 2.0
    return x + by


class CallsFunctions(Net):
    def forward(self, x):
        return self.last(shifted(self.part(doubled(self.first(x))), by=0.5))


class CompiledForward(Net):
    @torch.compile(backend="eager")
    def forward(self, x):
        return self.last(self.part(self.first(x).relu()))


def compiled_in_place(module):
    module.compile()
    return module


def with_compiled_method(model):
    model.forward = torch.compile(model.forward)
    return model


MODELS = {
    "torch.compile(model)": lambda: torch.compile(Net()),
    "model.compile()": lambda: compiled_in_place(Net()),
    "a compiled part": lambda: Net(torch.compile),
    "a part compiled in place": lambda: Net(compiled_in_place),
    "compiled and scripted functions": CallsFunctions,
    "a compiled forward": CompiledForward,
    "a compiled forward set on the instance": lambda: with_compiled_method(Net()),
    "a scripted part": lambda: Net(torch.jit.script),
    "a traced part": lambda: Net(lambda part: torch.jit.trace(part, torch.randn(2, 8).double())),
}


@pytest.mark.parametrize("made", MODELS.values(), ids=MODELS)
def test_it_trains_as_the_plain_model(made, cluster):
    torch.manual_seed(0)
    plain = made()
    loss_fn = nn.MSELoss()
    with torch.compiler.set_stance("force_eager"):
        expected = loss_fn(plain(X), TARGET)
        expected.backward()
    torch.manual_seed(0)
    driver = PipelineDriver1F1B(pipeline(made(), loss_fn, num_stages=2, example_args=(X[:2], TARGET[:2])), cluster)
    torch.testing.assert_close(driver.run(3, X, TARGET), expected.detach())
    gradients = driver.gradients()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name.removeprefix("_orig_mod.")], parameter.grad)
    driver.close()


def test_names_are_those_of_the_model_inside(threads):
    torch.manual_seed(0)
    compiled = torch.compile(Net())
    annotate_split_points(compiled, {"last": SplitPoint.BEGINNING})
    driver = PipelineDriver1F1B(pipeline(compiled, torch.compile(nn.MSELoss())), threads)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    plain = copy.deepcopy(compiled._orig_mod)
    driver.run(2, X, TARGET)
    optimizer.step()
    driver.copy_to(compiled)
    assert list(driver.state_dict()) == list(plain.state_dict())
    nn.MSELoss()(plain(X), TARGET).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(compiled._orig_mod.state_dict(), plain.state_dict())


@pytest.mark.parametrize("script", [torch.jit.script, lambda model: torch.jit.trace(model, X)])
def test_a_model_that_is_scripted_whole_is_refused(script):
    with pytest.raises(TracingError, match="give the module that it was made from"):
        pipeline(script(Net()), example_args=(X,))
