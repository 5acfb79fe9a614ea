"""How long does a step take under torchrun and on Ray on one host, beside workers that the script has started?

Two workers with one thread each, two stages with little to compute, and four micro-batches whose activation and gradient
are 16 MiB each. Four ways, in turns: "workers" without torchrun; "Ray", on one that the script starts; "torchrun", where
workers of a host share memory; "torchrun, RPC" with transport="rpc", which is how they passed values before, and how those of
two hosts do.

    python exps/one_host.py [--rounds 3]

Finding, on two virtual cores, medians of three rounds: 259 ms (half of the steps 249 to 276), 252 (245 to 275), 226 (218 to
247). So torchrun is no slower than workers of the script. Most of a step is not passing values between stages: these compute,
and the script's process sends 128 MiB of inputs and targets. Why RPC took less here was not looked into: in exps/transport.py
values of up to 4 MiB go four times as fast through memory. Ray was not in that run.
"""

import argparse
import os
import statistics
import subprocess
import sys
from time import perf_counter

import torch
from torch import nn

import pippy
from pippy import PipelineDriver1F1B, pipe_split, pipeline

WIDTH, CHUNKS, BYTES = 64, 4, 16 << 20
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
WAYS = {
    "workers": ([], {}),
    "Ray": ([], {"ENGINE": "ray"}),
    "torchrun": (TORCHRUN, {}),
    "torchrun, RPC": (TORCHRUN, {"TRANSPORT": "rpc"}),
}


class Net(nn.Module):
    """Two layers that take little time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        pipe_split()
        return self.last(x)


def steps() -> None:
    """The script that is measured: it prints the milliseconds of each step."""
    torch.set_num_threads(1)
    rows = CHUNKS * BYTES // 4 // WIDTH
    with pippy.cluster(2, threads=1, transport=os.environ.get("TRANSPORT"), engine=os.environ.get("ENGINE")) as cluster:
        driver = PipelineDriver1F1B(pipeline(Net(), nn.MSELoss()), cluster)
        x, target = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
        for number in range(9):
            started = perf_counter()
            driver.run(CHUNKS, x, target)
            if number > 1:
                print("step", (perf_counter() - started) * 1e3, flush=True)


def measured(options: list[str], environment: dict[str, str]) -> list[float]:
    """The milliseconds of the steps in one run of the script."""
    command = [sys.executable, *options, __file__, "--steps"]
    run = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return [float(line.split()[1]) for line in run.stdout.splitlines() if line.startswith("step")]


def compare(rounds: int) -> None:
    """Print what each way takes."""
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, (options, environment) in WAYS.items():
            found[name] += measured(options, environment)
    for name, times in found.items():
        low, _, high = statistics.quantiles(times, n=4)
        print(f"{name:<14} {statistics.median(times):6.0f} ms, half of the steps {low:.0f} to {high:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", action="store_true", help="run the script that is measured")
    given = parser.parse_args()
    if given.steps:
        steps()
    else:
        compare(given.rounds)


if __name__ == "__main__":
    main()
