"""Plain scripts, without a main guard: what is defined in them works on the workers, and nothing is left when they end."""

import os
import select
import subprocess
import sys
import time

import pytest

SCRIPT = """
import dataclasses, sys, torch
from torch import nn
from pippy import PipelineDriver1F1B, local_cluster, pipe_split, pipeline
from beside import Layer

FACTOR = 2.0

@dataclasses.dataclass
class Inputs:
    x: torch.Tensor
    scale: float

class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * FACTOR

    @staticmethod
    def backward(ctx, gradient):
        return gradient * FACTOR

@torch.fx.wrap
def scaled(x):
    return Scaled.apply(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = Layer(), nn.Linear(4, 4)

    def forward(self, inputs):
        x = scaled(self.first(inputs.x)) * inputs.scale
        pipe_split()
        return scaled(self.last(x))

class Signs(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad.sign(), alpha=-group["lr"])

def closure(power):
    return lambda output, target: ((output - target) ** power).mean()

torch.set_default_dtype(torch.float64)
cluster = local_cluster(2, threads=1)
print(*[worker.pid for worker in cluster.control.workers], flush=True)
model, inputs, target = Model(), Inputs(torch.randn(6, 4), 0.5), torch.randn(6, 4)
loss_fn = closure(2)
driver = PipelineDriver1F1B(pipeline(model, loss_fn), cluster)
optimizer, plain = driver.instantiate_optimizer(Signs, lr=0.1), Signs(model.parameters(), lr=0.1)
for _ in range(2):
    loss = loss_fn(model(inputs), target)
    plain.zero_grad()
    loss.backward()
    optimizer.zero_grad()
    torch.testing.assert_close(driver.run(2, inputs, target), loss.detach(), rtol=1e-12, atol=0)
    optimizer.step()
    plain.step()
print("same", flush=True)
"""

BESIDE = """
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).tanh()
"""

ENDS = {
    "forgets": ("", 0),
    "raises": ("raise ValueError('on its own')", 1),
    "exits": ("sys.exit(3)", 3),
    "is gone at once": ("import os; os._exit(4)", 4),
    "leaves a step under way": ("driver.run_async(2, inputs, target)", 0),
}


def ends_soon(pid):
    """Wait for a process that is not a child, by its handle."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 10)[0])
    finally:
        os.close(handle)


def run(command, folder, text=None):
    (folder / "beside.py").write_text(BESIDE)
    began = time.monotonic()
    done = subprocess.run(command, cwd=folder, input=text, capture_output=True, text=True, timeout=90)
    pids, *rest = done.stdout.splitlines() or [""]
    assert rest == ["same"], done.stderr
    assert time.monotonic() - began < 60
    for pid in map(int, pids.split()):
        assert ends_soon(pid)
    return done


@pytest.mark.parametrize("end", ENDS)
def test_a_script_that_does_not_close_its_cluster_leaves_nothing(tmp_path, end):
    line, code = ENDS[end]
    (tmp_path / "script.py").write_text(SCRIPT + line + "\n")
    done = run([sys.executable, "script.py"], tmp_path)
    assert done.returncode == code, done.stderr
    assert end == "raises" or "Traceback" not in done.stderr


@pytest.mark.parametrize("how", ["stdin", "command", "notebook"])
def test_a_script_need_not_be_a_file(tmp_path, how):
    """A notebook runs cells in the namespace of a main module that has no file."""
    cells = f"import __main__; exec(compile({SCRIPT!r}, '<cell>', 'exec'), __main__.__dict__)"
    command = {"stdin": ["-"], "command": ["-c", SCRIPT], "notebook": ["-c", cells]}[how]
    done = run([sys.executable, *command], tmp_path, SCRIPT if how == "stdin" else None)
    assert done.returncode == 0, done.stderr


COMPILED = """
import torch
from torch import nn
from torch.nn import functional as F
from pippy import PipelineDriver1F1B, local_cluster, pipe_split, pipeline

SCALE = 2.0

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
    def forward(self, x):
        return F.gelu(self.lin(x)) * SCALE

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Block(), nn.Linear(4, 4)
    def forward(self, x):
        x = self.a(x)
        pipe_split()
        return self.b(x)

def loss_fn(output, target):
    return F.mse_loss(output, target) * SCALE


class WithBlocks(torch.fx.Tracer):
    def is_leaf_module(self, module, name):
        return isinstance(module, Block) or super().is_leaf_module(module, name)

net = Net()
x, t = torch.randn(8, 4), torch.randn(8, 4)
with local_cluster(2, threads=1) as cluster:
    driver = PipelineDriver1F1B(pipeline(net, loss_fn, tracer=WithBlocks), cluster,
        compile={"backend": "aot_eager"}, loss_reduction="mean")
    print(torch.allclose(driver.run(2, x, t), loss_fn(net(x), t)))
"""


def test_a_script_whose_classes_and_loss_use_its_globals_can_be_compiled():
    """torch.compile looked those up in the worker's own `__main__`, by the name of the module."""
    done = subprocess.run([sys.executable, "-"], input=COMPILED, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True"], done.stderr
