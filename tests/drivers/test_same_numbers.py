"""Models at random, with every habit that mixes micro-batches: three steps are those of the plain model, or are refused."""

import gc
from dataclasses import asdict
from itertools import combinations

import pytest

from exps.habits.example import draw
from exps.habits.judge import judge
from tests.drivers.thread_cluster import one_draws_at_a_time, thread_cluster


def pairs(seed):
    """The choices of an example, two at a time."""
    choices = asdict(draw(seed))
    parts = choices.pop("parts")
    for each in ("seed", "rows", "cuts", "whole"):
        del choices[each]
    return set(combinations(sorted([*map(str, choices.items()), *set(parts)]), 2))


def chosen(count, among=400):
    """So many examples that together have as many pairs of choices as twice as many at random."""
    left = {seed: pairs(seed) for seed in range(1, among + 1)}
    for _ in range(count):
        seed = max(left, key=lambda each: len(left[each]))
        yield seed
        covered = left.pop(seed)
        for each in left.values():
            each -= covered


SEEDS = list(chosen(50))


@pytest.mark.filterwarnings("ignore:.*degrees of freedom", "ignore:Using a target size")
@pytest.mark.parametrize("first", range(5))
def test_models_with_habits_are_equal_or_refused(first, monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda: 0)  # which closing a driver does, in each worker
    with one_draws_at_a_time(), thread_cluster(3) as workers:
        for seed in SEEDS[first::5]:
            example = draw(seed)
            verdict = judge(example, workers)
            assert not verdict.is_fault, f"python -m exps.same_numbers --seed {seed} --count 1: {verdict}\n{example}"
