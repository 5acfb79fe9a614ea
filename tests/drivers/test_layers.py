"""Lists of layers, and compiled or scripted parts, on workers."""

import copy

import pytest
import torch
from torch import nn

from pippy import LayerSpec, Pipe, PipelineDriver1F1B, SplitPoint, TiedLayerSpec, annotate_split_points, pipeline
from pippy.balance.balancer import Balancer
from pippy.drivers.base.errors import StepError
from pippy.ir.base.errors import InitializationError, TracingError
from tests.comparisons import Beside, assert_loss, assert_same_training


def test_workers_run_functions_among_layers(threads):
    torch.manual_seed(0)
    x, linear, last = torch.randn(6, 4).double(), nn.Linear(4, 5).double(), nn.Linear(10, 1).double()
    layers = [linear, torch.relu, lambda x: torch.cat([x, 2 * x], 1), lambda x: x.flip(1), last]
    pipe = Pipe.from_sequential(tuple(layers), nn.MSELoss(), cut=Balancer([3, 2]))
    driver = PipelineDriver1F1B(pipe, threads)
    loss = driver.run(3, x, x[:, :1])
    hidden = torch.relu(linear(x))
    assert_loss(loss, nn.functional.mse_loss(last(torch.cat([hidden, 2 * hidden], 1).flip(1)), x[:, :1]))
    torch.testing.assert_close(driver.get_grad("0.weight"), linear.weight.grad)


class Rotated(nn.Module):
    """Its constructor computes a buffer that is not saved, and initializes in its own way."""

    def __init__(self, width):
        super().__init__()
        self.lin = nn.Linear(width, width)
        nn.init.orthogonal_(self.lin.weight)
        self.scale = nn.Parameter(torch.full((width,), 2.0))
        self.register_buffer("table", torch.arange(width) / width, persistent=False)

    def forward(self, x):
        return torch.tanh(self.lin(x) * self.scale + self.table)


def logits(embedding, x):
    return x @ embedding.weight.T


def specs():
    embedding = "embedding", nn.Embedding, 16, 8
    return [
        TiedLayerSpec(*embedding),
        *(LayerSpec(Rotated, 8) for _ in range(4)),
        lambda x: x * 2,
        LayerSpec(nn.BatchNorm1d, 8),
        TiedLayerSpec(*embedding, forward_fn=logits),
    ]


def driver_of(cluster, counts):
    pipe = Pipe.from_sequential(specs(), nn.CrossEntropyLoss(), cut=Balancer(counts))
    return PipelineDriver1F1B(pipe.double(), cluster)


def plain_of(driver):
    """The model with a worker's numbers, made as nn.Sequential and functions make it, with torch alone."""

    class Plain(nn.Sequential):
        def forward(self, ids):
            x = self[0](ids)
            for layer in list(self)[1:5]:
                x = layer(x)
            return self[6](x * 2) @ self[0].weight.T

    layers = [nn.Embedding(16, 8), *(Rotated(8) for _ in range(4)), nn.Identity(), nn.BatchNorm1d(8)]
    plain = Plain(*layers).double()
    state = driver.state_dict()
    plain.load_state_dict({name: value for name, value in state.items() if name != "7.layer.weight"})
    return plain, state


def test_layers_are_made_where_they_are_used(threads):
    states = []
    for counts in ([8], [3, 5], [4, 4], [2, 2, 2, 2]):
        driver = driver_of(threads, counts)
        driver.initialize(seed=1)
        states.append(driver.state_dict())
    for state in states[1:]:
        assert [name for name in state if not torch.equal(state[name], states[0][name])] == []
    first, second = states[0]["1.lin.weight"], states[0]["2.lin.weight"]
    torch.testing.assert_close(first @ first.T, torch.eye(8).double(), atol=1e-5, rtol=0)
    assert not torch.equal(first, second)
    assert torch.equal(states[0]["1.scale"], torch.full((8,), 2.0).double())
    assert torch.equal(states[0]["7.layer.weight"], states[0]["0.weight"])
    assert states[0]["0.weight"].std() > 0.8


@pytest.mark.parametrize("counts", [[8], [2, 2, 2, 2]])
def test_they_train_as_the_plain_model(threads, counts):
    driver = driver_of(threads, counts)
    driver.initialize(seed=1)
    optimizer = driver.instantiate_optimizer(torch.optim.Adam, lr=0.05)
    plain, _ = plain_of(driver)
    ours = torch.optim.Adam(plain.parameters(), lr=0.05)
    driver.eval()
    plain.eval()
    ids, target = torch.arange(12) % 16, (torch.arange(12) * 7) % 16
    assert_same_training(driver, optimizer, plain, ours, 3, ids, target)


def test_a_tied_layer_is_one_storage_on_a_worker(threads):
    driver = driver_of(threads, [8])
    driver.initialize()
    (held,) = threads.engine.workers[0].drivers.values()
    stage = held.modules["submod_0"]
    assert stage.get_parameter("7.layer.weight") is stage.get_parameter("0.weight")


def test_a_layer_that_is_another_on_a_worker_is_refused(threads):
    def other():
        return nn.Linear(4, 4 if torch.empty(0).is_meta else 5)

    driver = PipelineDriver1F1B(Pipe.from_sequential([LayerSpec(other), nn.ReLU()]), threads)
    with pytest.raises(StepError, match=r"has 'weight' of shape \[4, 4\].*makes one of shape \[5, 4\] on a worker"):
        driver.initialize()
    with pytest.raises(InitializationError, match="function='no' is called with each module"):
        driver.initialize("no")


def test_a_function_is_called_with_the_layers_that_were_made(threads):
    def function(module):
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    driver = driver_of(threads, [4, 4])
    driver.initialize(function, seed=1)
    state = driver.state_dict()
    assert torch.equal(state["2.lin.bias"], torch.zeros(8).double())
    torch.testing.assert_close(
        state["2.lin.weight"] @ state["2.lin.weight"].T, torch.eye(8).double(), atol=1e-5, rtol=0
    )


# Models that torch.compile and torch.jit were called on, whole and in parts, train as the plain model.


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


def test_names_are_those_of_the_model_inside(threads):
    torch.manual_seed(0)
    compiled = torch.compile(Net())
    annotate_split_points(compiled, {"last": SplitPoint.BEGINNING})
    both = Beside(threads, compiled, torch.compile(nn.MSELoss()), plain=copy.deepcopy(compiled._orig_mod))
    both.optimize(torch.optim.SGD, lr=0.1)
    both.loss = nn.MSELoss()
    both.run(2, X, TARGET)
    both.update()
    both.driver.copy_to(compiled)
    both.same_state()
    torch.testing.assert_close(compiled._orig_mod.state_dict(), both.plain.state_dict())


@pytest.mark.parametrize("script", [torch.jit.script, lambda model: torch.jit.trace(model, X)])
def test_a_model_that_is_scripted_whole_is_refused(script):
    with pytest.raises(TracingError, match="give the module that it was made from"):
        pipeline(script(Net()), example_args=(X,))
