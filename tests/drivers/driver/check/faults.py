"""A model with something of everything, and faults that are planted into the runtime: each changes one stage."""

import torch
from torch import nn
from torch.nn import functional as F

from pippy import pipe_split
from pippy.drivers.driver.steps import results
from pippy.drivers.protocol.parameters import Store
from pippy.drivers.worker.driver_state import DriverState
from pippy.drivers.worker.executor import Executor, StageCall
from pippy.drivers.worker.gradients import gradients
from pippy.drivers.worker.gradients.gradient_sums import GradientSums
from pippy.drivers.worker.gradients.worker_optimizer import WorkerOptimizer

STAGE = "submod_1"


class Net(nn.Module):
    """Three stages: a weight that two of them hold, dropout, and a buffer that counts rows."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Parameter(torch.randn(6, 6) / 3)
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x):
        x = F.linear(torch.tanh(self.first(x)), self.shared)
        pipe_split()
        self.rows.add_(x.shape[0])
        x = self.dropout(torch.tanh(self.second(x)))
        pipe_split()
        return self.last(torch.tanh(F.linear(x, self.shared)))


def _after(monkeypatch, owner, name, then):
    """Have ``then(self, result, *args)`` follow a method."""
    inner = getattr(owner, name)

    def method(self, *args, **kwargs):
        return then(self, inner(self, *args, **kwargs), *args)

    monkeypatch.setattr(owner, name, method)


def gradient_scaled(monkeypatch):
    def scale(self, made, call, microbatch, *rest):
        for each in call.module.parameters() if call.name == STAGE and microbatch == 1 else ():
            each.grad.mul_(1.001)

    _after(monkeypatch, Executor, "_backward", scale)


def gradient_of_input_scaled(monkeypatch):
    inner = Executor._give

    def give(self, gives, gradients):
        scaled = [
            each * 1.001 if each is not None and STAGE in (name or ("",))[0] else each
            for name, each in zip(gives, gradients)
        ]
        inner(self, gives, scaled)

    monkeypatch.setattr(Executor, "_give", give)


def microbatch_dropped(monkeypatch):
    inner = Executor._backward

    def backward(self, call, microbatch, *rest):
        before = [None if each.grad is None else each.grad.clone() for each in call.module.parameters()]
        inner(self, call, microbatch, *rest)
        if call.name == STAGE and microbatch == 1:
            for each, gradient in zip(call.module.parameters(), before):
                each.grad = gradient

    monkeypatch.setattr(Executor, "_backward", backward)


def buffer_updated_twice(monkeypatch):
    inner = StageCall.run

    def run(self, inputs):
        if self.name == STAGE and not getattr(self.module, "again", False):
            self.module.__dict__["again"] = True
            inner(self, inputs)
        return inner(self, inputs)

    monkeypatch.setattr(StageCall, "run", run)


def weight_of_loss_wrong(monkeypatch):
    inner = results.loss_weights
    monkeypatch.setattr(results, "loss_weights", lambda *args: tuple(each * 1.001 for each in inner(*args)))


def copies_not_added_up(monkeypatch):
    def own(self, number, unsummed, transport, *rest):
        return {key: each for key, each in unsummed.items() if each is not None}

    monkeypatch.setattr(GradientSums, "of", own)


def value_of_other_microbatch(monkeypatch):
    kept = {}

    def exchange(self, made, key, *rest):
        if "grad" not in key[0] and STAGE in self.calls:
            self.values[key] = kept.setdefault(key[0], self.values[key])

    _after(monkeypatch, Executor, "_receive", exchange)


def gradient_of_other_microbatch(monkeypatch):
    kept = {}

    def exchange(self, made, key, *rest):
        if "grad" in key[0] and STAGE in self.calls:
            self.values[key] = kept.setdefault(key[0], self.values[key])

    _after(monkeypatch, Executor, "_receive", exchange)


def stale_parameters(monkeypatch):
    inner = StageCall.run

    def run(self, inputs):
        if self.name != STAGE:
            return inner(self, inputs)
        stale = {name: each * 0.999 for name, each in self.module.named_parameters()}
        return torch.func.functional_call(self.module, stale, tuple(inputs))

    monkeypatch.setattr(StageCall, "run", run)


def other_rate(monkeypatch):
    inner = WorkerOptimizer.step

    def step(self, gradients, options):
        for group in self.optimizer.param_groups:
            group["lr"] *= (
                1.01 if any(each.shape == (6,) for each in group["params"]) and len(group["params"]) == 2 else 1
            )
        inner(self, gradients, options)

    monkeypatch.setattr(WorkerOptimizer, "step", step)


def accumulated_twice(monkeypatch):
    inner = gradients._add

    def add(found, key, more):
        inner(found, key, more)
        if more is not None and more.shape == (6,) and len(found) <= 2:
            inner(found, key, more)

    monkeypatch.setattr(gradients, "_add", add)


def activation_rounded(monkeypatch):
    inner = Executor._send

    def send(self, key, *rest):
        if STAGE in self.calls and "grad" not in key[0]:
            self.values[key] = self.values[key].float().double()
        inner(self, key, *rest)

    monkeypatch.setattr(Executor, "_send", send)


def copy_not_stored(monkeypatch):
    inner = DriverState._store

    def store(self, body, number):
        changed = {
            place: each + 0.01 if (place.call, place.name) == ("submod_2", "shared") else each
            for place, each in body.tensors.items()
        }
        inner(self, Store(changed), number)

    monkeypatch.setattr(DriverState, "_store", store)
