"""Backends of torch.compile for tests of compiling, and an operation that a test can hold up."""

import os
import threading
import time
from typing import Any

import torch

runs: list[Any] = []  # the compiled codes that this process has run


class Compiled:
    """Runs a graph, and notes that."""

    def __init__(self, graph):
        self.graph = graph

    def __call__(self, *values):
        runs.append(self.graph)
        return self.graph(*values)


class Waits:
    """A backend that waits for the test: its code is the graph."""

    def __init__(self, folder):
        self.folder = folder
        os.mkfifo(folder / "go")

    def __call__(self, graph, inputs):
        (self.folder / "begun").touch()
        (self.folder / "go").open().close()  # this waits until another has it open for writing
        return Compiled(graph)

    def wait_until_begun(self):
        """Wait until a piece is begun. Nothing is compiled before and after."""
        while not (self.folder / "begun").exists():
            time.sleep(0.01)

    def go_on(self):
        """Let all pieces be compiled from now on."""
        os.open(self.folder / "go", os.O_RDWR)


class Fails:
    """A backend that fails."""

    def __call__(self, graph, inputs):
        raise RuntimeError("no luck")


class GivesForward:
    """A backend that gives a method of the graph, as the examples of torch do."""

    def __call__(self, graph, inputs):
        return graph.forward


class CannotBeSent:
    """A backend whose code belongs to its process."""

    def __call__(self, graph, inputs):
        lock = threading.Lock()
        return lambda *values: lock and graph(*values)


class Held:
    """Whether `hold_up` waits now."""

    def __init__(self):
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()


held = Held()


@torch.library.custom_op("pippy_tests::hold_up", mutates_args=())
def hold_up(x: torch.Tensor) -> torch.Tensor:
    """Its input, in new memory, when the test lets it go on."""
    held.reached.set()
    held.go_on.wait(60)
    return x.clone()


hold_up.register_fake(torch.empty_like)
hold_up.register_autograd(lambda ctx, gradient: gradient)
