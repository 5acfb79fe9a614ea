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

def closure(power):
    return lambda output, target: ((output - target) ** power).mean()

torch.set_default_dtype(torch.float64)
cluster = local_cluster(2, threads=1)
pids = [worker.pid for worker in cluster.session.workers]
fork_server = open(f"/proc/{pids[0]}/stat").read().split()[3]
print(fork_server, *pids, flush=True)
model, inputs, target = Model(), Inputs(torch.randn(6, 4), 0.5), torch.randn(6, 4)
loss_fn = closure(2)
driver = PipelineDriver1F1B(pipeline(model, loss_fn), cluster)
loss = loss_fn(model(inputs), target)
loss.backward()
torch.testing.assert_close(driver.run(2, inputs, target), loss.detach(), rtol=1e-12, atol=0)
for name, parameter in model.named_parameters():
    torch.testing.assert_close(driver.get_grad(name), parameter.grad, rtol=1e-9, atol=1e-12)
print("same", flush=True)
"""

# An optimizer of the script: in one way to run it only, as it has each process import a second's worth of torch.
TRAINS = """
class Signs(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad.sign(), alpha=-group["lr"])

optimizer, plain = driver.instantiate_optimizer(Signs, lr=0.1), Signs(model.parameters(), lr=0.1)
optimizer.step()
plain.step()
torch.testing.assert_close(driver.run(2, inputs, target), loss_fn(model(inputs), target).detach(), rtol=1e-12, atol=0)
print("the same after an update", flush=True)
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

# torch.compile looked up what the classes and the loss use in the worker's own `__main__`, by the name of the module.
COMPILES = """
from torch.nn import functional as F

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

def scaled_loss(output, target):
    return F.mse_loss(output, target) * SCALE

class WithBlocks(torch.fx.Tracer):
    def is_leaf_module(self, module, name):
        return isinstance(module, Block) or super().is_leaf_module(module, name)

net, x, t = Net(), torch.randn(8, 4), torch.randn(8, 4)
pipe = pipeline(net, scaled_loss, tracer=WithBlocks)
compiled = PipelineDriver1F1B(pipe, cluster, compile={"backend": "aot_eager"}, loss_reduction="mean")
torch.testing.assert_close(compiled.run(2, x, t), scaled_loss(net(x), t).detach())
"""

# How a script is given to Python, its last lines, and its exit status. A notebook runs cells in the namespace of a main
# module that has no file.
ENDS = {
    "a file that raises while a step is under way": (
        "file",
        "driver.run_async(2, inputs, target)\nraise ValueError('on its own')",
        1,
    ),
    "a notebook that is gone at once": ("notebook", "import os; os._exit(4)", 4),
    "a stream that compiles and exits": ("stdin", f"{TRAINS}{COMPILES}\nsys.exit(3)", 3),
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


@pytest.mark.parametrize("end", ENDS)
def test_a_script_that_does_not_close_its_cluster_leaves_nothing(tmp_path, end):
    how, last, code = ENDS[end]
    text = f"{SCRIPT}{last}\n"
    cells = f"import __main__; exec(compile({text!r}, '<cell>', 'exec'), __main__.__dict__)"
    arguments = {"file": ["script.py"], "stdin": ["-"], "notebook": ["-c", cells]}[how]
    for name, content in (("beside.py", BESIDE), ("script.py", text)):
        (tmp_path / name).write_text(content)
    (tmp_path / "temporary").mkdir()
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        input=text if how == "stdin" else None,
        env=os.environ | {"TMPDIR": str(tmp_path / "temporary")},
        capture_output=True,
        text=True,
        timeout=280,
    )
    ended = time.monotonic()
    pids, *rest = done.stdout.splitlines() or [""]
    assert rest == ["same", "the same after an update"][: 1 + last.startswith(TRAINS)], done.stderr
    assert done.returncode == code, done.stderr
    assert how == "file" or "Traceback" not in done.stderr
    for pid in map(int, pids.split()):
        assert ends_soon(pid)
    assert time.monotonic() - ended < 60
    assert [each for each in (tmp_path / "temporary").iterdir() if not each.name.startswith("torchinductor")] == []
