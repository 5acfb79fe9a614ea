"""Does `pippy.train` take longer than the loop by hand?

Question: how long is a step of `pippy.train`, compared with one of the loop that a script would write itself, which reads an
          item, calls `driver.run`, clips, steps the optimizer and the scheduler, and drops the gradients?
Command:  python -m exps.loop                           (from the root of the repository; --width, --steps, --rounds, --folder)
Method:   the same driver, data and optimizer; rounds of so many steps, in turn by hand and by `pippy.train`, each first in
          every other round; the median of the rounds. The data is a DataLoader that shuffles 4,096 rows. With ``--folder``,
          `pippy.train` also saves there once, at the end of each round, and the time of that counts.
Finding:  two cores, width 16, one run: a step takes 8.1 ms by hand and 8.8 ms by `pippy.train`, 1.08 of it. Both send the same
          messages; what `pippy.train` does beside them (the position in the data, the report of a step) is 0.7 ms.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pippy
from pippy import Pipe, PipelineDriver1F1B, RepeatingLoader, cluster

CHUNKS, ROWS, BATCH, MAX_NORM = 4, 4096, 32, 1.0


class Training:
    """A driver and what goes with it. A round of steps by hand or by `pippy.train` gives the seconds of a step."""

    def __init__(self, workers: Any, width: int) -> None:
        torch.manual_seed(0)
        stages = [nn.Sequential(nn.Linear(width, width), nn.ReLU()), nn.Linear(width, 1)]
        self.driver = PipelineDriver1F1B(Pipe.from_sequential(nn.Sequential(*stages), nn.MSELoss()), workers)
        self.optimizer = self.driver.instantiate_optimizer(torch.optim.AdamW, lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=10_000)
        self.data = DataLoader(
            TensorDataset(torch.randn(ROWS, width), torch.randn(ROWS, 1)), batch_size=BATCH, shuffle=True
        )

    def by_hand(self, steps: int) -> float:
        """As a script would write it."""
        begin, losses = time.perf_counter(), []
        items: Iterator[Any] = RepeatingLoader(self.data)
        for x, target in islice(items, steps):
            loss = self.driver.run(CHUNKS, x, target)
            self.driver.clip_grad_norm_(MAX_NORM)
            self.optimizer.step()
            self.scheduler.step()
            self.driver.zero_grad()
            losses.append(float(loss))
        return (time.perf_counter() - begin) / steps

    def by_train(self, steps: int, saves: bool) -> float:
        """As `pippy.train` does it."""
        folder = tempfile.mkdtemp() if saves else None
        begin = time.perf_counter()
        pippy.train(
            self.driver,
            self.data,
            self.optimizer,
            self.scheduler,
            chunks=CHUNKS,
            steps=steps,
            max_norm=MAX_NORM,
            folder=folder,
            progress=False,
        )
        took = time.perf_counter() - begin
        if folder is not None:
            shutil.rmtree(folder)
        return took / steps


def compare(width: int, steps: int, rounds: int, saves: bool) -> dict[str, list[float]]:
    """The seconds of a step, of each round."""
    found: dict[str, list[float]] = {"by hand": [], "pippy.train": []}
    with cluster(2, threads=1, pin=True) as workers:
        training = Training(workers, width)
        kinds: list[tuple[str, Callable[[], float]]] = [
            ("by hand", lambda: training.by_hand(steps)),
            ("pippy.train", lambda: training.by_train(steps, saves)),
        ]
        training.by_hand(5)
        for number in range(rounds):
            for name, run in kinds if number % 2 else kinds[::-1]:
                found[name].append(run())
    return found


def main() -> None:
    """Compare, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", action="store_true")
    given = parser.parse_args()
    print(f"{'width':>6}{'by hand ms':>12}{'train ms':>10}{'quotient':>10}")
    for width in given.width:
        found = compare(width, given.steps, given.rounds, given.folder)
        hand, train = (statistics.median(each) for each in found.values())
        print(f"{width:6}{hand * 1e3:12.2f}{train * 1e3:10.2f}{train / hand:10.3f}", flush=True)


if __name__ == "__main__":
    main()
