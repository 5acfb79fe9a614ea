"""Forward hooks that keep what a layer gives for a later part of forward: features taken by hooks.

The trace failed with a KeyError; after a call of the plain model it took what that call had left.
"""

import copy

import pytest
import torch
from torch import fx, nn

from pippy import PipelineDriver1F1B, pipe_split, pipeline
from pippy.errors import PippyWarning, TracingError
from tests.comparisons import assert_same_gradients

pytestmark = [
    pytest.mark.usefixtures("in_float64", "seeded"),
    pytest.mark.filterwarnings("ignore:forward.. sets seen on the model:pippy.errors.PippyWarning"),
]
MSE = nn.MSELoss()
FEATURES: dict[str, object] = {}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.seen = {}
        self.add_hooks()

    def forward(self, x):
        x = self.middle(self.first(x).relu())
        pipe_split()
        return self.last(x + self.kept())


class InADict(Net):
    def add_hooks(self):
        self.first.register_forward_hook(self.keep)

    def keep(self, module, args, output):
        self.seen["first"] = output.tanh()

    def kept(self):
        return self.seen["first"]


class BeforeTheCall(InADict):
    def add_hooks(self):
        self.middle.register_forward_pre_hook(lambda module, args: self.keep(module, args, args[0]))


class InAGlobal(Net):
    def add_hooks(self):
        self.first.register_forward_hook(lambda module, args, output: FEATURES.update(first=output * 2))

    def kept(self):
        return FEATURES["first"]


class InAList(Net):
    def add_hooks(self):
        self.seen = []
        for layer in (self.first, self.middle):
            layer.register_forward_hook(lambda module, args, output: self.seen.append(output))

    def forward(self, x):
        self.seen.clear()
        return super().forward(x)

    def kept(self):
        return self.seen[0] * self.seen[1]


def again(model):
    """A model of its own with the same numbers: a copy would have the hooks of the first."""
    other = type(model)()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    return other


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("with_example", [False, True])
@pytest.mark.parametrize("kind", [InADict, BeforeTheCall, InAGlobal, InAList])
def test_what_they_keep_is_a_value_of_the_graph(kind, with_example, called_before):
    model, x, target = kind(), torch.randn(6, 4), torch.randn(6, 4)
    FEATURES.clear()
    if called_before:
        model(torch.randn(6, 4))
    kept = list(FEATURES.values())
    pipe = pipeline(model, MSE, **({"example_args": (x, target)} if with_example else {}))
    assert list(FEATURES.values()) == kept  # nothing of the trace is left
    assert not any(isinstance(each, fx.Proxy) for each in model.seen)
    plain = again(model)
    expected = MSE(plain(x), target)
    expected.backward()
    torch.testing.assert_close(pipe(x, target).detach(), expected.detach())
    assert_same_gradients(pipe, plain)


def test_workers_compute_it(threads):
    model, x, target = InADict(), torch.randn(6, 4), torch.randn(6, 4)
    plain = again(model)
    MSE(plain(x), target).backward()
    driver = PipelineDriver1F1B(pipeline(model, MSE), threads)
    driver.run(3, x, target)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(driver.get_grad(name), parameter.grad)


class Looks(Net):
    """Its hook does nothing that forward needs, and cannot be traced."""

    def add_hooks(self):
        self.counted = []
        self.first.register_forward_hook(lambda module, args, output: self.counted.append(float(output.sum())))

    def kept(self):
        return 0


class Fails(Looks):
    def kept(self):
        return self.seen["first"]


def test_other_hooks_run_when_the_module_does():
    model = Looks()
    pipe = pipeline(model)
    assert model.counted == []
    pipe(torch.randn(6, 4))
    assert len(model.counted) == 1


def test_the_error_is_that_of_forward():
    with pytest.raises(TracingError, match="KeyError: 'first'"):
        pipeline(Fails())


def test_it_is_told_that_the_dict_stays():
    with pytest.warns(PippyWarning, match="sets seen on the model"):
        pipeline(InADict())
