"""The ranks that torchrun has started: which one this process is, the board on which they write, and what must be the same on
all.

The board is torchrun's store: on it a rank writes for the others while a cluster starts. All ranks write what must be the same,
so that all refuse, and name the rank that differs. Versions differ if one host alone was updated, files if the script was
edited on one host alone. Stages are sent as they are on rank 0, but the modules that they import are read where they run: other
files would give other numbers.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistStoreError, Store

from pippy.drivers.base.beside import beside
from pippy.drivers.base.errors import ClusterError
from pippy.drivers.base.versions import digest_of, digests_of_files, versions

CONTROLLER = "controller"  # its name for RPC


@dataclass(frozen=True)
class RankInfo:
    """The rank of this process, of those that torchrun has started. Rank 0 is the controller, and hosts worker 0 or none.

    >>> rank_info = RankInfo(rank=2, world_size=3, local_rank=2, local_world_size=3, controller_hosts=False)
    >>> rank_info.index, rank_info.workers, rank_info.rpc_name(rank_info.index)
    (1, 2, 'worker1')
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    controller_hosts: bool

    @staticmethod
    def from_environment(controller_hosts: bool) -> "RankInfo":
        """From the environment variables that torchrun sets."""
        environment = os.environ
        local = int(environment.get("LOCAL_RANK", "0")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
        return RankInfo(int(environment["RANK"]), int(environment["WORLD_SIZE"]), *local, controller_hosts)

    @property
    def one_host(self) -> bool:
        """Whether one torchrun has started all ranks."""
        return self.local_world_size == self.world_size

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return self.world_size - (not self.controller_hosts)

    @property
    def index(self) -> int:
        """The number of the worker in this process; -1 if there is none."""
        return self.rank - (not self.controller_hosts)

    def rank_of(self, worker: int) -> int:
        """The rank that hosts a worker."""
        return worker + (not self.controller_hosts)

    def worker_of(self, rank: int) -> int:
        """The worker that a rank hosts; -1 if it hosts none."""
        return rank - (not self.controller_hosts)

    def rpc_name(self, worker: int) -> str:
        """The name for RPC of the process that hosts a worker."""
        return f"worker{worker}" if self.rank_of(worker) else CONTROLLER


class RankBoard:
    """The board of a ``rank``. A read waits for the others, for ``timeout`` seconds.

    >>> from torch.distributed import HashStore
    >>> store = HashStore()
    >>> first, second = RankBoard(store, 0, 1.0), RankBoard(store, 1, 1.0)
    >>> first.write("host", ["node1", 4711])
    >>> second.read("host", [0])
    [['node1', 4711]]
    """

    def __init__(self, store: Store, rank: int, timeout: float) -> None:
        self.store, self.rank, self.timeout = store, rank, timeout

    def write(self, what: str, value: Any) -> None:
        """Write a value that JSON knows, once."""
        self._call(lambda: self.store.set(f"{what} {self.rank}", json.dumps(value)))

    def read(self, what: str, ranks: Iterable[int]) -> list[Any]:
        """What each of these ranks has written. Raises ClusterError for those that have not."""
        return self._call(lambda: self._read({rank: f"{what} {rank}" for rank in ranks}))

    def _read(self, keys: dict[int, str]) -> list[Any]:
        try:
            self._wait(list(keys.values()))
        except DistStoreError as error:
            missing = ", ".join(str(rank) for rank, key in keys.items() if not self.store.check([key]))
            raise ClusterError(
                f"these ranks did not call cluster() within {self.timeout:g} s, as rank {self.rank} saw: {missing}. "
                "All ranks must call it with the same arguments; start_timeout= is how long to wait for them"
            ) from error
        return [json.loads(self.store.get(key)) for key in keys.values()]

    def _wait(self, keys: list[str]) -> None:
        """Wait on another thread, as Ctrl-C cannot interrupt torch while it waits."""
        beside(lambda: self.store.wait(keys, timedelta(seconds=self.timeout)), "pippy meeting").result()

    def _call(self, call: Any) -> Any:
        try:
            return call()
        except (RuntimeError, OSError) as error:
            if isinstance(error, ClusterError):
                raise
            raise ClusterError(f"rank {self.rank} cannot reach torchrun's store: {error}") from error


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
