"""A board on which each rank writes for the others while a cluster starts: torchrun's store."""

import json
import threading
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store

from pippy.drivers.base.errors import ClusterError


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
        failed: list[Exception] = []

        def wait() -> None:
            try:
                self.store.wait(keys, timedelta(seconds=self.timeout))
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=wait, name="pippy meeting", daemon=True)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]

    def _call(self, call: Any) -> Any:
        try:
            return call()
        except (RuntimeError, OSError) as error:
            if isinstance(error, ClusterError):
                raise
            raise ClusterError(f"rank {self.rank} cannot reach torchrun's store: {error}") from error
