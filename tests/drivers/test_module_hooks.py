"""Hooks of modules act as in the plain model, or are refused by name."""

import copy

import pytest
import torch
from torch import fx, nn

from pippy import Pipe, PipelineDriver, pipe_split, pipeline
from pippy.drivers.base.errors import StepError
from pippy.errors import PippyWarning
from pippy.ir.base.errors import ModeError, TracingError
from tests.comparisons import Beside, assert_loss, assert_same_gradients

pytestmark = [
    pytest.mark.usefixtures("in_float64", "seeded"),
    pytest.mark.filterwarnings("ignore:forward.. sets seen on the model:pippy.errors.PippyWarning"),
]

MSE = nn.MSELoss()
X, TARGET = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4), torch.zeros(6, 4, dtype=torch.float64)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.relu = nn.Linear(4, 4), nn.Tanh()

    def forward(self, x):
        return self.relu(self.layer(x))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = Block(), Block(), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        pipe_split()
        return self.last(self.second(x))


PLACES = {"container": "second", "leaf": "second.layer", "first leaf": "first.layer"}
HOOKS = {
    "forward": lambda module: module.register_forward_hook(lambda module, args, output: output * 2),
    "forward pre": lambda module: module.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "backward": lambda module: module.register_full_backward_hook(
        lambda module, given, output: tuple([None if each is None else each * 3 for each in given])
    ),
    "backward pre": lambda module: module.register_full_backward_pre_hook(lambda module, output: (output[0] * 3,)),
}


def plain_gradients(model):
    plain = copy.deepcopy(model)
    plain.zero_grad()
    loss = nn.functional.mse_loss(plain(X), TARGET)
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in plain.named_parameters()}


def assert_as_plain(driver, model):
    loss, expected = plain_gradients(model)
    driver.zero_grad()
    torch.testing.assert_close(driver.run(3, X, TARGET), loss)
    torch.testing.assert_close(driver.gradients(), expected)


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_hooks_that_are_there_are_followed(threads, place, kind, schedule):
    """Backward hooks of a module that tracing takes apart were refused; now it is kept whole."""
    model = Blocks()
    HOOKS[kind](model.get_submodule(PLACES[place]))
    both = Beside(threads, model, schedule=schedule)
    assert list(both.pipe.kept_whole) == (["second"] if place == "container" and "backward" in kind else [])
    both.step(3, X, TARGET)


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("place", [*PLACES.values(), ""])
@pytest.mark.parametrize("removed", [False, True])
def test_hooks_that_change_later_are_refused_before_anything_is_sent(threads, place, kind, removed):
    """They were dropped without a word, and the loss was that without them."""
    if removed and not place:
        return  # a model with hooks of its own is refused
    model = Blocks()
    there = HOOKS[kind](model.get_submodule(place)) if removed else None
    driver = PipelineDriver(pipeline(model, MSE), threads)
    driver.run(3, X, TARGET)
    handle = there or HOOKS[kind](model.get_submodule(place))
    if removed:
        handle.remove()
    sent = list(threads.session.counts)
    for grad in (True, False):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(ModeError, match=f"the hooks of {place and repr(place)}") as caught,
        ):
            driver.run(3, X, TARGET)
    assert threads.session.counts == sent
    pipe, advice = driver.pipe, str(caught.value).rpartition("; ")[2]
    if advice == "call pipeline() again":
        pipe = pipeline(model, MSE)
    elif advice == "take it off":
        handle.remove()
    else:
        assert advice == "make the driver again"
        PipelineDriver(pipe, threads).run(3, X, TARGET)
    assert_as_plain(PipelineDriver(pipe, threads), model)


@pytest.mark.parametrize("place", ["second", ""])
def test_a_pipe_in_this_process_refuses_what_it_would_not_call(place):
    model = Blocks()
    pipe = pipeline(model, MSE)
    model.second.layer.register_forward_hook(lambda module, args, output: output * 2)
    pipe.register_forward_hook(lambda module, args, output: output * 1.0)
    loss, expected = plain_gradients(model)
    torch.testing.assert_close(pipe(X, TARGET), loss)
    torch.testing.assert_close({name: each.grad for name, each in pipe.named_parameters()}, expected)
    model.get_submodule(place).register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(ModeError, match="the hooks of"):
        pipe(X, TARGET)


