"""A step that is sent ahead is at the workers before the one that runs is answered: by events and counts, not by time."""

import threading

import pytest
import torch
from torch import nn

from pippy import Pipe, PipelineDriver1F1B

BEGUN, RELEASED = threading.Event(), threading.Event()


class Gate(nn.Module):
    """Waits until it is released; of the same process as the test, because its workers are threads."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        BEGUN.set()
        assert RELEASED.wait(30)
        return self.linear(x)


@pytest.fixture
def gate():
    BEGUN.clear()
    RELEASED.set()
    yield
    RELEASED.set()


def test_the_next_step_is_in_every_inbox_before_this_one_is_answered(threads, gate):
    pipe = Pipe.from_sequential(nn.Sequential(Gate(), nn.Linear(4, 4)), nn.MSELoss())
    driver = PipelineDriver1F1B(pipe, threads)
    x = torch.randn(4, 4)
    first = driver.run(2, x, x)  # the program is there
    driver.zero_grad()
    RELEASED.clear()
    BEGUN.clear()
    running = driver.run_async(2, x, x)
    assert BEGUN.wait(30)  # worker 0 has taken its message, and is at its first forward
    ahead = [driver.run_async(2, x, x) for _ in range(3)]
    queues = [worker.context.messages for worker in threads.engine.workers[:2]]
    assert len(queues[0]) == 3 and len(queues[1]) in (3, 4)  # worker 1 may not have taken the first yet
    pending = running._posted.calls
    assert not any(pending[worker].done for worker in (0, 1)) and not RELEASED.is_set()
    RELEASED.set()
    assert all(torch.equal(step.result(), first) for step in [running, *ahead])
    assert [len(messages) for messages in queues] == [0, 0]
    driver.close()
