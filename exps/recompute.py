"""Forwards that are computed again: how much longer is a step, and what does it save to do so before the gradient comes?

Question: in fill-drain, F = R = 1 and B = 2, a step of n workers and m micro-batches takes 3(m+n-1) units; with recompute
          4m+3(n-1), and 4(m+n-1) if a forward is computed again only when the gradient is here. Do workers keep to that?
Command:  python -m exps.recompute             (from the root of the repository; --workers, --chunks, --unit, --rounds)
Method:   the stages SLEEP, as those of exps/bubbles.py: a unit in each forward, two in each backward. All contestants are
          drivers on one cluster, and take turns, in random order, a step each round; the first two rounds are not counted. A
          step is timed by the controller. "late" is a program with R after the receive, given to a driver as it is.
Finding:  two cores that were busy with other work, four workers, 8 micro-batches, a unit of 100 ms, 4 rounds; medians in units.
          Steps take 4 to 7 % longer than simulated, in the order of the simulation. fill_drain: never 35.2 (simulated 33),
          always 43.5 (41), late 46.7 (44), except_last 42.5 (40). 1f1b: 34.3 (33), 43.1 (41), 46.5 (44), 39.7 (38), where
          the last stage computes nothing again. To compute again before the gradient is here saves 3.2 of 46.7 units; it hides
          the R of all stages but the last one's. With "always" each worker holds one micro-batch, and not up to 8 or 4.
"""

import argparse
import random
import statistics
import time
from typing import Any

import torch
from torch import nn

from exps.bubbles import ROWS, WIDTH, SleepingGradient
from pippy import Pipe, PipelineDriver, cluster
from pippy.drivers.lowering.lower import lower
from pippy.drivers.plan import Program, add_communication, make_schedule, simulate

SCHEDULES = ("fill_drain", "1f1b")
MODES = ("never", "always", "always, late", "except_last")


class Sleeping(nn.Module):
    """A stage that sleeps a unit in its forward, and two in its backward."""

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.linear, self.unit = nn.Linear(WIDTH, WIDTH), unit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.unit)
        return SleepingGradient.apply(self.linear(x), 2 * self.unit)


def program_of(pipe: Pipe, schedule: str, mode: str, workers: int, chunks: int) -> Program:
    """The lowered program of a contestant."""
    made = make_schedule(schedule, workers=workers, chunks=chunks, checkpoint=mode.removesuffix(", late"))
    lowered = lower(pipe, made).program
    return add_communication(lowered, early_recompute=not mode.endswith("late"))


def measure(opened: Any, programs: dict[str, Program], pipe: Pipe, rounds: int) -> dict[str, list[float]]:
    """The seconds of each contestant's steps."""
    drivers = {name: PipelineDriver(pipe, opened, schedule=program) for name, program in programs.items()}
    found: dict[str, list[float]] = {name: [] for name in drivers}
    dice = random.Random(0)
    for turn in range(rounds + 2):
        for name in dice.sample(list(drivers), len(drivers)):
            x = torch.zeros(programs[name].chunks * ROWS, WIDTH)
            begin = time.perf_counter()
            drivers[name].run(programs[name].chunks, x, x)
            if turn >= 2:
                found[name].append(time.perf_counter() - begin)
    for driver in drivers.values():
        driver.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--unit", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    stages = [Sleeping(options.unit) for _ in range(options.workers)]
    pipe = Pipe.from_sequential(nn.Sequential(*stages), nn.MSELoss())
    programs = {
        f"{schedule}, {mode}": program_of(pipe, schedule, mode, options.workers, options.chunks)
        for schedule in SCHEDULES
        for mode in MODES
    }
    with cluster(options.workers, threads=1) as opened:
        found = measure(opened, programs, pipe, options.rounds)
    print(f"{options.workers} workers, {options.chunks} micro-batches, a unit of {options.unit * 1e3:g} ms")
    print(f"{'contestant':26}{'simulated':>10}{'measured':>10}  {'quartiles':14}{'peak':>8}")
    for name, seconds in found.items():
        units = sorted(each / options.unit for each in seconds)
        low, middle, high = statistics.quantiles(units, n=4)
        peak = " ".join(map(str, programs[name].peak_live))
        print(f"{name:26}{simulate(programs[name]).makespan:10g}{middle:10.1f}  {f'{low:.1f}–{high:.1f}':14}{peak:>8}")


if __name__ == "__main__":
    main()
