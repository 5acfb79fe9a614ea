"""A model with something of everything, and faults that are planted into the runtime: each changes one stage."""

import torch
from torch import nn
from torch.nn import functional as F

from pippy import pipe_split
from pippy.drivers.driver.steps import results
from pippy.drivers.plan.language.instructions import Receive, Send
from pippy.drivers.protocol.state import RestoreState, WorkerState
from pippy.drivers.worker import handlers
from pippy.drivers.worker.driver_state import DriverState
from pippy.drivers.worker.executor import BINDERS
from pippy.drivers.worker.gradients.gradient_sums import AddingUp
from pippy.drivers.worker.gradients.worker_optimizer import WorkerOptimizer
from pippy.drivers.worker.stage_call import StageCall

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


class Acts(nn.Module):
    """Three stages. ``act`` is done between the first two layers, in the first stage, and ``mix`` in the second one."""

    def __init__(self, act=torch.tanh, mix=None):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.act, self.mix = act, mix

    def forward(self, x):
        x = self.act(self.first(x))
        pipe_split()
        x = torch.tanh(self.second(x if self.mix is None else self.mix(x)))
        pipe_split()
        return self.last(x)


def _after(monkeypatch, owner, name, then):
    """Have ``then(self, result, *args)`` follow a method."""
    inner = getattr(owner, name)

    def method(self, *args, **kwargs):
        return then(self, inner(self, *args, **kwargs), *args)

    monkeypatch.setattr(owner, name, method)


def _bound_beside_stage(monkeypatch, kind, handle):
    """Have ``handle`` do what this kind of instruction does, on the worker that has the stage."""
    inner = BINDERS[kind]

    def bind(bound, each):
        plain, operands = inner(bound, each)
        return (handle if STAGE in bound.calls else plain), operands

    monkeypatch.setitem(BINDERS, kind, bind)


def gradient_scaled(monkeypatch):
    def scale(self, made, call, microbatch, *rest):
        for each in call.module.parameters() if call.name == STAGE and microbatch == 1 else ():
            each.grad.mul_(1.001)

    _after(monkeypatch, handlers, "backward", scale)


def gradient_of_input_scaled(monkeypatch):
    inner = handlers.give

    def give(step, gives, gradients):
        scaled = [
            each * 1.001 if each is not None and STAGE in (name or ("",))[0] else each
            for name, each in zip(gives, gradients)
        ]
        inner(step, gives, scaled)

    monkeypatch.setattr(handlers, "give", give)


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
    def only_own(self, at, worker, gradients, whole):
        arrived(self, at, worker, [None] * len(gradients), whole)

    def own_again(self, at, totals):
        take(self, at, totals if at in self.made else left.pop((id(self), at)))

    def leaving(self, name):
        for at, own in leave(self, name):
            left[id(self), at] = [None if each is None else each.clone() for each in own]
            yield at, own

    arrived, take, leave, left = AddingUp.arrived, AddingUp.take, AddingUp.leaving, {}
    monkeypatch.setattr(AddingUp, "arrived", only_own)
    monkeypatch.setattr(AddingUp, "take", own_again)
    monkeypatch.setattr(AddingUp, "leaving", leaving)


def value_of_other_microbatch(monkeypatch):
    kept = {}

    def exchange(step, key, *rest):
        handlers.receive(step, key, *rest)
        if "grad" not in key[0]:
            step.values[key] = kept.setdefault(key[0], step.values[key])

    _bound_beside_stage(monkeypatch, Receive, exchange)


def gradient_of_other_microbatch(monkeypatch):
    kept = {}

    def exchange(step, key, *rest):
        handlers.receive(step, key, *rest)
        if "grad" in key[0]:
            step.values[key] = kept.setdefault(key[0], step.values[key])

    _bound_beside_stage(monkeypatch, Receive, exchange)


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


def activation_rounded(monkeypatch):
    def send(step, key, *rest):
        if "grad" not in key[0]:
            step.values[key] = step.values[key].float().double()
        handlers.send(step, key, *rest)

    _bound_beside_stage(monkeypatch, Send, send)


def copy_not_stored(monkeypatch):
    inner = DriverState._restore_state

    def restore(self, body, number):
        changed = {
            place: each + 0.01 if (place.call, place.name) == ("submod_2", "shared") else each
            for place, each in body.state.tensors.items()
        }
        inner(self, RestoreState(WorkerState(changed)), number)

    monkeypatch.setattr(DriverState, "_restore_state", restore)
