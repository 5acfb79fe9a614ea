"""A script for torchrun whose ranks pass all commands and values by RPC: steps, when they are asked for.

Rank 0 waits before it connects all ranks, so that strangers can come while they listen.
"""

import os

import torch
from torch.nn import functional as F

import pippy
from pippy.drivers.wire.messages import rpc
from tests.comparisons import Beside
from tests.drivers.models import Chain


def wait_first(close_ports):
    """Print that all ranks listen, and wait for a line before they connect."""

    def waiting(*arguments):
        print("listening", flush=True)
        input()
        close_ports(*arguments)

    return waiting


rpc.close_ports = wait_first(rpc.close_ports)
torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
print(f"rank {os.environ['RANK']} is {os.getpid()}\n", end="", flush=True)  # at once: all ranks print
with pippy.cluster(threads=1, transport="rpc") as cluster:
    print("open", cluster.routes.far, flush=True)
    both = Beside(cluster, Chain(len(cluster)), F.mse_loss)
    while input() == "step":
        both.zero_grad()
        both.step(4, torch.randn(8, 8), torch.randn(8, 8))
        print("equal to plain training", flush=True)
