"""What this process runs, as far as it must be the same in all processes of a cluster."""

import hashlib
import platform
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch


@cache
def versions() -> Mapping[str, str]:
    """The versions of Python and torch, and what tells this source of pippy from another.

    >>> list(versions())
    ['Python', 'torch', 'pippy']
    """
    package = Path(__file__).parents[2]
    folders = package, package / "ir", package / "drivers"  # the last two may be links
    source = digest_of(digests_of_files(path for folder in folders for path in folder.resolve().rglob("*.py")))
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__.partition("+")[0],  # what follows says for which GPU it was built
        "pippy": f"source {source}",
    }


def digests_of_files(paths: Iterable[Path]) -> dict[Path, str]:
    """What tells the texts of files apart."""
    digests = {}
    for path in paths:
        try:
            digests[path] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        except OSError:  # it is gone, and so are its readers
            continue
    return digests


def digest_of(texts: Mapping[Any, str]) -> str:
    """What tells these files apart from others, whichever folder they are in.

    >>> digest_of({"a/x.py": "1"}) == digest_of({"b/x.py": "1"}), digest_of({"x.py": "1"}) == digest_of({"x.py": "2"})
    (True, False)
    """
    lines = sorted(f"{Path(name).name} {text}" for name, text in texts.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
