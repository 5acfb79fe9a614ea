"""Builds the source distribution and the wheel, from a copy of the files that belong to the project.

`python -m tests.distributions FOLDER` puts both into a folder; `make package` checks them there.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build_wheel(folder: Path) -> Path:
    """The wheel, built in this folder from the source distribution, as an index would serve it."""
    copy_checkout(folder / "checkout")
    with tarfile.open(_build("build_sdist", folder / "checkout", folder)) as archive:
        archive.extractall(folder / "sdist", filter="tar")
    (unpacked,) = (folder / "sdist").iterdir()
    return _build("build_wheel", unpacked, folder)


def copy_checkout(target: Path) -> None:
    """Copy what git knows, and new files that it does not ignore; nothing that was built here before."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        source, copied = ROOT / name, target / name
        if source.is_symlink() or source.is_file():
            copied.parent.mkdir(parents=True, exist_ok=True)
            if source.is_symlink():
                copied.symlink_to(source.readlink())
            else:
                copied.write_bytes(source.read_bytes())


def _build(kind: str, source: Path, target: Path) -> Path:
    command = [sys.executable, "-c", BUILD, kind, str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


def main(target: Path) -> None:
    """Build both, in place of what is in the folder."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        build_wheel(Path(folder))
        for each in (*Path(folder).glob("*.tar.gz"), *Path(folder).glob("*.whl")):
            shutil.copy(each, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
