"""Runs a short suite on the newest torch of which pip finds a build for the CPU, if it is newer than that of constraints.txt.

`make newest` does it, in an environment of its own; `make newest TORCH=2.14.1` takes that version, whatever build it is. That
takes minutes, so it is no test of the suite.
"""

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from packaging.version import Version

from tests.distributions import ROOT

TOOLS = ("pytest", "pytest-timeout", "hypothesis", "transformers", "einops")
SUITE = (
    "tests/ir/front/test_trace.py",
    "tests/ir/front/test_values.py",
    "tests/ir/export/test_export.py",
    "tests/ir/run/test_checkpointed_parts.py",
    "tests/ir/passes/test_loss.py",
    "tests/drivers/test_driver.py",
    "tests/drivers/test_training.py",
    "tests/drivers/test_keyed_random.py",
    "tests/drivers/state/test_checkpoint_contents.py",
    "tests/drivers/state/test_going_on.py",
    "tests/drivers/state/test_hugging_face_folders.py",
    "tests/drivers/state/test_refused_checkpoints.py",
    "tests/drivers/state/test_saving_beside_the_run.py",
    "tests/drivers/placement/test_replicas.py",
    "tests/drivers/recovery/test_recovery.py",
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


def run_suite(torch: Version, folder: Path) -> int:
    """Run the short suite with this torch, installed below ``folder``; gives pytest's status."""
    others = re.sub(r"^torch==.*\n", "", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    (folder / "constraints.txt").write_text(others)
    venv.create(folder / "environment", with_pip=True)
    python = str(folder / "environment/bin/python")
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", str(folder / "constraints.txt")]
    subprocess.run([*pip, f"torch=={torch}", *TOOLS, "--editable", str(ROOT)], check=True)
    print(f"A short suite on torch {torch}:", flush=True)
    return subprocess.run([python, "-m", "pytest", "-q", *SUITE], cwd=ROOT, check=False).returncode


def main(arguments: list[str]) -> int:
    pinned = pinned_torch((ROOT / "constraints.txt").read_text())
    if arguments:
        newest: Version | None = Version(arguments[0])
    else:
        listed = [sys.executable, "-m", "pip", "index", "versions", "torch"]
        newest = newest_cpu_build(subprocess.run(listed, capture_output=True, text=True, check=True).stdout)
        if newest is None or newest.release <= pinned.release:
            print(f"pip finds no build of torch for the CPU that is newer than {pinned}, on which `make test` runs")
            return 0
    assert newest is not None
    with tempfile.TemporaryDirectory() as folder:
        return run_suite(newest, Path(folder))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except subprocess.SubprocessError as error:
        sys.exit(str(error))
