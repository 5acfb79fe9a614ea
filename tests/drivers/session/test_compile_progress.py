"""The line that shows what workers compile: on a terminal, while a call waits, and cleared afterwards."""

import io

from pippy.drivers.session.compile_progress import CompileProgress
from pippy.drivers.worker.compiled.piece_compiler import PieceCompiler
from tests.drivers.worker.test_inductor import layers, trained


class Terminal(io.StringIO):
    def isatty(self):
        return True


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
