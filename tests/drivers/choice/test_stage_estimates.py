"""The costs that are guessed before a step is measured."""

import pytest
import torch
from torch import nn

from pippy import pipeline
from pippy.balance.balancer import Balancer
from pippy.drivers.batch.divide_call import divide_call
from pippy.drivers.choice.given_limits import BEGIN, call_to_fit
from pippy.ir.pipe import Pipe, compiled_of

LOSS = nn.MSELoss()


class Ticks:
    """A clock for which a forward takes as many milliseconds as its layer says, and a backward three times as many."""

    now = 0

    @classmethod
    def read(cls):
        return cls.now * 1_000_000

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, cost):
            Ticks.now += cost
            ctx.cost = cost
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            Ticks.now += 3 * ctx.cost
            return gradient * 2, None


class Slow(nn.Linear):
    def __init__(self, cost):
        super().__init__(4, 4)
        self.cost = cost

    def forward(self, x):
        return Ticks.Layer.apply(super().forward(x), self.cost)


def costs_of(pipe, rows, chunks):
    x = torch.zeros(rows, 4)
    compiled = compiled_of(pipe)

    def divided(count):
        return divide_call(compiled, count, (x, x), {})

    call = call_to_fit(pipe, ((x, x), {}), divided, torch.device("cpu"), [])
    return call.estimate(chunks).costs


def balanced(split, loss_fn=LOSS, **how):
    x, model = torch.zeros(8, 4), nn.Sequential(Slow(10), Slow(20), Slow(40))
    example = (x, x) if loss_fn is not None else (x,)
    cut = Balancer(split, 2, loss_fn=loss_fn, example_args=example, clock=Ticks.read, **how)
    return Pipe.from_tracing(model, loss_fn=loss_fn, example_args=example, cut=cut, tracer=Leaves(), **how)


class Leaves(torch.fx.Tracer):
    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, Slow)


def test_measured_times_of_the_balancer_are_taken_by_the_size_of_the_micro_batch():
    pipe = balanced("time")
    assert [stage.layers for stage in pipe.balance.stages] == [2, 1]
    assert pipe.balance.seconds() == [pytest.approx((0.03, 0.09)), pytest.approx((0.04, 0.12))]
    costs = costs_of(pipe, rows=64, chunks=2)  # 32 rows, four times as many as the example has
    assert costs.forward == pytest.approx([0.12 + BEGIN, 0.16 + BEGIN])
    assert costs.backward_input == costs.backward_weight == pytest.approx([0.18 + BEGIN, 0.24 + BEGIN])


def test_without_measured_times_flops_are_taken():
    by_hand = pipeline(nn.Sequential(Slow(1), Slow(1)), nn.MSELoss(), split=[1, 1], tracer=Leaves())
    for pipe in (balanced("size"), by_hand):
        assert all(seconds < 0.001 for seconds in costs_of(pipe, rows=64, chunks=2).forward)
    assert balanced("time", None, output_loss_value_spec=False).balance.seconds() is None  # no backward was measured
