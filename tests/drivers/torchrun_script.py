"""A script for torchrun, or without: trains, and compares with plain training. "cut" as an argument: one more step hangs."""

import json
import os
import sys
import time

import torch
from torch.nn import functional as F

import pippy
from pippy import PipelineDriver1F1B, PipeTracer, PippyError, pipeline
from tests.comparisons import Beside
from tests.drivers.models import Chain, numbers_of_training

options = json.loads(os.environ.get("OPTIONS", "{}"))
driver_options = json.loads(os.environ.get("DRIVER_OPTIONS", "{}"))


class Slow(torch.nn.Module):
    def forward(self, x):
        print("in the step", flush=True)
        time.sleep(2.0)
        return x


class Whole(PipeTracer):
    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, Slow) or super().is_leaf_module(m, module_qualified_name)


class Hanging(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.chain, self.slow = Chain(stages=2), Slow()

    def forward(self, x):
        return self.slow(self.chain(x))


def train(cluster, stages=2, divide_state=False, **given):
    cut = {} if stages > 1 else {"split": "parameters", "num_stages": 1, "example_args": (torch.ones(8, 8),) * 2}
    both = Beside(cluster, Chain(stages), F.mse_loss, pipe=cut, **driver_options, **given)
    both.optimizers.append(both.driver.instantiate_optimizer(torch.optim.AdamW, lr=1e-2, divide_state=divide_state))
    both.optimizers.append(torch.optim.AdamW(both.plain.parameters(), lr=1e-2))
    for _ in range(5):
        both.run(4, torch.randn(8, 8), torch.randn(8, 8), rtol=1e-9, atol=0)
        both.update()
    both.same_state(rtol=0, atol=1e-12)
    both.driver.close()


def hang(cluster):
    driver = PipelineDriver1F1B(pipeline(Hanging(), F.mse_loss, tracer=Whole), cluster)
    try:
        driver.run(4, torch.randn(8, 8), torch.randn(8, 8))
    except PippyError as error:
        print("the step ended with", type(error).__name__, flush=True)
        raise


torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
with pippy.cluster(**options) as cluster:
    print("ready", *[address.pid for address in cluster.session.workers], flush=True)
    if sys.argv[1:] == ["cut"]:
        hang(cluster)
    else:
        train(cluster)
        train(cluster, stages=1, replicas=2, divide_state=True)
        print("equal to plain training", flush=True)
        print(numbers_of_training(cluster, **driver_options), flush=True)
print("rank", os.environ.get("RANK", "none"), "goes on", flush=True)
