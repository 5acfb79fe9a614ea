"""Checks what must be the same on all ranks. Each rank writes its own, so that all refuse, and name the rank that differs.

Versions differ if one host alone was updated, files if the script was edited on one host alone. Stages are sent as they are on
rank 0, but the modules that they import are read where they run: other files would give other numbers.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.base.versions import digest_of, digests_of_files, versions
from pippy.drivers.engines.torchrun.rank_board import RankBoard

_FILES = "files"


def terms_of_rank(arguments: Mapping[str, Any]) -> dict[str, str]:
    """What must be the same in this process as in the others: versions, and these arguments of `cluster`.

    >>> list(terms_of_rank({"transport": None}))
    ['Python', 'torch', 'pippy', 'transport']
    """
    return {**versions(), **{name: repr(value) for name, value in arguments.items()}}


def script_files() -> dict[str, str]:
    """The script and the modules of its folder that are imported by now, with what tells their texts apart."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None:
        return {}
    folder = f"{Path(script).resolve().parent}{os.sep}"
    loaded = {getattr(each, "__file__", None) or "" for each in list(sys.modules.values())}
    mine = [Path(path) for path in loaded if path.startswith(folder) and "site-packages" not in path]
    digests = digests_of_files([Path(script).resolve(), *mine])
    return {str(path.relative_to(folder)): text for path, text in digests.items()}


def check_terms(board: RankBoard, terms: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> None:
    """Raise, on all ranks, if what one has found is not what rank 0 has. ``hosts`` are the names of their hosts."""
    wrong = [
        each
        for name in terms[0]
        if (each := _difference(name, [rank_terms.get(name, "none") for rank_terms in terms], hosts))
    ]
    differ_in = [name for name in versions() if any(rank_terms.get(name) != terms[0][name] for rank_terms in terms)]
    if wrong:
        raise ClusterError(
            "these ranks cannot work together:\n  "
            + "\n  ".join(wrong)
            + ("\ninstall the same versions on each host" if differ_in else "\ngive cluster() the same on each host")
        )
    files = board.read("digest of files", range(len(terms)))
    if differ := [rank for rank, digest in enumerate(files) if digest != files[0]]:
        _check_files(board, [0, *dict(zip((files[rank] for rank in differ), differ)).values()], hosts)


def write_files(board: RankBoard) -> None:
    """Write what `check_terms` compares of this rank's files: the others read it if it is not the same in all."""
    found = script_files()
    board.write(_FILES, found)
    board.write("digest of files", digest_of(found))


def _check_files(board: RankBoard, ranks: Sequence[int], hosts: Sequence[str]) -> None:
    first, *others = board.read(_FILES, ranks)
    for rank, digests in zip(ranks[1:], others):
        if names := [name for name in first if name in digests and first[name] != digests[name]]:
            raise ClusterError(
                f"{', '.join(sorted(names))} on {hosts[rank]} (rank {rank}) differs from that on {hosts[0]} (rank "
                "0), so stages would run different code; copy the script and its modules to each host"
            )


def _difference(name: str, values: Sequence[str], hosts: Sequence[str]) -> str:
    if len(set(values)) == 1:
        return ""
    parts = []
    for value in dict.fromkeys(values):
        ranks = [rank for rank, rank_value in enumerate(values) if rank_value == value]
        where = ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))
        parts.append(f"{value} on {where} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})")
    return f"{name}: {'; '.join(parts)}"
