"""Does `run_async` hide the controller's time between two steps?

Question: between two steps the controller reads the answers and sends the next messages. How long are the workers without
          work meanwhile, and does `run_async`, which sends the next step while one runs, avoid this?
Command:  python -m exps.turnround                     (from the root of the repository; --workers, --steps, --times)
Method:   stages that sleep for a known time in their forward and in their backward, 1F1B, as many micro-batches as workers.
          Every step is recorded. The gap of a worker is the time from the end of its last instruction of a step to the start
          of its first instruction of the next. It is measured with ``run``, and with ``run_async`` one step ahead; the figures
          are medians over the steps. Worker 0 ends a step last, so its gap is only the controller's time. The gaps of the
          others also contain the rest of worker 0's step.
Finding:  two cores, two workers, 100 steps, passes of 0.5 and of 2 ms: worker 0 has no instruction for 1.3 and 1.6 ms between
          two steps with ``run``, and for 0.5 ms one step ahead, when the next message has already arrived. In this time it
          answers (with the records) and unpickles the message. Worker 1 has no instruction for 3.3 and 5.3 ms with
          ``run``, and for 0.7 and 0.6 ms one step ahead: it starts the next step while worker 0 ends this one.
"""

import argparse
import statistics
import time
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from exps.bubbles import SleepingGradient
from pippy import Pipe, PipelineDriver1F1B, cluster
from pippy.drivers.report.record import RecordedStep


class Sleeper(nn.Module):
    """Sleeps in its forward and in its backward, and computes next to nothing."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(8, 8), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return SleepingGradient.apply(self.linear(x), self.seconds)


def gaps(steps: list[RecordedStep]) -> list[float]:
    """For each worker, the median time between the instructions of one step and those of the next."""
    found: list[list[float]] = [[] for _ in steps[0].noted]
    for one, following in pairwise(steps):
        for worker, (before, after) in enumerate(zip(one.noted, following.noted)):
            found[worker].append(after.started - max(before.ends))
    return [statistics.median(each) for each in found]


def one_after_the_other(driver: Any, chunks: int, steps: int, x: torch.Tensor) -> None:
    for _ in range(steps):
        driver.run(chunks, x, x)


def one_ahead(driver: Any, chunks: int, steps: int, x: torch.Tensor) -> None:
    running = driver.run_async(chunks, x, x)
    for _ in range(steps - 1):
        following = driver.run_async(chunks, x, x)
        running.result()
        running = following
    running.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--times", type=float, nargs="+", default=[0.5, 2.0], help="milliseconds of each pass")
    options = parser.parse_args()
    print(f"{options.workers} workers, {options.steps} steps; median gap of each worker between two steps, in ms")
    with cluster(options.workers, threads=1) as workers:
        for milliseconds in options.times:
            stages = nn.Sequential(*(Sleeper(milliseconds / 1e3) for _ in range(options.workers)))
            driver = PipelineDriver1F1B(Pipe.from_sequential(stages, nn.MSELoss()), workers)
            x = torch.zeros(options.workers, 8)
            for way in (one_after_the_other, one_ahead):
                way(driver, options.workers, 5, x)
                with driver.record(limit=options.steps) as recording:
                    way(driver, options.workers, options.steps, x)
                found = "  ".join(f"{gap * 1e3:6.3f}" for gap in gaps(recording.steps))
                print(f"passes of {milliseconds:g} ms, {way.__name__.replace('_', ' '):20}  {found}", flush=True)
            driver.close()


if __name__ == "__main__":
    main()
