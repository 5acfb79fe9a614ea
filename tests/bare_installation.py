"""Installs the package without its extras into an environment of its own, and runs the README's first script there.

The script runs outside the tree, and must print what the README says: the installed package must be complete.

`python -m tests.bare_installation` does it. It takes minutes, for torch is installed too; so it is no test of the suite.
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tests.distributions import ROOT, build_wheel
from tests.markdown_blocks import PageError, blocks_of, matches


def install(folder: Path) -> Path:
    """A new environment that holds the package and what it depends on; gives its Python."""
    wheel = build_wheel(folder)
    venv.create(folder / "environment", with_pip=True)
    python = folder / "environment/bin/python"
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), str(wheel)], check=True)
    return python


def check_first_script(python: Path, folder: Path) -> None:
    """Run the README's first block with this Python and in this folder; raise a `PageError` if it prints anything else."""
    block = next(blocks_of("README.md", (ROOT / "README.md").read_text()))
    assert block.language == "python" and block.expected is not None
    (folder / "script.py").write_text(block.code)
    command = [str(python), "-I", "script.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode or not matches(block.expected, done.stdout):
        raise PageError(
            f"{block.where} prints\n{done.stdout}{done.stderr}\nand not, as the page says,\n{block.expected}"
        )


def main() -> None:
    """Install, run, compare; nothing is left."""
    with tempfile.TemporaryDirectory() as folder:
        python = install(Path(folder))
        check_first_script(python, Path(folder))
    print("The README's script runs where only pippy is installed.")


if __name__ == "__main__":
    try:
        main()
    except (PageError, subprocess.SubprocessError) as error:
        sys.exit(str(error))
