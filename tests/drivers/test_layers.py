"""Lists of layers, on workers."""

import torch
from torch import nn

from pippy import Pipe, PipelineDriver1F1B
from pippy.balance.balancer import Balancer


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
