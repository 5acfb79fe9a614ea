"""What a worker says that it waits for, where no program runs."""

from types import SimpleNamespace

import pytest
import torch

from pippy.drivers.protocol.gradients import GradientBucket, ReplicatedParameter
from pippy.drivers.worker.gradients.gradient_sums import GradientSums
from pippy.drivers.worker.state.kept_states import KEPT_NUMBER
from pippy.drivers.worker.worker import Worker


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, "the gradients of 'weight', from worker 1"),
        (1, "'weight', updated, from worker 0"),
        (KEPT_NUMBER, "the copy of the state of worker 1"),
    ],
)
def test_each_kind_of_message_has_a_name(number, said):
    bucket = GradientBucket(0, (ReplicatedParameter("weight", ((0, "here"), (1, "there"))),))
    sums = GradientSums([bucket], index=0, tensor=lambda place: torch.zeros(1))
    gradients = SimpleNamespace(sums=sums)
    state = SimpleNamespace(generation=None, generating=None, gradients=gradients)
    assert Worker._named(None, state, None, (7, number, 1)) == said
