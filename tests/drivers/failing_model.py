"""A model whose stages fail on request. A part of the input has the request for each row, and so for a micro-batch."""

import copy
import ctypes
import os
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F

from pippy import MultiUseParameterConfig, pipe_split, pipeline
from pippy.drivers.driver.drivers import PipelineDriver
from pippy.ir.trace.tracer import PipeTracer
from tests.comparisons import assert_gradients, assert_loss
from tests.drivers.scarce import NO_MEMORY, be_scarce, cut_connections_to_siblings

FORWARD, BACKWARD, EXIT, SLOW, ENDLESS, UNSENDABLE, LOSS, UNREADABLE, CUT, SILENCE = range(1, 11)
NOWHERE = -1
BUSY, BUSY_FOR_LONG, ASLEEP = -2, -3, -4  # with Python's lock, in C


def hold_pythons_lock(how):
    """Compute for some seconds, or sleep for a minute, and let no other thread run meanwhile."""
    if how == ASLEEP:
        ctypes.PyDLL(None).sleep(60)
    else:
        sum(range({BUSY: 3 * 10**8, BUSY_FOR_LONG: 5 * 10**8}[how]))


class Raises(torch.autograd.Function):
    """Raises in its backward where its flag is set."""

    @staticmethod
    def forward(ctx, x, wrong):
        ctx.wrong = wrong
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.wrong:
            raise ArithmeticError("a backward that fails")
        return gradient, None


class Opaque:
    """A value that cannot be pickled, and so cannot be sent."""

    def __reduce__(self):
        raise ValueError("an opaque value stays where it is")


class Unreadable:
    """A value that can be pickled, and not be unpickled."""

    def __reduce__(self):
        return int, ("no number",)

    def __deepcopy__(self, memo):
        return self


@contextmanager
def slow_steps(cluster):
    """Stages that are told to be slow are so until the block ends. Without the block they are not."""
    flag = _flag(cluster.session.workers[0].pid)
    flag.touch()
    try:
        yield flag
    finally:
        flag.unlink(missing_ok=True)


@contextmanager
def slow_until_told(cluster, *words):
    """Such stages are slow until a dump has all these words: it is asked for when a step takes too long, and then again."""
    inner, end = cluster.session.dump, time.monotonic() + 60
    with slow_steps(cluster) as flag:

        def dump():
            while any(each not in (text := inner()) for each in words) and time.monotonic() < end:
                pass
            flag.unlink()
            return text

        with patch.object(cluster.session, "dump", dump):
            yield


def _be_slow():
    end = time.monotonic() + 60
    while _flag(os.getpid()).exists() and time.monotonic() < end:
        time.sleep(0.01)


def _flag(pid):
    """All workers of a cluster are of one session; those that are threads, of the one that all processes of pytest are of."""
    return Path(tempfile.gettempdir(), f"pippy-slow-{os.getsid(pid)}-{os.environ.get('PYTEST_XDIST_WORKER', '')}")


class Trap(nn.Module):
    """Lets its input through, unless the orders, rows of (trap, how), have one for this trap."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x, orders, note):
        mine = orders[orders[:, 0] == self.number]
        how = int(mine[0, 1]) if len(mine) else 0
        if how == FORWARD:
            raise ArithmeticError("a forward that fails")
        if how == EXIT:
            raise SystemExit("a forward that leaves")
        if how == SLOW:
            _be_slow()
        while how == ENDLESS:
            time.sleep(0.05)
        if how in (BUSY, BUSY_FOR_LONG, ASLEEP):
            hold_pythons_lock(how)
        if how >= NO_MEMORY:
            be_scarce(how)
        if how in (CUT, SILENCE):
            cut_connections_to_siblings(silently=how == SILENCE)
        note = Opaque() if how == UNSENDABLE else Unreadable() if how == UNREADABLE else note
        return Raises.apply(x, how == BACKWARD), note


class TrapLoss(nn.Module):
    """The mean of squares, which fails where the target is no number."""

    def forward(self, output, target):
        if bool(torch.isnan(target).any()):
            raise ArithmeticError("a loss that fails")
        return F.mse_loss(output, target)


class Tracer(PipeTracer):
    """Does not look into traps."""

    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, Trap) or super().is_leaf_module(m, module_qualified_name)


class Trapped(nn.Module):
    """Linear layers in stages, each behind a trap. The first and the last layer share their weight."""

    def __init__(self, stages=4, width=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(stages))
        self.traps = nn.ModuleList(Trap(stage) for stage in range(stages))
        self.layers[-1].weight = self.layers[0].weight

    def forward(self, x, orders):
        note = None
        for index, (layer, trap) in enumerate(zip(self.layers, self.traps)):
            if index:
                pipe_split()
            x, note = trap(torch.tanh(layer(x)), orders, note)
        return x


def trapped_pipe(model):
    """A Pipe of a `Trapped`, with a copy of the shared weight in each of its two stages."""
    spec = MultiUseParameterConfig.REPLICATE
    return pipeline(model, TrapLoss(), tracer=Tracer, multi_use_param_spec=spec)


def no_orders(rows):
    """Orders with which no stage fails."""
    return torch.full((rows, 2), NOWHERE)


def orders(rows, trap, how, row):
    """Orders for one row."""
    given = no_orders(rows)
    given[row] = torch.tensor([trap, how])
    return given


ROWS, CHUNKS = 6, 3  # two rows in each micro-batch


class Training:
    """A driver and the plain model beside it. Its first step fails as all others do: nothing is tried before."""

    def __init__(self, cluster, schedule="1f1b", check=False, **options):
        self.plain = Trapped()
        pipe = trapped_pipe(copy.deepcopy(self.plain))
        self.driver = PipelineDriver(pipe, cluster, schedule=schedule, check=check, **options)

    def step(self):
        """A good step on both sides."""
        x, target = torch.randn(ROWS, 8), torch.randn(ROWS, 8)
        mine = self.driver.run(CHUNKS, x, no_orders(ROWS), target)
        assert_loss(mine, F.mse_loss(self.plain(x, no_orders(ROWS)), target), rtol=1e-10, atol=0)

    def fail(self, how, trap=1, microbatch=1):
        """A step that fails."""
        return self.start(how, trap, microbatch).result()

    def start(self, how=0, trap=1, microbatch=1):
        target = torch.randn(ROWS, 8)
        if how == LOSS:
            target[2 * microbatch] = torch.nan
        given = orders(ROWS, trap, how, 2 * microbatch)
        return self.driver.run_async(CHUNKS, torch.randn(ROWS, 8), given, target)

    def check(self):
        """Gradients are those of the good steps, and a further step is right."""
        self.check_gradients()
        self.step()
        self.check_gradients()

    def check_gradients(self):
        assert_gradients(self.driver, self.plain, rtol=1e-9, atol=1e-12)
