"""Runs a short suite elsewhere: on a newer torch, or on other Pythons, with what the machine has.

`make newest` takes the newest torch of which pip finds a build for the CPU, if it is newer than that of constraints.txt;
`make newest TORCH=2.14.1` takes that version, whatever build it is. `make pythons` takes each Python of PYTHONS that is on the
machine, and the newest torch of which pip finds a build for its CPU; builds for GPUs, which are gigabytes, are left alone. An
interpreter named by its path (`make pythons PYTHONS=/opt/env/bin/python`) is run as it is, if it has torch already.

All is installed into environments that are gone afterwards. That takes minutes, so it is no test of the suite.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version

from tests.distributions import ROOT

PYTHONS = ("3.12", "3.13", "3.14")
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "transformers", "einops")
SUITE = (
    "tests/ir/trace/test_questions.py",
    "tests/ir/trace/test_trace.py",
    "tests/ir/trace/test_values.py",
    "tests/ir/trace/test_exported.py",
    "tests/ir/run/test_checkpointed_parts.py",
    "tests/ir/halves",
    "tests/ir/loss/test_loss.py",
    "tests/drivers/test_driver.py",
    "tests/drivers/test_training.py",
    "tests/drivers/test_keyed_random.py",
    "tests/drivers/model/state/test_checkpoints.py",
    "tests/drivers/model/state/test_refused_checkpoints.py",
    "tests/drivers/placement/test_replicas.py",
    "tests/drivers/model/recovery/test_recovery.py",
    "tests/models/test_generation.py",
    "tests/models/test_written_here.py",
    "tests/exps/test_quickstart.py",
)


def pinned_torch(constraints: str) -> Version:
    """The version that the project is developed with."""
    found = re.search(r"^torch==(\S+)$", constraints, re.MULTILINE)
    assert found is not None
    return Version(found[1])


def newest_cpu_build(versions: str) -> Version | None:
    """The newest of what `pip index versions torch` prints that is built for the CPU alone; None if there is none."""
    found = re.search(r"^Available versions: (.*)$", versions, re.MULTILINE)
    every = map(Version, found[1].split(", ")) if found is not None else ()
    return max((each for each in every if each.local == "cpu"), default=None)


def found_by_pip(python: str) -> Version | None:
    """The newest torch for the CPU that pip finds for this interpreter."""
    listed = subprocess.run([python, "-m", "pip", "index", "versions", "torch"], capture_output=True, text=True)
    return newest_cpu_build(listed.stdout)


def interpreters(wanted: str) -> Iterator[str]:
    """Where the interpreter of this version may be, or the one that is named by its path."""
    if os.sep in wanted:
        yield wanted
        return
    yield f"python{wanted}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(pyenv.glob(f"versions/{wanted}.*/bin/python"), reverse=True))


def answers(python: str, question: str) -> bool:
    """Whether the interpreter is there, and runs this line to its end."""
    try:
        return subprocess.run([python, "-c", question], capture_output=True).returncode == 0
    except OSError:
        return False


def run_suite(python: str, torch: Version, folder: Path) -> int:
    """Run the short suite on this interpreter with this torch, installed below ``folder``; gives pytest's status."""
    others = re.sub(r"^torch==.*\n", "", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    (folder / "constraints.txt").write_text(others)
    subprocess.run([python, "-m", "venv", str(folder / "environment")], check=True)
    inside = str(folder / "environment/bin/python")
    pip = [inside, "-m", "pip", "install", "--quiet", "--constraint", str(folder / "constraints.txt")]
    subprocess.run([*pip, f"torch=={torch}", *TOOLS, "--editable", str(ROOT)], check=True)
    return run_inside(inside)


def run_inside(python: str) -> int:
    """Run the short suite in an environment that has all it needs but pippy; gives pytest's status."""
    versions = (
        "import sys, torch; print('A short suite on Python', sys.version.split()[0], 'and torch', torch.__version__)"
    )
    subprocess.run([python, "-c", versions], check=True)
    paths = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([python, "-m", "pytest", "-q", *SUITE], cwd=ROOT, env=paths).returncode


def on_newest_torch(version: str | None) -> int:
    """The short suite on this torch, or on the newest for the CPU if that is newer than the pinned one."""
    pinned = pinned_torch((ROOT / "constraints.txt").read_text())
    newest = found_by_pip(sys.executable) if version is None else Version(version)
    if newest is None or (version is None and newest.release <= pinned.release):
        print(f"pip finds no build of torch for the CPU that is newer than {pinned}, on which `make test` runs")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return run_suite(sys.executable, newest, Path(folder))


def on_python(wanted: str) -> int:
    """The short suite on this Python; says what is missing for it, which is no failure."""
    for python in interpreters(wanted):
        if not answers(python, "" if os.sep in wanted else f"import sys; assert sys.version.startswith('{wanted}.')"):
            continue
        if answers(python, "import torch, pytest"):
            return run_inside(python)
        torch = found_by_pip(python)
        if torch is None:
            print(f"Not run on Python {wanted}: pip finds no build of torch for the CPU for {python}")
            return 0
        with tempfile.TemporaryDirectory() as folder:
            return run_suite(python, torch, Path(folder))
    print(f"Not run on Python {wanted}: it is not on this machine, neither on the path nor in pyenv")
    return 0


def main(arguments: list[str]) -> int:
    what, *rest = arguments
    if what == "newest":
        return on_newest_torch(rest[0] if rest else None)
    assert what == "pythons", what
    return max(map(on_python, rest or PYTHONS))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except subprocess.SubprocessError as error:
        sys.exit(str(error))
