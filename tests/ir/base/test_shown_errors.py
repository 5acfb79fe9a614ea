"""An error of pippy that ends a script is shown with the script's frames; whoever catches it has all frames."""

import subprocess
import sys

import pytest

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


def ended(tmp_path, before="", cause="", flags=(), input="", **environment):
    """What a script that makes a mistake writes."""
    (tmp_path / "script.py").write_text(MISTAKE.format(before=before, cause=cause))
    command = [sys.executable, *flags, "script.py"]
    environment |= {"PATH": "", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, input=input, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == (0 if flags else 1), done.stderr
    return done.stdout + done.stderr


def frames(text):
    return [line.rpartition(" in ")[2] for line in text.splitlines() if line.startswith("  File ")]


def test_a_script_that_ends_with_an_error_shows_its_own_lines(tmp_path):
    shown = ended(tmp_path)
    assert frames(shown) == ["<module>", "split"]
    assert shown.splitlines()[-1].startswith("pippy.ir.base.errors.MarkError: the model has no module named 'b'")


def test_all_frames_are_shown_where_the_environment_asks_for_them(tmp_path):
    shown = frames(ended(tmp_path, PIPPY_TRACEBACK="full"))
    assert shown[:2] == ["<module>", "split"] and "annotate_split_points" in shown[2:]


def test_another_hook_gets_the_short_error(tmp_path):
    hook = "sys.excepthook = lambda kind, error, trace: print(trace.tb_next.tb_next, error.__cause__, file=sys.stderr)"
    assert ended(tmp_path, before=hook) == "None None\n"


def test_an_error_that_was_shown_keeps_its_frames_and_its_cause(tmp_path):
    asked = (
        "import traceback; print('kept', [each.name for each in traceback.extract_tb(sys.last_value.__traceback__)]); "
    )
    asked += "print(repr(sys.last_value.__cause__), sys.last_value.__suppress_context__)\n"
    said = ended(tmp_path, cause="error from KeyError('b')", flags=["-i", "-q"], input=asked)
    kept, cause = said.splitlines()[:2]
    assert "annotate_split_points" in kept and cause == "KeyError('b') True"
    assert frames(said) == ["<module>", "<module>", "split"] and "direct cause" not in said


@pytest.mark.parametrize("error", ["ZeroDivisionError()", "ValueError('b') from error"])
def test_other_errors_are_shown_as_ever(tmp_path, error):
    shown = ended(tmp_path, cause=error)
    assert "annotate_split_points" in frames(shown) and frames(shown)[-1] == "<module>"
