"""Checks what must be the same on all ranks. Each rank writes its own, so that all refuse, and name the rank that differs.

Versions differ if one host alone was updated, files if the script was edited on one host alone. Stages are sent as they are on
rank 0, but the modules that they import are read where they run: other files would give other numbers.
"""

import hashlib
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

import pippy
from pippy.drivers.base.errors import ClusterError
from pippy.drivers.engines.torchrun.rank_board import RankBoard

_VERSIONS = ("Python", "torch", "pippy")
_FILES = "files"


def terms_of_rank(arguments: Mapping[str, Any]) -> dict[str, str]:
    """What must be the same in this process as in the others: versions, and these arguments of `cluster`.

    >>> list(terms_of_rank({"transport": None}))
    ['Python', 'torch', 'pippy', 'transport']
    """
    values = (
        ".".join(platform.python_version_tuple()[:2]),
        torch.__version__.partition("+")[0],  # what follows says for which GPU it was built
        _source_of_pippy(),
    )
    return dict(zip(_VERSIONS, values)) | {name: repr(value) for name, value in arguments.items()}


def script_files() -> dict[str, str]:
    """The script and the modules of its folder that are imported by now, with what tells their texts apart."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None:
        return {}
    folder = f"{Path(script).resolve().parent}{os.sep}"
    loaded = {getattr(each, "__file__", None) or "" for each in list(sys.modules.values())}
    mine = [Path(path) for path in loaded if path.startswith(folder) and "site-packages" not in path]
    return {str(path.relative_to(folder)): text for path, text in _of_files([Path(script).resolve(), *mine]).items()}


def check_terms(board: RankBoard, found: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> None:
    """Raise, on all ranks, if what one has found is not what rank 0 has. ``hosts`` are the names of their hosts."""
    wrong = [each for name in found[0] if (each := _difference(name, [its.get(name, "none") for its in found], hosts))]
    versions = [name for name in _VERSIONS if any(its.get(name) != found[0][name] for its in found)]
    if wrong:
        raise ClusterError(
            "these ranks cannot work together:\n  "
            + "\n  ".join(wrong)
            + ("\ninstall the same versions on each host" if versions else "\ngive cluster() the same on each host")
        )
    files = board.read("digest of files", range(len(found)))
    if differ := [rank for rank, its in enumerate(files) if its != files[0]]:
        _check_files(board, [0, *dict(zip((files[rank] for rank in differ), differ)).values()], hosts)


def write_files(board: RankBoard) -> None:
    """Write what `check_terms` compares of this rank's files: the others read it if it is not the same in all."""
    found = script_files()
    board.write(_FILES, found)
    board.write("digest of files", _digest(found))


def _check_files(board: RankBoard, ranks: Sequence[int], hosts: Sequence[str]) -> None:
    first, *others = board.read(_FILES, ranks)
    for rank, its in zip(ranks[1:], others):
        if names := [name for name in first if name in its and first[name] != its[name]]:
            raise ClusterError(
                f"{', '.join(sorted(names))} on {hosts[rank]} (rank {rank}) differs from that on {hosts[0]} (rank "
                "0), so stages would run different code; copy the script and its modules to each host"
            )


def _difference(name: str, values: Sequence[str], hosts: Sequence[str]) -> str:
    if len(set(values)) == 1:
        return ""
    parts = []
    for value in dict.fromkeys(values):
        ranks = [rank for rank, its in enumerate(values) if its == value]
        where = ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))
        parts.append(f"{value} on {where} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})")
    return f"{name}: {'; '.join(parts)}"


@cache
def _source_of_pippy() -> str:
    package = Path(pippy.__file__).parent
    folders = package, package / "ir", package / "drivers"  # the last two may be links
    return f"source {_digest(_of_files(path for folder in folders for path in folder.resolve().rglob('*.py')))}"


def _of_files(paths: Iterable[Path]) -> dict[Path, str]:
    """What tells the texts of files apart."""
    found = {}
    for path in paths:
        try:
            found[path] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        except OSError:  # it is gone, and so are its readers
            continue
    return found


def _digest(texts: Mapping[Any, str]) -> str:
    lines = sorted(f"{Path(name).name} {text}" for name, text in texts.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
