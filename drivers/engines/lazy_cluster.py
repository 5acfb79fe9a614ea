"""A cluster that starts when the script first uses it. `pippy run` says how many workers it has.

The script asks by `cluster()`, or by `current_cluster()`, as a driver does that is given no cluster. A cluster that the
script opens by `local_cluster` is its own. If the script never asks, no worker is started.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.engines.cluster import Cluster
from pippy.ir.base.readable import brief


@dataclass
class LazyCluster:
    """The number of workers of a script, the function that starts them, and the cluster that was started last.

    >>> LazyCluster(2, {"threads": 1}, dict).requested(2, {"device": "cpu"}, timeout=3.0)
    {'n': 2, 'threads': 1, 'device': 'cpu', 'timeout': 3.0}
    """

    n: int
    options: dict[str, Any]
    start: Callable[..., Cluster]
    started: Cluster | None = field(default=None, repr=False)
    is_passed_over: bool = field(default=False, repr=False)  # the script has opened a cluster of its own

    def current(self) -> Cluster:
        """The cluster; a new one if the last one is closed."""
        if self.started is None or self.started.closed:
            self.started = self.start(n=self.n, **self.options)
        return self.started

    def requested(self, n: int | None, options: dict[str, Any], **times: float) -> Cluster:
        """The cluster for a call of `cluster` in the script. Its options override those of the command line."""
        if n not in (None, self.n):
            raise ClusterError(
                f"n={brief(n)}, and this script was started for {self.n} workers; leave out n, or start it "
                f"with: pippy run -n {brief(n)}"
            )
        if options or self.started is None or self.started.closed:
            self.started = self.start(n=self.n, **self.options | options, **times)
        return self.started


_current: LazyCluster | None = None


def current_lazy_cluster() -> LazyCluster | None:
    """The lazy cluster of this process, if `pippy run` has made one.

    >>> current_lazy_cluster() is None
    True
    """
    return _current


def note_local_cluster() -> None:
    """A local cluster starts: that of `pippy run`, or one of the script's own."""
    if _current is not None and _current.started is None:
        _current.is_passed_over = True


@contextmanager
def lazy_cluster(n: int, start: Callable[..., Cluster], **options: Any) -> Iterator[LazyCluster]:
    """Inside, the first use of the cluster calls ``start(n=n, **options)``; at the end the cluster is closed."""
    global _current
    _current = lazy = LazyCluster(n, options, start)
    try:
        yield lazy
    finally:
        _current = None
        if lazy.started is not None:
            lazy.started.close()
