"""What the command line says when something is wrong."""

import subprocess
import sys
import traceback
from importlib.metadata import version

import click
import pytest
from click.testing import CliRunner

from pippy.cli import main, problems
from pippy.cli.problems import CommandGroup, own_trace
from pippy.drivers.plan.language.errors import ArgumentError
from pippy.ir.base.errors import TracingError


@click.group(cls=CommandGroup)
def failing():
    pass


@failing.command()
@click.argument("what")
def fail(what):
    raise {"pippy": TracingError("what, why, remedy"), "schedule": ArgumentError("p"), "bug": KeyError("x")}.get(
        what, KeyboardInterrupt()
    )


@pytest.mark.parametrize(
    ("what", "status", "said"),
    [("pippy", 1, "Error: what, why, remedy\n"), ("schedule", 1, "Error: p\n"), ("Ctrl-C", 130, "Interrupted\n")],
)
def test_a_mistake_is_a_message_and_a_status(what, status, said):
    done = CliRunner().invoke(failing, ["fail", what])
    assert (done.exit_code, done.output) == (status, said)


def test_an_error_in_pippy_itself_keeps_its_traceback():
    done = CliRunner().invoke(failing, ["fail", "bug"])
    assert isinstance(done.exception, KeyError)


def test_a_torch_that_is_missing_is_said(pippy, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert (
        pippy("show m.py:Net", status=1) == "Error: torch is not installed here; `pippy doctor` says what is needed\n"
    )


def test_a_command_that_does_not_exist(pippy):
    assert "Did you mean 'schedule'?" in pippy("shedule", status=2)


def test_every_command_has_examples_and_is_named_by_the_page():
    for name, command in main.commands.items():
        assert "Examples:" in command.help, name
        assert f"pippy {name}" in command.help, name


def test_help_without_arguments(pippy):
    assert "Examples:" in pippy("schedule", status=2)


def test_the_version(pippy):
    assert pippy("--version") == f"pippy, version {version('pippy-compiler')}\n"


def test_python_dash_m():
    done = subprocess.run([sys.executable, "-m", "pippy", "nothing"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: python -m pippy")
    assert "No such command 'nothing'" in done.stderr


def outer(function):
    return function()


def inner():
    raise ValueError("here")


def test_the_traceback_begins_with_what_is_not_ours(monkeypatch):
    """`outer` stands for pippy's frames that call the user's code, and at the end for those that it called."""
    try:
        outer(inner)
    except ValueError as error:
        trace = error.__traceback__
    names = [each.name for each in traceback.extract_tb(own_trace(trace))]
    assert names == ["test_the_traceback_begins_with_what_is_not_ours", "outer", "inner"]
    assert problems.LIBRARY.name == "pippy"


def test_frames_of_pippy_at_the_end_are_left_out_unless_all_are_asked_for(tmp_path):
    from pippy.drivers.plan import make_schedule

    try:
        outer(lambda: make_schedule("none", workers=1, chunks=1))
    except LookupError as error:
        trace = error.__traceback__
    names = [[each.name for each in traceback.extract_tb(own_trace(trace, whole=whole))] for whole in (False, True)]
    assert names[0][1:] == ["outer", "<lambda>"]
    assert names[1][1:] == ["outer", "<lambda>", "make_schedule"]
