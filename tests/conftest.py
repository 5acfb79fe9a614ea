"""Every test runs on one intra-op thread, so that its numbers do not depend on the machine's size."""

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("default")


@pytest.fixture
def in_float64():
    """Models are built in float64, where a wrong gradient does not hide in rounding."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def seeded():
    """Models are built alike in every run."""
    torch.manual_seed(0)
