"""Freed memory stays in the process: the next tensor of that size takes no page faults."""

import os
import resource

import torch

from pippy.drivers.base.process import keep_freed_memory

SIZE = 1 << 25


def usual_faults():
    """The page faults of a tensor, at most, in half of the cases: the first ones find no piece that is large enough."""
    found = []
    for _ in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(SIZE // 4)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return sorted(found)[len(found) // 2]


def test_later_tensors_take_no_page_faults():
    """In a process of its own: its settings last as long as it does."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            keep_freed_memory()
            os.write(writing, str(usual_faults()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as told:
        found = int(told.read())
    os.waitpid(pid, 0)
    assert found < 16
