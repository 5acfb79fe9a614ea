"""The experiment on slices runs on a small size, and counts what it measures."""

import pytest
import torch

from exps import slices
from tests.drivers.thread_cluster import thread_cluster


@pytest.mark.filterwarnings("ignore:the 2 stages are uneven")  # of so small a model
def test_counted_bytes_are_measured_and_fall_with_the_slices():
    ids = torch.randint(slices.WORDS, (2, 128))
    call = {"input_ids": ids, "target": ids}
    with thread_cluster(2) as workers:
        made = slices.drivers(slices.pipe_of(2, length=128, width=32, layers=2), workers, [1, 4])
        peaks = {count: slices.counted(driver, 2, call)[0] for count, driver in made.items()}
        assert slices.measured(made[4], 2, call) == peaks[4]
        found = slices.times(made, 2, call, rounds=1)
    assert peaks[4][0] < peaks[1][0]
    assert {count: len(its) for count, its in found.items()} == {1: 1, 4: 1}
