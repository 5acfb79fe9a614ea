"""A cluster that stands by: `pippy run` says how many workers a script is to have, and they start when it asks for them.

The script asks by `cluster()`, or by `current_cluster()`, as a driver does that is told of no cluster. What it opens by
`local_cluster` is its own, and what it does not ask for is not started.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pippy.drivers.errors import ClusterError

if TYPE_CHECKING:
    from pippy.drivers.clusters.cluster import Cluster


@dataclass
class LazyCluster:
    """How many workers a script is to have, what starts them, and the cluster that has been started last.

    >>> LazyCluster(2, {"threads": 1}, dict).asked(2, {"device": "cpu"}, timeout=3.0)
    {'n': 2, 'threads': 1, 'device': 'cpu', 'timeout': 3.0}
    """

    n: int
    options: dict[str, Any]
    start: Callable[..., "Cluster"]
    started: "Cluster | None" = field(default=None, repr=False)

    def current(self) -> "Cluster":
        """The cluster; one that is closed is followed by another."""
        if self.started is None or self.started.closed:
            self.started = self.start(n=self.n, **self.options)
        return self.started

    def asked(self, n: int | None, own: dict[str, Any], **times: float) -> "Cluster":
        """The cluster that a script asks for; options of its own count more than those of the command line."""
        if n not in (None, self.n):
            raise ClusterError(
                f"n={n!r}, and this script was started for {self.n} workers; leave out n, or start it with: pippy run -n {n}"
            )
        if own or self.started is None or self.started.closed:
            self.started = self.start(n=self.n, **self.options | own, **times)
        return self.started


_current: LazyCluster | None = None


def current_lazy_cluster() -> LazyCluster | None:
    """What stands by in this process.

    >>> current_lazy_cluster() is None
    True
    """
    return _current


@contextmanager
def lazy_cluster(n: int, start: Callable[..., "Cluster"], **options: Any) -> Iterator[LazyCluster]:
    """Inside, ``start(n=n, **options)`` starts the cluster that is asked for; in the end it is closed."""
    global _current
    _current = lazy = LazyCluster(n, options, start)
    try:
        yield lazy
    finally:
        _current = None
        if lazy.started is not None:
            lazy.started.close()
