"""Commands are called in this process, in a folder of their own; what they import from there is forgotten again."""

import sys

import pytest
from click.testing import CliRunner

from pippy.cli import main


@pytest.fixture
def pippy(tmp_path, monkeypatch):
    """``pippy("show model.py:Net", status=1)`` gives what the command prints, on both streams."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PIPPY_WORKERS", raising=False)
    path, modules = list(sys.path), set(sys.modules)

    def call(command, *more, status=0, input=None):
        done = CliRunner().invoke(main, [*command.split(), *more], input=input, prog_name="pippy")
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == status, done.output
        return done.output

    yield call
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
