"""Fixtures and settings for every test.

Each runs on one intra-op thread, so that its numbers do not depend on the machine's size. Each may send Ctrl-C to itself and to
the processes that it starts, though a shell ignores it for commands in the background, as `make test &` in a script.
"""

import gc
import os
import signal

import hypothesis
import pytest
import torch

from exps.peers import process
from pippy.drivers.engines.local import local_cluster
from tests.drivers.stand_by import standing_by
from tests.several_processes import SeveralProcesses, give_way, order

torch.set_num_threads(1)
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # or inductor compiles a program to try the processor
hypothesis.settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("default")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # which Python leaves so, and processes inherit
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--device", help="where workers of local clusters compute when a test names no device: cuda:0")


def pytest_configure(config):
    if device := config.getoption("--device"):
        local_cluster.DEFAULT_DEVICE = device


def pytest_xdist_make_scheduler(config, log):
    config.option.loadscopereorder = False
    return SeveralProcesses(config, log)


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):  # this is one of several processes
        items.sort(key=lambda item: order(item.nodeid))


def pytest_runtest_setup(item):
    if hasattr(item.config, "workerinput"):
        give_way(item.nodeid)


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Garbage is looked for among what a file's tests make, not among what was imported, as in workers that are processes."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def quick_clusters():
    """Local clusters and the contestants of the benchmarks start from one process that has imported torch."""
    with standing_by(process) as stand_by:
        yield stand_by


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
