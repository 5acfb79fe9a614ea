"""What a first step costs a process of a real cluster, as counts that do not depend on the clock: modules and memory.

A module more is paid for in each worker: one that a fork imports is shared with no other.
"""

import json
import socket

import pytest

from tests.test_imports import python

# The optimizer writes down what its process has imported, with the memory in KiB that it shares with no other process.
SCRIPT = """
import json, os, subprocess, sys
from pathlib import Path
import torch
from torch import nn
from pippy import Pipe, PipelineDriver1F1B, cluster
from pippy.errors import DriverError, OptimizerError

folder, engine, place = sys.argv[1:]

class Noting(torch.optim.AdamW):
    def step(self, closure=None):
        super().step(closure)
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        private = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
        (Path(folder) / f"{os.getpid()}.json").write_text(json.dumps({"modules": list(sys.modules), "private": private}))

options, joining = {}, []
if engine == "joined":
    secret = f"{folder}/secret"
    options = {"join": place, "secret_file": secret}
    command = [sys.executable, "-m", "pippy", "worker", "--join", place, "--secret-file", secret, "--threads", "1"]
    joining = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(2)]
with cluster(2, **options, **({} if joining else {"threads": 1}), start_timeout=200.0) as workers:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    pipe = Pipe.from_sequential(model, nn.MSELoss())
    driver = PipelineDriver1F1B(pipe, workers)
    optimizer = driver.instantiate_optimizer(Noting, lr=0.1)
    driver.run(4, torch.randn(8, 8), torch.randn(8, 8))
    optimizer.step()
    optimizer.zero_grad()
    driver.run(4, torch.randn(8, 8), torch.randn(8, 8))
    own, refused = torch.optim.SGD(model.parameters(), lr=0.1), []
    for each in (own.step, own.zero_grad):
        try:
            each()
        except (DriverError, OptimizerError) as error:
            refused.append(str(error))
    pids = [each.pid for each in workers.session.workers]
print(json.dumps({"workers": pids, "refused": refused, "dynamo": "torch._dynamo" in sys.modules}))
for each in joining:
    each.wait()
"""
LOADED = """
import sys
from pippy.drivers.engines.connected_worker import load
from pippy.drivers.engines.local.local_cluster import WORKER
load(WORKER)
print(*sys.modules)
"""
MOST_MODULES = {
    "local": 10,
    "joined": 60,
}  # beside those of all workers; a local one has 3, and 30 of 46 are of the command
MOST_MEMORY = 40 << 10  # KiB. A worker has 20 MiB; with torch._dynamo 92 MiB


def first_step(engine, folder):
    """What each worker notes after the first step and the first step of an optimizer, and what the script says of itself."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    told = json.loads(python(SCRIPT, str(folder), engine, place))
    return [json.loads((folder / f"{pid}.json").read_text()) for pid in told["workers"]], told


@pytest.mark.parametrize("engine", ["local", "joined"])
def test_a_first_step_with_an_optimizer_imports_next_to_nothing(engine, tmp_path):
    loaded = set(python(LOADED).split())
    workers, script = first_step(engine, tmp_path)
    assert len(workers) == 2 and not script["dynamo"]
    step, zero_grad = script["refused"]
    assert step.startswith("this SGD can update nothing") and zero_grad.startswith("zero_grad() asks for .grad")
    for worker in workers:
        new = set(worker["modules"]) - loaded
        assert not {each for each in new if each.startswith(("torch._dynamo", "sympy", "pippy.ir.trace"))}
        assert len(new) <= MOST_MODULES[engine], sorted(new)
        assert engine == "joined" or worker["private"] < MOST_MEMORY
