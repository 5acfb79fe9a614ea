"""Which torch the short suite of `make newest` takes."""

import pytest

from tests.distributions import ROOT
from tests.newest_torch import SUITE, newest_cpu_build, pinned_torch


def test_the_pinned_version_is_that_of_torch_alone():
    assert str(pinned_torch("torchvision==0.28.0\ntorch==2.13.0\nfaketorch==9.0\n")) == "2.13.0"


@pytest.mark.parametrize(
    "versions, newest",
    [
        ("2.15.0, 2.9.1+cpu, 2.13.0+cpu, 2.13.0", "2.13.0+cpu"),  # by number, and not by letters; no other build
        ("2.13.0+cpu, 2.14.1+cpu", "2.14.1+cpu"),
        ("2.15.0, 2.14.0+cu130", None),
    ],
)
def test_the_newest_build_for_the_cpu_is_taken(versions, newest):
    found = newest_cpu_build(f"torch (2.15.0)\nAvailable versions: {versions}\n  INSTALLED: 2.16.0+cpu\n")
    assert (found and str(found)) == newest


def test_the_short_suite_is_there():
    assert all((ROOT / each).is_file() for each in SUITE)