def test_hooks_on_a_pipe_itself_are_refused_by_a_driver(threads):
    pipe = pipeline(Blocks(), MSE)
    driver = PipelineDriver(pipe, threads)
    pipe.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(ModeError, match="the Pipe itself"):
        driver.run(3, X, TARGET)


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_hook_that_notes_something_is_refused_in_the_first_step(threads, kind):
    """The script's list stayed empty, without a word."""
    seen, model = [], Blocks()
    if kind == "forward":
        model.second.layer.register_forward_hook(lambda module, args, output: seen.append(output))
    else:
        model.second.register_full_backward_hook(lambda module, given, output: seen.append(output))
    driver = PipelineDriver(pipeline(model, MSE), threads)
    with pytest.raises(StepError, match=f"a {kind} hook of '.*second.*' changes an object that it refers to"):
        driver.run(3, X, TARGET)
    assert driver.get_grad("last.weight") is None


def test_a_hook_that_notes_something_of_its_module_is_followed(threads):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.calls = nn.Linear(4, 4), 0
            self.layer.register_forward_hook(self.count)

        def count(self, module, args, output):
            self.calls += 1

        def forward(self, x):
            return self.layer(x)

    model = nn.Sequential(nn.Linear(4, 4), Counts())
    model[1].register_full_backward_hook(lambda module, given, output: None)
    Beside(threads, model, pipe={"num_stages": 2, "split": "uniform"}).step(3, X, TARGET)


def test_hooks_of_all_modules_are_refused_by_pipeline():
    from torch.nn.modules.module import register_module_forward_hook

    handle = register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(TracingError, match="register_module_forward_hook has registered hooks for all modules"):
            pipeline(Blocks())
    finally:
        handle.remove()
    assert Pipe.from_sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh())).num_stages == 2


class RegistersOnAValue(Blocks):
    def forward(self, x):
        x = self.first(x)
        x.register_hook(lambda gradient: gradient * 2)
        pipe_split()
        return self.last(self.second(x))


def test_a_hook_on_a_value_in_forward_is_refused_with_the_line_or_kept_with_its_part(threads):
    with pytest.raises(TracingError, match="registers a hook on a traced value") as caught:
        pipeline(RegistersOnAValue())
    assert "x.register_hook" in str(caught.value)

    class Inside(nn.Module):
        def forward(self, x):
            x = torch.sin(x)
            x.register_hook(lambda gradient: gradient * 2)
            return x

    model = nn.Sequential(nn.Linear(4, 4), Inside(), nn.Linear(4, 4))
    both = Beside(threads, model, pipe={"num_stages": 2, "split": "uniform"})
    assert list(both.pipe.kept_whole) == ["1"]
    both.step(3, X, TARGET)


# Forward hooks that keep what a layer gives for a later part of forward: features taken by hooks.


FEATURES: dict[str, object] = {}


def alike(kind):
    """Two models with the same numbers: a copy would have the hooks of the first."""
    model, other = kind(), kind()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    return model, other


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


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("with_example", [False, True])
@pytest.mark.parametrize("kind", [InADict, BeforeTheCall, InAGlobal, InAList])
def test_what_they_keep_is_a_value_of_the_graph(kind, with_example, called_before):
    (model, plain), x, target = alike(kind), torch.randn(6, 4), torch.randn(6, 4)
    FEATURES.clear()
    if called_before:
        model(torch.randn(6, 4))
    kept = list(FEATURES.values())
    pipe = pipeline(model, MSE, **({"example_args": (x, target)} if with_example else {}))
    assert list(FEATURES.values()) == kept  # nothing of the trace is left
    assert not any(isinstance(each, fx.Proxy) for each in model.seen)
    assert_loss(pipe(x, target).detach(), MSE(plain(x), target))
    assert_same_gradients(pipe, plain)


def test_workers_compute_it(threads):
    model, plain = alike(InADict)
    Beside(threads, model, plain=plain).step(3, torch.randn(6, 4), torch.randn(6, 4))


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
