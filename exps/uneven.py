"""Uneven stages and jitter: how much faster is a step if workers do something else while they wait for a value?

Question: one of four stages takes twice as long as the others, and the times of passes vary. How fast are
          the fixed schedules, the list scheduler with the stages' costs, and each of them with ``out_of_order=True``?
Command:  python -m exps.uneven                (from the root of the repository; --rounds, --chunks, --weights, --jitter)
Method:   the stages of this experiment SLEEP, as those of exps/bubbles.py, to measure only the order of the work. With
          jitter 0.5 each pass takes 0.5 to 1.5 times its time, evenly spread; the times of round n are the same for all
          contestants. All contestants of one setting are drivers on one cluster, and take turns, in random order, a step
          each round; the first two rounds are not counted. A step is timed by the controller.
Finding:  two cores, four workers, 16 micro-batches, 6 rounds. The time out of order as a share of the time in order, without
          and with jitter: fill_drain 0.947 and 0.947, zb_h1 0.995 and 0.993, zb_h2 0.992 and 1.003, list 1.010 and 0.997,
          1f1b 1.013 and 1.010. So it saves 5 % if the schedule has idle time to fill. On schedules that are already good the
          difference is smaller than the noise (quartiles 1 % to 7 % apart). It can be slower: 1f1b has no choice within its
          own memory, and was about 1 % slower in every setting, with passes of 5 to 20 ms; if stages do almost nothing, a
          computation takes about 60 microseconds more. The best of all is list in order without jitter (0.988 of zb_h2, the
          best fixed schedule), and zb_h2 in order with jitter. Out of order was at most 0.8 % faster than the best fixed
          schedule (zb_h2, without jitter). With 1:1:1:1 and jitter, measured with layers too small for W: fill_drain 0.956,
          1f1b 1.009. The slow stage limits all of them: it takes 480 of the 540 ms of a step.
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
from pippy.drivers.plan import Costs

TIMES = (0.005, 0.0055, 0.0045)  # of a stage of weight 1: F, I, W
SCHEDULES = ("fill_drain", "1f1b", "zb_h1", "zb_h2", "list")


class Uneven(nn.Module):
    """A stage that sleeps ``weight`` times as long as others, more or less. ``turn`` says which round it is, in its data."""

    def __init__(self, stage: int, weight: float, jitter: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.stage, self.weight, self.jitter = stage, weight, jitter
        self.accumulates: Any = None
        self.weights_due: list[float] = []

    def seconds(self, turn: int, microbatch: int) -> list[float]:
        """The times of F, I and W in this micro-batch."""
        dice = random.Random(f"{turn} {self.stage} {microbatch}")
        return [each * self.weight * (1 + self.jitter * (2 * dice.random() - 1)) for each in TIMES]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turn, microbatch = int(x[0, 0]), int(x[0, 1])
        forward, inputs, weights = self.seconds(turn, microbatch)
        if self.accumulates is None:
            # The gradient of the weight arrives in W, and its arrival takes that long.
            self.accumulates = torch.autograd.graph.get_gradient_edge(self.linear.weight).node
            self.accumulates.register_prehook(lambda _: time.sleep(self.weights_due.pop(0)))
        self.weights_due.append(weights)  # backwards keep the order of the forwards
        time.sleep(forward)
        y = SleepingGradient.apply(self.linear(x), inputs)
        return torch.cat([x[:, :2].detach(), y[:, 2:]], dim=1)


def batch(turn: int, chunks: int) -> torch.Tensor:
    """Data that contains its round and its micro-batch."""
    x = torch.zeros(chunks, ROWS, WIDTH)
    x[..., 0] = turn
    x[..., 1] = torch.arange(chunks)[:, None]
    return x.flatten(0, 1)


def costs(weights: list[float]) -> Costs:
    """The mean times of the stages. The first stage's inputs need no gradient, so its whole backward is W."""
    forward, inputs, backward = TIMES
    return Costs(
        forward=[each * forward for each in weights],
        backward_input=[0.0] + [each * inputs for each in weights[1:]],
        backward_weight=[weights[0] * (inputs + backward)] + [each * backward for each in weights[1:]],
    )


def measure(workers: Any, weights: list[float], jitter: float, chunks: int, rounds: int) -> dict[str, list[float]]:
    """The seconds of each contestant's steps, round by round."""
    drivers = {}
    for schedule in SCHEDULES:
        options = {"costs": costs(weights), "memory": 2 * len(weights)} if schedule == "list" else {}
        for out_of_order in (False, True):
            stages = [Uneven(stage, weight, jitter) for stage, weight in enumerate(weights)]
            pipe = Pipe.from_sequential(nn.Sequential(*stages), nn.MSELoss())
            name = schedule + (", out of order" if out_of_order else "")
            drivers[name] = PipelineDriver(pipe, workers, schedule=schedule, out_of_order=out_of_order, **options)
    found: dict[str, list[float]] = {name: [] for name in drivers}
    dice = random.Random(0)
    for turn in range(rounds + 2):
        x = batch(turn, chunks)
        for name in dice.sample(list(drivers), len(drivers)):
            begin = time.perf_counter()
            drivers[name].run(chunks, x, x)
            if turn >= 2:
                found[name].append(time.perf_counter() - begin)
    for driver in drivers.values():
        driver.close()
    return found


def print_table(found: dict[str, list[float]]) -> None:
    """Medians, quartiles, and each contestant compared with the best fixed schedule and with itself in order."""
    fixed = {name: statistics.median(each) for name, each in found.items() if "order" not in name and name != "list"}
    best = min(fixed, key=fixed.__getitem__)
    print(f"{'contestant':26}{'step ms':>9}  {'quartiles':16}{'of ' + best:>12}{'of in order':>13}")
    for name, seconds in found.items():
        low, middle, high = statistics.quantiles(seconds, n=4)
        own = name.removesuffix(", out of order")
        beside = statistics.median([mine / theirs for mine, theirs in zip(seconds, found[best])])
        order = statistics.median([mine / theirs for mine, theirs in zip(seconds, found[own])])
        spread = f"{low * 1e3:.1f}–{high * 1e3:.1f}"
        print(
            f"{name:26}{middle * 1e3:9.1f}  {spread:16}{beside:12.3f}{order:13.3f}"
            if own != name
            else f"{name:26}{middle * 1e3:9.1f}  {spread:16}{beside:12.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=float, nargs="+", default=[1, 2, 1, 1])
    parser.add_argument("--chunks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--jitter", type=float, nargs="+", default=[0.0, 0.5])
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    print(f"stages that sleep: F, I, W of weight 1: {', '.join(f'{each * 1e3:g} ms' for each in TIMES)}")
    with cluster(len(options.weights), threads=1) as workers:
        for chunks in options.chunks:
            for jitter in options.jitter:
                weights = ":".join(f"{each:g}" for each in options.weights)
                print(f"\nstages {weights}, {chunks} micro-batches, jitter ±{jitter:.0%}")
                print_table(measure(workers, options.weights, jitter, chunks, options.rounds))


if __name__ == "__main__":
    main()
