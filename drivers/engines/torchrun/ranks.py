"""The ranks that torchrun has started: which one this process is, what must be the same on all, and how they find rank 0.

They write on a board, torchrun's store:

    each rank   its place, and its terms: versions, arguments of `cluster`, digests of the script's files
    rank 0      compares them, and opens a door (doors.py): the invitation, or why the ranks cannot work together
    the others  whether they have come in, or why not; from then on nobody needs the store

Versions differ if one host alone was updated, files if the script was edited on one host alone. Stages are sent as they are on
rank 0, but the modules that they import are read where they run: other files would give other numbers.
"""

import json
import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistStoreError, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pippy.drivers.base.beside import beside
from pippy.drivers.base.errors import ClusterError
from pippy.drivers.base.versions import digests_of_files, versions
from pippy.drivers.engines.hub.interfaces import (
    LOOPBACK,
    NetworkInterface,
    addresses,
    interface_from_environment,
    link_named,
    link_to,
)


@dataclass(frozen=True)
class RankInfo:
    """The rank of this process, of those that torchrun has started. Rank 0 is the controller, and hosts worker 0 or none.

    >>> rank_info = RankInfo(rank=2, world_size=3, local_rank=2, local_world_size=3, controller_hosts=False)
    >>> rank_info.index, rank_info.workers
    (1, 2)
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


class RankBoard:
    """The board of a ``rank``, at a store. A read waits for the others, for ``timeout`` seconds.

    ``number`` counts earlier starts of the ranks at the store: what they have written must not be read again.

    >>> from torch.distributed import HashStore
    >>> store = HashStore()
    >>> first, second = RankBoard(store, 0, 1.0), RankBoard(store, 1, 1.0)
    >>> first.write("host", ["node1", 4711])
    >>> second.read("host", [0])
    [['node1', 4711]]
    """

    def __init__(self, root: Store, rank: int, timeout: float, number: int = 0) -> None:
        self.root, self.rank, self.timeout, self.number = root, rank, timeout, number
        self.store = PrefixStore(f"pippy {number}", root)

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
        beside(lambda: self.store.wait(keys, timedelta(seconds=self.timeout)), "pippy board").result()

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (RuntimeError, OSError) as error:
            if isinstance(error, ClusterError):
                raise
            raise ClusterError(f"rank {self.rank} cannot reach torchrun's store: {error}") from error


# Without torchrun's agent, whose store this is, rank 0 serves it: until the last of the others has read it.
_open_stores: list[Store] = []


def board_of(rank_info: RankInfo, timeout: float) -> RankBoard:
    """The board of this rank, at torchrun's store."""
    try:
        given = "env://", rank_info.rank, rank_info.world_size
        store = next(rendezvous(*given, timeout=timedelta(seconds=timeout)))[0]
        _open_stores.append(store)
        return RankBoard(store, rank_info.rank, timeout, _number_of_start(store, rank_info))
    except (RuntimeError, OSError) as error:
        raise ClusterError(_no_store(rank_info, error)) from error


def _no_store(rank_info: RankInfo, error: Exception) -> str:
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    try:
        known = ", ".join(dict.fromkeys(str(each[4][0]) for each in socket.getaddrinfo(address, None)))
        means = "" if known == address else f", which is {known} here"
    except OSError as unknown:
        means = f", and this host does not know that name: {unknown}"
    return (
        f"rank {rank_info.rank} on {socket.gethostname()} cannot reach torchrun's store at port {port} of {address}{means}; "
        f"give torchrun an address by which every host reaches the first: --master-addr ADDRESS, or, with --rdzv-backend c10d, "
        f"--local-addr ADDRESS on that host. The first line of the error: {str(error).strip().splitlines()[0]}"
    )


def _number_of_start(store: Store, rank_info: RankInfo) -> int:
    """The number of earlier starts of the ranks at a store."""
    if os.environ.get("LOCAL_WORLD_SIZE") == str(rank_info.world_size):  # one agent of torchrun, which counts restarts
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return int(store.add(f"pippy starts of rank {rank_info.rank}", 1)) - 1


def link_of_rank(rank_info: RankInfo) -> tuple[NetworkInterface, str]:
    """The interface of this host that leads to rank 0; loopback if all ranks are on one host.

    The text says what is wrong with an interface that the environment names.
    """
    if rank_info.one_host:
        return link_named(LOOPBACK), ""
    if (named := interface_from_environment()) is None:
        return link_to(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), ""
    variable, name = named
    link = link_named(name)
    has = ", ".join(dict.fromkeys(each for each, _ in addresses()))
    wrong = f"{variable} is {name!r}, and the interfaces here that have an address are {has}"
    return link, "" if link.address else wrong


def write_terms(board: RankBoard, rank_info: RankInfo, place: Mapping[str, Any], **arguments: Any) -> None:
    """Write where this rank is, and what must be the same in it as in the others, with these arguments of `cluster`."""
    link, trouble = link_of_rank(rank_info)
    terms = {**versions(), **{name: repr(value) for name, value in arguments.items()}}
    address = link.address if link.leaves else None
    found = {"place": place, "terms": terms, "files": script_files(), "address": address, "trouble": trouble}
    board.write("terms", found)


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


def check_terms(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raise if what one rank has written is not what rank 0 has."""
    hosts = [each["place"]["host"] for each in ranks]
    if troubles := [
        f"rank {rank} on {hosts[rank]}: {why}" for rank, each in enumerate(ranks) if (why := each["trouble"])
    ]:
        raise ClusterError("the ranks cannot connect with each other:\n  " + "\n  ".join(troubles))
    terms = [each["terms"] for each in ranks]
    wrong = {name: each for name in terms[0] if (each := _difference(name, [its.get(name) for its in terms], hosts))}
    if wrong:
        same = "install the same versions" if versions().keys() & wrong.keys() else "give cluster() the same"
        lines = "\n  ".join(wrong.values())
        raise ClusterError(f"these ranks cannot work together:\n  {lines}\n{same} on each host")
    first = ranks[0]["files"]
    for rank, files in enumerate(each["files"] for each in ranks):
        if names := [name for name in first if files.get(name, first[name]) != first[name]]:
            raise ClusterError(
                f"{', '.join(sorted(names))} on {hosts[rank]} (rank {rank}) differs from that on {hosts[0]} (rank "
                "0), so stages would run different code; copy the script and its modules to each host"
            )


def _difference(name: str, values: Sequence[str | None], hosts: Sequence[str]) -> str:
    if len(set(values)) == 1:
        return ""
    parts = []
    for value in dict.fromkeys(values):
        ranks = [rank for rank, rank_value in enumerate(values) if rank_value == value]
        where = ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))
        parts.append(f"{value} on {where} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})")
    return f"{name}: {'; '.join(parts)}"
