"""How much time does the check of a driver's first step take?

Question: how long is the first step of a driver that checks itself, compared with one that does not, and with a later step?
Command:  python -m exps.first_step                    (from the root of the repository; --rounds, --steps)
Method:   two workers, pinned, one intra-op thread each, 1F1B, 8 micro-batches: a perceptron of two layers, and the decoder of
          `versus_torch` (tiny, small). In each round two fresh drivers of one Pipe run: with ``check=True`` and with
          ``check=False``, in random order. Timed are the first step, and ``--steps`` steps after it. Figures are medians over
          rounds, and in brackets the quarter and three quarters. ``trials`` are the steps that the check sends to workers: of a
          few rows, and of all rows; each is one message to each worker. The plain model runs in the script's process.
Finding:  two cores, busy (--rounds 3 --steps 4). Perceptron: 3 trials, first step 44.1 ms (43.3 to 44.6) checked and 7.5 not,
          a later step 2.7: the check takes 13 of those. Decoder, tiny: 9 trials, 303 ms (295 to 321), 20.5 and 9.4: 30 of
          them; small: 763 ms (742 to 790), 36 and 27: 27. Their loss is a function that calls torch's cross entropy: padding
          is tried, and the count that torch takes fits.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from exps.peers import gpt
from pippy import Pipe, PipelineDriver1F1B, SplitPoint, annotate_split_points, cluster, pipeline
from pippy.drivers.driver.check.trial_steps import TrialSteps

CHUNKS, ROWS, WIDTH = 8, 64, 64

Batch = tuple[torch.Tensor, torch.Tensor]


def perceptron() -> tuple[Pipe, Batch]:
    layers = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), nn.Linear(WIDTH, WIDTH))
    return Pipe.from_sequential(layers, nn.MSELoss()), (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))


def decoder(name: str) -> tuple[Pipe, Batch]:
    size = gpt.SIZES[name]
    model = gpt.model(size)
    annotate_split_points(model, dict.fromkeys(gpt.cuts(size, 2), SplitPoint.BEGINNING))
    return pipeline(model, gpt.loss_fn), gpt.batch(size)


MODELS: dict[str, Callable[[], tuple[Pipe, Batch]]] = {
    "perceptron": perceptron,
    "decoder, tiny": lambda: decoder("tiny"),
    "decoder, small": lambda: decoder("small"),
}


@contextmanager
def counted_trials() -> Iterator[list[None]]:
    """The trials that are sent inside."""
    inner, sent = TrialSteps._answers, list[None]()

    def run(self: TrialSteps, *args: Any, **kwargs: Any) -> Any:
        sent.append(None)
        return inner(self, *args, **kwargs)

    TrialSteps._answers = run  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        TrialSteps._answers = inner  # type: ignore[method-assign]


def seconds(driver: PipelineDriver1F1B, batch: Batch, steps: int) -> list[float]:
    """The seconds of each of some steps."""
    found = []
    for _ in range(steps):
        begin = time.perf_counter()
        driver.run(CHUNKS, *batch)
        found.append(time.perf_counter() - begin)
    return found


def measured(workers: Any, pipe: Pipe, batch: Batch, rounds: int, steps: int) -> tuple[dict[str, list[float]], int]:
    """The seconds of first steps, checked and not, and of later ones, in each round; and how many trials were sent."""
    found: dict[str, list[float]] = {"checked": [], "unchecked": [], "later": []}
    trials = 0
    for turn in range(rounds + 1):  # the first is not counted
        for check in random.sample((True, False), 2):
            driver = PipelineDriver1F1B(pipe, workers, check=check)
            with counted_trials() as sent:
                first, *later = seconds(driver, batch, steps + 1)
            driver.close()
            trials = max(trials, len(sent))
            if turn:
                found["checked" if check else "unchecked"].append(first)
                found["later"].append(statistics.median(later))
    return found, trials


def text(times: list[float]) -> str:
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle * 1e3:.1f} ({low * 1e3:.1f} to {high * 1e3:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(f"{'milliseconds':16}{'first, checked':>24}{'first':>24}{'later':>24}{'trials':>8}{'check / later step':>20}")
    with cluster(2, threads=1, pin=True) as workers:
        for name, make in MODELS.items():
            found, trials = measured(workers, *make(), given.rounds, given.steps)
            middle = {kind: statistics.median(each) for kind, each in found.items()}
            share = (middle["checked"] - middle["unchecked"]) / middle["later"]
            print(f"{name:16}" + "".join(f"{text(each):>24}" for each in found.values()) + f"{trials:8}{share:20.1f}")


if __name__ == "__main__":
    main()
