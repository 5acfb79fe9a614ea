"""The line that shows what workers compile: on a terminal, while a call waits, and cleared afterwards."""

import io
import os
import sys

import pytest
import torch
from torch import nn

from pippy import PipelineDriver, pipeline
from pippy.drivers.session.told import CompileProgress
from pippy.drivers.worker.compiled.pieces import PieceCompiler
from tests.drivers.models import Chain
from tests.drivers.worker.test_inductor import layers, trained


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Waits:
    """A backend that waits for the test: its code is the graph."""

    def __init__(self, folder):
        self.folder = folder
        os.mkfifo(folder / "go")

    def __call__(self, graph, inputs):
        (self.folder / "go").open().close()  # this waits until another has it open for writing
        return graph

    def go_on(self):
        """Let all pieces be compiled from now on."""
        os.open(self.folder / "go", os.O_RDWR)


def test_the_line_follows_the_workers_and_is_cleared():
    terminal = Terminal()
    progress = CompileProgress(["worker0", "worker1"], terminal)
    progress.show(0, None)
    assert terminal.getvalue() == ""
    progress.show(0, (1, 3))
    progress.show(1, (0, 2))
    assert terminal.getvalue().endswith("\rcompiling: worker0 1/3, worker1 0/2\x1b[K")
    progress.show(0, None)
    assert terminal.getvalue().endswith("\rcompiling: worker0 1/3, worker1 0/2\x1b[K\rcompiling: worker1 0/2\x1b[K")
    progress.end()
    progress.end()
    assert terminal.getvalue().endswith("worker1 0/2\x1b[K\r\x1b[K")


def test_a_file_gets_nothing():
    file = io.StringIO()
    progress = CompileProgress(["worker0"], file)
    progress.show(0, (1, 3))
    progress.end()
    assert file.getvalue() == ""


def test_a_compiler_says_how_far_it_is():
    seen = []

    class Watched:
        def compile(self, piece, key, wait):
            seen.append(compiler.progress)
            return piece.module

    compiler = PieceCompiler(Watched())
    trained(layers(), compiler, halves=True)
    assert seen == [(0, 3), (1, 3), (2, 3)] and compiler.progress is None


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_a_step_that_compiles_shows_the_line_and_clears_it(cluster, monkeypatch, tmp_path, stream):
    """The pieces are compiled when both workers have told that they compile."""
    waits, session, told = Waits(tmp_path), cluster.session, set()

    def heard(worker, message):
        shown(worker, message)
        if message is not None and worker not in told:
            told.add(worker)
            if len(told) == 2:
                waits.go_on()

    shown = session.heard
    monkeypatch.setattr(session, "heard", heard)
    monkeypatch.setattr(session, "interval", 0.05)
    monkeypatch.setattr(sys, "stderr", stream)
    x = torch.randn(8, 8)
    driver = PipelineDriver(
        pipeline(Chain(2), nn.MSELoss()), cluster, world_size=2, compile={"backend": waits}, check=False
    )
    driver.run(4, x, x)
    assert told == {0, 1}
    written = stream.getvalue()
    if not stream.isatty():
        assert written == ""
    else:
        assert "\rcompiling: worker0 0/2, worker1 0/2\x1b[K" in written and written.endswith("\r\x1b[K")
    driver.run(4, x, x)
    assert stream.getvalue() == written
    driver.close()
