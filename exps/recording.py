"""How much time does recording take?

Question: how much longer does a step take while it is recorded?
Command:  python -m exps.recording                   (from the root of the repository; see --help)
Method:   one driver, one cluster, pinned; steps with and without recording take turns, in random order within each pair,
          and the difference is taken within pairs. Stages are linear layers whose computations take about a millisecond,
          or less with a smaller --width. The result is the median of the ratios, and its 95 % interval by a bootstrap.
Finding:  two cores, two workers, 8 micro-batches, 300 pairs: with computations of 1.1 to 1.2 ms a step is 1.0 % longer under
          1f1b (0.7 to 1.2 %) and 1.2 % under zb_h1 (0.7 to 1.7 %); with computations of 0.15 ms 3.1 and 3.2 %. That is 0.2
          to 0.4 ms a step: about a microsecond for each instruction, and 20 µs to send the records.
"""

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from pippy import Pipe, PipelineDriver, cluster
from pippy.drivers.report.record import Recording

Measured = TypeVar("Measured")


def pairs(driver: PipelineDriver, chunks: int, width: int, rows: int, count: int) -> list[tuple[float, float]]:
    """Seconds of steps without and with recording."""
    x = target = torch.randn(chunks * rows, width)

    def step(recorded: bool) -> float:
        start = time.perf_counter()
        if recorded:
            with driver.record():
                driver.run(chunks, x, target)
        else:
            driver.run(chunks, x, target)
        return time.perf_counter() - start

    return in_turns(step, count)


def in_turns(step: Callable[[bool], Measured], count: int) -> list[tuple[Measured, Measured]]:
    """What steps measure without and with something, in random order within each pair, after three pairs to warm up.

    >>> in_turns(lambda recorded: 2.5 if recorded else 1.0, count=2)
    [(1.0, 2.5), (1.0, 2.5)]
    """
    shuffler, found = random.Random(0), []
    for given in (False, True) * 3:
        step(given)
    gc.collect()
    for _ in range(count):
        order = [False, True]
        shuffler.shuffle(order)
        measured = {given: step(given) for given in order}
        found.append((measured[False], measured[True]))
    return found


def interval(ratios: list[float], samples: int = 2000) -> tuple[float, float, float]:
    """The median, and its 95 % interval by a bootstrap.

    >>> interval([1.5, 1.5, 1.5])
    (1.5, 1.5, 1.5)
    """
    drawn = random.Random(0)
    medians = sorted(statistics.median(drawn.choices(ratios, k=len(ratios))) for _ in range(samples))
    return statistics.median(ratios), medians[int(0.025 * samples)], medians[int(0.975 * samples)]


def computation(recording: Recording) -> float:
    """The median computation of a recorded step, in seconds."""
    return statistics.median(each for times in recording.steps[-1].durations().values() for each in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb_h1"])
    options = parser.parse_args()
    print(f"{'schedule':10}{'width':>7}{'computation':>14}{'step':>11}{'recorded':>10}   95 %")
    with cluster(options.workers, pin=True) as workers:
        for width in options.widths:
            layers = [nn.Linear(width, width) for _ in range(options.workers)]
            pipe = Pipe.from_sequential(nn.Sequential(*layers), nn.MSELoss())
            for schedule in options.schedules:
                driver = PipelineDriver(pipe, workers, schedule=schedule)
                gc.collect()
                found = pairs(driver, options.chunks, width, options.rows, options.pairs)
                with driver.record() as recording:
                    driver.run(options.chunks, *[torch.randn(options.chunks * options.rows, width)] * 2)
                middle, low, high = interval([recorded / plain for plain, recorded in found])
                step = statistics.median(plain for plain, _ in found)
                print(
                    f"{schedule:10}{width:7}{computation(recording) * 1e6:11.0f} µs{step * 1e3:8.2f} ms{middle - 1:10.2%}"
                    f"   {low - 1:.2%} to {high - 1:.2%}",
                    flush=True,
                )
                driver.close()


if __name__ == "__main__":
    main()
