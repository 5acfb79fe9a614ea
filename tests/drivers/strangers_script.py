"""A script for torchrun whose ranks pass all commands and values by RPC: steps, when they are asked for.

Rank 0 waits before it connects all ranks, so that strangers can come while they listen.
"""

import copy
import os

import torch
from torch.nn import functional as F

import pippy
from pippy import PipelineDriver1F1B, pipeline
from pippy.drivers.wire.messages import rpc
from tests.drivers.models import Chain


def wait_first(close_ports):
    """Print that all ranks listen, and wait for a line before they connect."""

    def waiting(*arguments):
        print("listening", flush=True)
        input()
        close_ports(*arguments)

    return waiting


def step(driver, plain):
    """A step, beside plain training."""
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    driver.zero_grad()
    plain.zero_grad()
    loss = driver.run(4, x, target)
    expected = F.mse_loss(plain(x), target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    for name, each in plain.named_parameters():
        torch.testing.assert_close(driver.gradients()[name], each.grad, rtol=1e-10, atol=1e-13)


rpc.close_ports = wait_first(rpc.close_ports)
torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
print(f"rank {os.environ['RANK']} is {os.getpid()}\n", end="", flush=True)  # at once: all ranks print
with pippy.cluster(threads=1, transport="rpc") as cluster:
    print("open", cluster.routes.far, flush=True)
    model = Chain(len(cluster))
    driver = PipelineDriver1F1B(pipeline(copy.deepcopy(model), F.mse_loss), cluster)
    while input() == "step":
        step(driver, model)
        print("equal to plain training", flush=True)
