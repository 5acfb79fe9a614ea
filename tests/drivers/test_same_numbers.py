"""Models at random, with every habit that mixes micro-batches: three steps are those of the plain model, or are refused."""

import gc

import pytest

from exps.habits.example import draw
from exps.habits.judge import judge
from tests.drivers.thread_cluster import one_draws_at_a_time, thread_cluster


@pytest.mark.filterwarnings("ignore:.*degrees of freedom", "ignore:Using a target size")
@pytest.mark.parametrize("first", range(1, 101, 20))
def test_models_with_habits_are_equal_or_refused(first, monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda: 0)  # which closing a driver does, in each worker
    with one_draws_at_a_time(), thread_cluster(3) as workers:
        for seed in range(first, first + 20):
            example = draw(seed)
            verdict = judge(example, workers)
            assert not verdict.is_fault, f"python -m exps.same_numbers --seed {seed} --count 1: {verdict}\n{example}"
