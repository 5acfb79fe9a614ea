"""What a child of these tests holds. A file of its own: the child imports it, and nothing else of the tests."""

import os
import signal

import torch


class Answers:
    """Answers, fails and dies when told."""

    def fail(self):
        raise ValueError("this is why")

    def pid(self):
        return os.getpid()

    def pinned(self):
        return sorted(os.sched_getaffinity(0)), torch.get_num_threads()

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)


def refuse():
    raise ValueError("not made")
