"""Which torch and which interpreters the short suite of `make newest` and `make pythons` takes."""

import sys

import pytest

from tests import short_suite
from tests.distributions import ROOT
from tests.short_suite import SUITE, interpreters, newest_cpu_build, on_python, pinned_torch


def test_the_pinned_version_is_that_of_torch_alone():
    assert str(pinned_torch("torchvision==0.28.0\ntorch==2.13.0\nfaketorch==9.0\n")) == "2.13.0"


@pytest.mark.parametrize(
    "versions, newest",
    [
        ("2.15.0, 2.9.1+cpu, 2.13.0+cpu, 2.13.0", "2.13.0+cpu"),  # by number, and not by letters; no other build
        ("2.13.0+cpu, 2.14.1+cpu", "2.14.1+cpu"),
        ("2.15.0, 2.14.0+cu130", None),
    ],
)
def test_the_newest_build_for_the_cpu_is_taken(versions, newest):
    found = newest_cpu_build(f"torch (2.15.0)\nAvailable versions: {versions}\n  INSTALLED: 2.16.0+cpu\n")
    assert (found and str(found)) == newest


def test_an_interpreter_is_looked_for_on_the_path_and_in_pyenv(tmp_path, monkeypatch):
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    for version in ("3.12.1", "3.12.7", "3.13.0"):
        (tmp_path / f"versions/{version}/bin").mkdir(parents=True)
        (tmp_path / f"versions/{version}/bin/python").touch()
    found = [f"{tmp_path}/versions/{version}/bin/python" for version in ("3.12.7", "3.12.1")]
    assert list(interpreters("3.12")) == ["python3.12", *found]
    assert list(interpreters("/opt/env/bin/python")) == ["/opt/env/bin/python"]


def test_a_python_that_is_missing_is_said_and_no_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert on_python("3.99") == 0
    assert "Not run on Python 3.99: it is not on this machine" in capsys.readouterr().out


def test_a_python_for_which_there_is_no_torch_is_said_and_no_failure(monkeypatch, capsys):
    monkeypatch.setattr(short_suite, "answers", lambda python, question: "torch" not in question)
    monkeypatch.setattr(short_suite, "found_by_pip", lambda python: None)
    assert on_python(sys.executable) == 0
    assert "pip finds no build of torch for the CPU" in capsys.readouterr().out


def test_the_short_suite_is_there():
    assert all((ROOT / each).exists() for each in SUITE)
