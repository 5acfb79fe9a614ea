"""Takes turns: every round each contestant has one turn, in random order, while all others sleep."""

import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch

from exps.peers.contestant import Contestant

TOLERANCE = 1e-4  # of the norm of a gradient, and of the loss; float32, sums in another order


class Disagreement(Exception):
    """A contestant computed something else than the reference."""


@contextmanager
def started(contestants: Mapping[str, Contestant]) -> Iterator[None]:
    """Start them all, and end them all whatever happens."""
    with ExitStack() as stack:
        for contestant in contestants.values():
            stack.callback(contestant.close)
            contestant.start()
        yield


def differences(contestant: Contestant, reference: Contestant) -> dict[str, float]:
    """How far the loss and each gradient are from the reference, as a share of the reference; missing is infinite."""
    ours, theirs = contestant.gradients(), reference.gradients()
    found = {
        name: float((ours[name] - gradient).norm() / gradient.norm()) if name in ours else float("inf")
        for name, gradient in theirs.items()
    }
    found |= {name: float("inf") for name in ours if name not in theirs}
    found["loss"] = abs(contestant.loss() - reference.loss()) / abs(reference.loss())
    return found


def check(name: str, contestant: Contestant, reference: Contestant) -> float:
    """The greatest difference between a contestant and the reference after their last steps; raises if it is too great."""
    found = differences(contestant, reference)
    # "not <=" and not ">": a difference that is not a number is one too
    wrong = {what: value for what, value in found.items() if not value <= TOLERANCE}
    if wrong:
        lines = "".join(f"\n  {what}: {value:.1e} of its size" for what, value in sorted(wrong.items()))
        raise Disagreement(f"{name} does not compute what 1b computes; more than {TOLERANCE:.0e} off are:{lines}")
    return max(found.values())


def turn(contestant: Contestant, warm: int, steps: int) -> float:
    """Seconds of a step: the median of some, after others that bring the contestant back into the caches."""
    for _ in range(warm):
        contestant.step()
    return statistics.median(contestant.step() for _ in range(steps))


def take_turns(
    contestants: Mapping[str, Contestant],
    rounds: int,
    warm: int,
    steps: int,
    seed: int = 0,
    done: Callable[[int], None] = lambda round: None,
) -> dict[str, list[float]]:
    """Seconds by contestant, one number for each round."""
    order, shuffler = list(contestants), random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        shuffler.shuffle(order)
        for name in order:
            seconds[name].append(turn(contestants[name], warm, steps))
        done(number)
    return seconds


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """The first quartile, the median and the third.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    (2.0, 3.0, 4.0)
    """
    low, middle, high = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.25, 0.5, 0.75]).double())
    return float(low), float(middle), float(high)


def ratio(ours: list[float], theirs: list[float], samples: int = 4000) -> tuple[float, float, float]:
    """The ratio of the medians, and its 95 % interval by a bootstrap over rounds, which keeps each round's pair together.

    >>> ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    (2.0, 2.0, 2.0)
    """
    pair = torch.tensor([ours, theirs], dtype=torch.float64)
    chosen = torch.randint(len(ours), (samples, len(ours)), generator=torch.Generator().manual_seed(0))
    medians = pair[:, chosen].quantile(0.5, dim=-1)
    low, high = (medians[0] / medians[1]).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    middle = pair.quantile(0.5, dim=-1)
    return float(middle[0] / middle[1]), float(low), float(high)
