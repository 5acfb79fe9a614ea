"""A script for torchrun on several hosts: some schedules beside plain training, again if asked; a step that does not end."""

import json
import os
import time

import torch
from torch import nn
from torch.nn import functional as F

import pippy
from pippy import MultiUseParameterConfig, PipelineDriver, PipeTracer, PippyError, pipe_split, pipeline
from pippy.drivers.plan.orders.registry import REGISTRY
from tests.comparisons import Beside


class Gained(nn.Module):
    """A layer for each stage, and a gain that all of them use; the output layer is the embedding."""

    def __init__(self, stages):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(stages))
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for index, layer in enumerate(self.layers):
            if index:
                pipe_split()
            x = x + torch.tanh(layer(x)) * self.gain
        return x @ self.embedding.weight.t()


def loss_fn(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Endless(nn.Module):
    def forward(self, x):
        print("in the step", flush=True)
        time.sleep(600)
        return x


class Whole(PipeTracer):
    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, Endless) or super().is_leaf_module(m, module_qualified_name)


class Unending(nn.Module):
    """A stage for each worker; the last does not end."""

    def __init__(self, stages):
        super().__init__()
        self.layers, self.last = nn.ModuleList(nn.Linear(6, 6) for _ in range(stages)), Endless()

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            if index:
                pipe_split()
            x = layer(x)
        return self.last(x)


def train(cluster, schedule, stages, tokens, target, replicas=1):
    """A step of one schedule, beside plain training."""
    pipe = {"multi_use_param_spec": MultiUseParameterConfig.REPLICATE}
    model = Gained(stages * len(cluster) // replicas)
    both = Beside(cluster, model, loss_fn, pipe=pipe, schedule=schedule, replicas=replicas)
    assert both.pipe.replicated_params or replicas > 1, "no parameter has copies"
    both.step(2 * len(cluster), tokens, target)
    both.driver.close()


def train_all(cluster):
    tokens, target = torch.randint(11, (2, 2 * len(cluster) * 3, 5))
    with torch.no_grad():
        model = Gained(len(cluster))
        driver = PipelineDriver(pipeline(model), cluster, schedule="forward_only")
        torch.testing.assert_close(driver.run(4, tokens), model(tokens), rtol=1e-12, atol=0)
        driver.close()
    if len(cluster) % 2 == 0:
        train(cluster, "1f1b", 1, tokens, target, replicas=2)
    for name in os.environ["SCHEDULES"].split():
        each = REGISTRY[name]
        train(cluster, name, 2 if each.placement == "looped" else each.stages_per_worker, tokens, target)
        print(f"{name} equals plain training", flush=True)


torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
with pippy.cluster(**json.loads(os.environ.get("OPTIONS", "{}"))) as cluster:
    print("ready", *[address.pid for address in cluster.session.workers], flush=True)
    limit, cluster.session.timeout = cluster.session.timeout, 60.0  # what is lost comes later
    train_all(cluster)
    cluster.session.timeout = limit
    while (order := input()) in ("train", "step"):
        if order == "train":
            train_all(cluster)
            continue
        driver = PipelineDriver(pipeline(Unending(len(cluster)), F.mse_loss, tracer=Whole), cluster, check=False)
        try:
            driver.run(4, torch.randn(8, 6), torch.randn(8, 6))
        except PippyError as error:
            print("the step ended with", type(error).__name__, error, flush=True)
            raise
print("rank", os.environ.get("RANK", "none"), "goes on", flush=True)
