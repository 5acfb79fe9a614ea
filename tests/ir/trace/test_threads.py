"""Tracing changes nothing for other threads, and leaves nothing behind: not after an error, nor after an interrupt."""

import copy
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from pippy import pipe_split, pipeline
from pippy.ir.base.errors import TracingError


def patched_names():
    return (
        *(getattr(torch, name) for name in ("rand", "randn", "zeros", "empty", "ones", "finfo", "iinfo", "is_tensor")),
        vars(torch.autograd.Function)["apply"],
        torch.autocast.__enter__,
        nn.Module.__call__,
        nn.Module.__getattr__,
        torch.fx._symbolic_trace._Patcher,
        torch.fx._symbolic_trace._is_fx_tracing_flag,
        np.random.rand,
        math.sqrt,
        "training" in vars(nn.Module),
    )


@pytest.fixture(autouse=True)
def nothing_left_behind():
    before = patched_names()
    yield
    assert patched_names() == before


class Net(nn.Module):
    """A model that calls ``beside`` in the middle of its forward."""

    def __init__(self, beside=lambda: None):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.beside = [beside]

    def forward(self, x):
        x = nn.functional.dropout(self.a(x), 0.5, self.training) + torch.rand(x.size(0), 4)
        pipe_split()
        self.beside[0]()
        return self.b(x) * torch.arange(4)


def texts(pipe):
    return [str(pipe.split_gm.graph), *(str(stage.graph) for _, stage in pipe.stages())]


def test_two_threads_that_trace_at_the_same_time_make_the_same_pipes():
    models, start = [Net() for _ in range(8)], threading.Barrier(2)
    expected = texts(pipeline(models[0]))

    def trace(some):
        start.wait()
        return [texts(pipeline(model)) for model in some]

    with ThreadPoolExecutor(2) as threads:
        made = [each for result in threads.map(trace, (models[:4], models[4:])) for each in result]
    assert made == [expected] * 8


def beside_a_trace(work):
    """What ``work`` gives in a thread of its own while another is in the middle of a trace."""
    inside, done = threading.Event(), threading.Event()

    def wait():
        inside.set()
        assert done.wait(60)

    with ThreadPoolExecutor(1) as threads:
        tracing = threads.submit(pipeline, Net(wait))
        assert inside.wait(60)
        try:
            return work()
        finally:
            done.set()
            assert tracing.result().num_stages == 2


def draws():
    return [torch.rand(2).tolist(), random.random(), np.random.rand(), torch.randn(1).item()]


def test_random_numbers_beside_a_trace():
    def seed_and_draw():
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        return draws()

    expected = [seed_and_draw(), draws()]
    assert [beside_a_trace(seed_and_draw), draws()] == expected


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_what_another_thread_does_beside_a_trace():
    model = Net()

    def work():
        flags = model.training, model.eval().training, model.train().training
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = model.a(torch.ones(1, 4)).dtype
        doubled = Doubles.apply(torch.ones(1, requires_grad=True))
        return (
            flags,
            cast,
            model(torch.ones(2, 4)).shape,
            isinstance(torch.finfo(torch.half), torch.finfo),
            doubled.item(),
        )

    assert beside_a_trace(work) == ((True, False, True), torch.bfloat16, (2, 4), True, 2.0)


def test_numbers_that_others_draw_refuse_no_trace():
    drawing = Net(lambda: ThreadPoolExecutor(1).submit(draws).result())
    assert pipeline(drawing).num_stages == 2


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_ends_a_trace_restores_everything(error):
    def fail():
        raise error

    model = Net(fail)
    before = copy.copy(model.__dict__)
    with pytest.raises((TracingError, KeyboardInterrupt)):
        pipeline(model)
    assert model.__dict__ == before
    assert pipeline(Net()).num_stages == 2


def test_a_pipe_made_inside_of_a_traced_forward_is_refused():
    inner = Net()
    with pytest.raises(TracingError, match="make that Pipe before, outside of forward"):
        pipeline(Net(lambda: pipeline(inner)))
    assert pipeline(Net()).num_stages == 2


class KeepsItsMode(Net):
    def train(self, mode=True):
        self.seen.append(mode)
        super().train(mode)
        self.a.eval()
        return self

    seen: list[bool] = []


def test_other_threads_see_the_flags_while_train_is_tried():
    model, seen = KeepsItsMode(), []

    class Watched(list):
        def append(self, mode):
            with ThreadPoolExecutor(1) as threads:
                seen.append(threads.submit(lambda: [each.training for each in model.modules()]).result())

    model.seen = Watched()
    pipeline(model)
    assert seen == [[True, True, True]] * 2
