"""An error of pippy that ends a script is shown with the script's frames; whoever catches it has all frames."""

import subprocess
import sys

import pytest

from tests.forked_scripts import run_forked

MISTAKE = """
import sys
{before}
from pippy import PipeSplitWrapper, SplitPoint, annotate_split_points
from torch import nn

def split(model):
    annotate_split_points(model, {{"b": SplitPoint.END}})

try:
    split(nn.Sequential(nn.ReLU()))
except Exception as error:
    last = error
    raise {cause}
"""


def script(before="", cause=""):
    return MISTAKE.format(before=before, cause=cause)


SCRIPTS = {
    "plain": script(),
    "full": script(before="import os; os.environ['PIPPY_TRACEBACK'] = 'full'"),
    "hook": script(
        before="sys.excepthook = "
        "lambda kind, error, trace: print(trace.tb_next.tb_next, error.__cause__, file=sys.stderr)"
    ),
    "of Python": script(cause="ZeroDivisionError()"),
    "caused": script(cause="ValueError('b') from error"),
}


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What each script writes, which makes a mistake."""
    ended = run_forked(tmp_path_factory.mktemp("scripts"), SCRIPTS)
    assert {status for status, _ in ended.values()} == {1}, ended
    return {name: said for name, (_, said) in ended.items()}


def frames(text):
    return [line.rpartition(" in ")[2] for line in text.splitlines() if line.startswith("  File ")]


def test_a_script_that_ends_with_an_error_shows_its_own_lines(shown):
    assert frames(shown["plain"]) == ["<module>", "split"]
    last = shown["plain"].splitlines()[-1]
    assert last.startswith("pippy.ir.base.errors.MarkError: the model has no module named 'b'")


def test_all_frames_are_shown_where_the_environment_asks_for_them(shown):
    found = frames(shown["full"])
    assert found[:2] == ["<module>", "split"] and "annotate_split_points" in found[2:]


def test_another_hook_gets_the_short_error(shown):
    assert shown["hook"] == "None None\n"


def test_an_error_that_was_shown_keeps_its_frames_and_its_cause(tmp_path):
    """Of a real process, that goes on by itself."""
    (tmp_path / "script.py").write_text(script(cause="error from KeyError('b')"))
    asked = (
        "import traceback; print('kept', [each.name for each in traceback.extract_tb(sys.last_value.__traceback__)]); "
    )
    asked += "print(repr(sys.last_value.__cause__), sys.last_value.__suppress_context__)\n"
    done = subprocess.run(
        [sys.executable, "-i", "-q", "script.py"],
        cwd=tmp_path,
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path)},
        input=asked,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    kept, cause = done.stdout.splitlines()[:2]
    assert "annotate_split_points" in kept and cause == "KeyError('b') True"
    assert frames(done.stderr) == ["<module>", "<module>", "split"] and "direct cause" not in done.stderr


@pytest.mark.parametrize("name", ["of Python", "caused"])
def test_other_errors_are_shown_as_ever(shown, name):
    assert "annotate_split_points" in frames(shown[name]) and frames(shown[name])[-1] == "<module>"
