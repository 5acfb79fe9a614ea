"""A few faults of the campaign in exps/faults.py on one cluster: each is noticed, and what follows is right."""

import random

import pytest

from exps.injected.gentle import gentle
from exps.injected.training import Training
from tests.drivers.processes import open_descriptors

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")
KINDS = ["exit", "no memory", "no descriptors", "no shared memory", "ctrl-c", "ctrl-c twice"]


def test_random_faults_of_every_kind_that_a_cluster_survives(cluster):
    rng = random.Random(1)
    rng.shuffle(KINDS)
    open_now = None
    for kind in KINDS:
        training = Training(cluster, rng)
        report = gentle(training, kind)
        assert not report.wrong, report
        training.driver.close()
        open_now = open_now or open_descriptors()
    assert open_descriptors() <= open_now
