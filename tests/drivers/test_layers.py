"""Lists of layers, on workers."""

import pytest
import torch
from torch import nn

from pippy import LayerSpec, Pipe, PipelineDriver1F1B, TiedLayerSpec
from pippy.balance.balancer import Balancer
from pippy.drivers.base.errors import StepError
from pippy.ir.base.errors import InitializationError
from tests.comparisons import assert_same_training


def test_workers_run_functions_among_layers(threads):
    torch.manual_seed(0)
    x, linear, last = torch.randn(6, 4).double(), nn.Linear(4, 5).double(), nn.Linear(10, 1).double()
    layers = [linear, torch.relu, lambda x: torch.cat([x, 2 * x], 1), lambda x: x.flip(1), last]
    pipe = Pipe.from_sequential(tuple(layers), nn.MSELoss(), cut=Balancer([3, 2]))
    driver = PipelineDriver1F1B(pipe, threads)
    loss = driver.run(3, x, x[:, :1])
    hidden = torch.relu(linear(x))
    expected = nn.functional.mse_loss(last(torch.cat([hidden, 2 * hidden], 1).flip(1)), x[:, :1])
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
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
