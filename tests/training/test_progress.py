"""What is shown of a training."""

import builtins
import io
import os
import sys
import termios
import threading
from contextlib import redirect_stderr
from types import SimpleNamespace

import pytest

from pippy.balance.profile import ProfileProgress
from pippy.drivers.session.told import CompileProgress
from pippy.training import loop
from pippy.training.loop import Bar, Lines, TrainingProgress, progress_of
from pippy.training.result import StepReport


class Terminal(io.StringIO):
    def isatty(self):
        return True


def report(step, loss=0.5):
    return StepReport(step, 0, loss, None, (), 64, 640, 0.1)


def test_a_terminal_gets_a_bar_with_the_loss_and_rates(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    threads = set(threading.enumerate())
    shown = progress_of(True, 10, 4)
    assert isinstance(shown, Bar)
    monkeypatch.setattr(shown._bar, "mininterval", 0)
    monkeypatch.setattr(shown._bar, "miniters", 0)
    shown.show(report(5))
    shown.show(report(6, 0.25))
    shown.evaluated(6, {"loss": 0.125})
    shown.end()
    text = sys.stderr.getvalue()
    assert "6/10" in text and "loss=0.25" in text and "samples/s=" in text and "tokens/s=" in text
    assert "step 6: evaluation loss 0.125" in text
    assert set(threading.enumerate()) <= threads


def test_a_notebook_gets_a_bar_and_what_has_imported_its_library_does_not(monkeypatch):
    shell = SimpleNamespace(kernel=None)
    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    shown = progress_of(True, 10, 0)
    shown.end()
    assert isinstance(shown, Bar)
    shell = None
    assert isinstance(progress_of(True, 10, 0), Lines)


def test_a_log_gets_lines(monkeypatch, capsys):
    shown = progress_of(True, None, 0)
    assert isinstance(shown, Lines)
    shown.show(report(1))
    assert not capsys.readouterr().err
    monkeypatch.setattr(loop, "_PAUSE", 0.0)
    shown.show(report(2))
    first = capsys.readouterr().err
    assert first.startswith("step 2: loss 0.5, samples/s ") and ", tokens/s " in first and first.count("\n") == 1
    shown.end()
    assert not capsys.readouterr().err


def test_the_last_step_has_a_line(capsys):
    shown = Lines(3, 0)
    shown.show(report(3))
    shown.end()
    assert capsys.readouterr().err.startswith("step 3/3: loss 0.5")


def test_tqdm_is_not_needed(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    find = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("tqdm"):
            raise ImportError(name)
        return find(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert isinstance(progress_of(True, 3, 0), Lines)


@pytest.fixture
def screen(monkeypatch):
    """What a training, compiling and measuring show of themselves on a terminal."""
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    ours, its = os.openpty()
    termios.tcsetwinsize(its, (24, 80))
    with open(its, "w") as terminal:

        def shown():
            with redirect_stderr(terminal):
                training = progress_of(True, 3, 0)
                training.show(report(3))
                training.end()
                compiling = CompileProgress(["worker0"])
                compiling.show(0, (0, 1))
                compiling.end()
                measuring = ProfileProgress(1)
                measuring.step("0")
                measuring.end()
            terminal.write("the end")
            terminal.flush()
            text = ""
            while not text.endswith("the end"):
                text += os.read(ours, 1 << 16).decode()
            return text.removesuffix("the end")

        yield shown
    os.close(ours)


def test_a_terminal_shows_lines_that_change(screen):
    text = screen()
    assert "3/3 [" in text and "\rcompiling: worker0 0/1\x1b[K" in text and "\rprofiling 1/1: 0\x1b[K" in text


def test_a_dumb_terminal_gets_plain_lines_alone(screen, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    text = screen()
    assert text.startswith("step 3/3: loss 0.5, ") and text.count("\n") == 1 and text.endswith("\r\n")
    assert "\x1b" not in text


def test_tqdm_disable_leaves_all_of_it_out(screen, monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    assert screen() == ""


@pytest.mark.parametrize("stderr, wanted", [(None, True), (Terminal(), False)])
def test_where_nobody_looks_nothing_is_shown(monkeypatch, stderr, wanted):
    monkeypatch.setattr(sys, "stderr", stderr)
    assert type(progress_of(wanted, 3, 0)) is TrainingProgress
