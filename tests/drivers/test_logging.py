"""What a script's handlers get of pippy's logging, and where what `forward` prints and logs on workers goes."""

import subprocess
import sys

SCRIPT = """
import logging, sys
import torch
from torch import nn
from pippy import PipelineDriver, PipeTracer, cluster, pipeline

class Speaking(nn.Module):
    def forward(self, x):
        print("printed", flush=True)
        logging.getLogger("mine").info("told")
        logging.getLogger("mine").warning("warned")
        return x * 1

class Tracer(PipeTracer):
    def is_leaf_module(self, module, name):
        return isinstance(module, Speaking) or super().is_leaf_module(module, name)

logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="script: %(name)s %(levelname)s %(message)s")
logging.getLogger("pippy").setLevel(logging.INFO)
pipe = pipeline(nn.Sequential(nn.Linear(2, 2), Speaking(), nn.Linear(2, 1)), nn.MSELoss(), split=["2"], tracer=Tracer())
with cluster(2) as workers:
    driver = PipelineDriver(pipe, workers, schedule="auto", check=False)
    for _ in range(12):
        driver.run(2, torch.ones(4, 2), torch.ones(4, 1))
"""


def test_the_script_s_handlers_get_pippy_s_records_and_not_those_of_forward_on_a_worker():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("script: ")]
    assert told and all(line.startswith("script: pippy.drivers.choice.auto INFO schedule='auto': ") for line in told)
    assert "printed" in done.stdout.splitlines()
    assert "warned" in done.stderr.splitlines() and "told" not in done.stderr
