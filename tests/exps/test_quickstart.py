"""The quick starts run as a newcomer runs them, and train what plain PyTorch trains."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def printed(*arguments):
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def trained(layers, forward, x, target):
    """The losses that plain PyTorch prints."""
    optimizer = torch.optim.AdamW([parameter for layer in layers for parameter in layer.parameters()], lr=1e-2)
    for step in range(31):
        loss = nn.functional.mse_loss(forward(*layers, x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            yield loss.item()


def with_skip(first, middle, last, x):
    skip = torch.relu(first(x))
    return last(torch.relu(middle(skip)) + skip)


def without_skip(first, last, x):
    return last(torch.relu(first(x)))


@pytest.mark.parametrize("script, arguments", [("quickstart_local.py", []), ("quickstart_torchrun.py", TORCHRUN)])
def test_a_quick_start_trains_as_plain_pytorch_does(script, arguments):
    losses = re.findall(r"loss (\S+)$", printed(*arguments, f"exps/{script}"), re.MULTILINE)
    torch.manual_seed(0)
    x, target = torch.randn(64, 16), torch.randn(64, 1)
    if script == "quickstart_local.py":
        layers, forward = [nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 1)], with_skip
    else:
        layers, forward = [nn.Linear(16, 32), nn.Linear(32, 1)], without_skip
    expected = list(trained(layers, forward, x, target))
    torch.testing.assert_close([float(each) for each in losses], expected, atol=2e-3, rtol=0)
