"""Clusters: the workers that a controller drives, started on this host or joined under torchrun."""

import itertools
import os
import tempfile
import threading
import warnings
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, NoReturn, Protocol

import torch

from pippy.drivers.clusters.fork_server import LaunchConfig
from pippy.drivers.clusters.lazy_cluster import current_lazy_cluster
from pippy.drivers.clusters.local_processes import LocalProcesses
from pippy.drivers.control.control import Control
from pippy.drivers.control.dispatch import Dispatch
from pippy.drivers.errors import ClusterError
from pippy.ir.errors import PippyWarning

WORKER = "pippy.drivers.workers.worker:Worker"
PATIENCE = 0.001  # seconds that a worker with a core of its own looks for a value before it sleeps
TRANSPORTS = ("shared_memory", "rpc", "none")  # none is for workers that pass nothing, as in tests
_open: "weakref.ref[Cluster] | None" = None
_in_force: list["Cluster"] = []


class Closing(Protocol):
    """What ends a cluster's processes."""

    def close(self) -> None:
        """End them; a second call does nothing."""


class Cluster:
    """The workers that a controller drives; made by `local_cluster` or `cluster`.

    It is a context manager, and in its ``with`` it is the cluster in force. What is not closed is closed when the cluster is
    forgotten, or the script ends, however it ends.

    >>> with local_cluster(1, names=["only"]) as cluster:
    ...     len(cluster), cluster.workers, current_cluster() is cluster
    (1, ('only',), True)
    >>> cluster
    <Cluster of 1 workers, closed: only>
    """

    def __init__(self, names: Sequence[str], control: Control, processes: Closing) -> None:
        self.workers = tuple(names)
        self.control = control
        self.dispatch = Dispatch(control, end=processes.close)
        self._drivers = itertools.count()
        self.closed = False
        self._finalizer = weakref.finalize(self, processes.close)

    def close(self) -> None:
        """End all workers. A second call does nothing."""
        self.closed = True
        self.control.broken = self.control.broken or "this cluster is closed; open another"
        if self in _in_force:
            _in_force.remove(self)
        self._finalizer()

    def next_driver(self) -> int:
        """The number of another driver."""
        return next(self._drivers)

    def dump(self, timeout: float = 1.0) -> str:
        """What every worker does or waits for, one line or more each; those that do not answer in time are said so."""
        return self.dispatch.dump(timeout)

    def __len__(self) -> int:
        return len(self.workers)

    def __enter__(self) -> "Cluster":
        self.control.check()
        _in_force.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "broken" if self.control.broken else "open"
        return f"<Cluster of {len(self)} workers, {state}: {', '.join(self.workers)}>"

    def __reduce__(self) -> NoReturn:
        raise ClusterError(
            "a cluster cannot be pickled: it is the processes that this one started. Do not keep it in a model, or in what is "
            "sent to workers; use current_cluster() in the controller instead"
        )


def current_cluster() -> Cluster:
    """The cluster in force: that of the innermost ``with``, or the only one that is open, or that of `pippy run`.

    >>> current_cluster()
    Traceback (most recent call last):
    pippy.drivers.errors.ClusterError: no cluster is open; open one: with local_cluster(2) as cluster: ...
    """
    found = _in_force[-1] if _in_force else _opened()
    if found is None and (lazy := current_lazy_cluster()) is not None:
        found = lazy.current()
    if found is None:
        raise ClusterError("no cluster is open; open one: with local_cluster(2) as cluster: ...")
    return found


def local_cluster(
    n: int,
    *,
    threads: int | None = None,
    devices: Sequence[str | torch.device] | None = None,
    device: str | torch.device | None = None,
    pin: bool = False,
    names: Sequence[str] | None = None,
    timeout: float = 5.0,
    transport: Literal["shared_memory", "rpc", "none"] | None = None,
    start_timeout: float = 60.0,
    patience: float | None = None,
    _worker: str = WORKER,
) -> Cluster:
    """Start ``n`` workers on this host, in processes of their own.

    No main guard is needed: the workers do not run your script. ``threads`` is how many each computes with (default: the
    cores, divided among them); ``pin`` gives each one core to itself; ``devices`` names one device for each, ``device`` one
    for all. A worker that does not answer for ``timeout`` seconds is lost, as one would be whose stage holds Python's lock
    for so long, which only a C extension does. ``transport`` is how workers pass tensors to one another: through memory
    that both see, if this host can, or else by RPC. A worker that waits for a value looks for it for ``patience`` seconds
    before it sleeps, if every worker has cores of its own: to wake one takes long.

    Nothing of it can be reached from another host.

    >>> with local_cluster(2) as cluster:  # doctest: +SKIP
    ...     cluster
    <Cluster of 2 workers, open: worker0, worker1>
    """
    cores = sorted(os.sched_getaffinity(0))
    names, devices = named(n, names), _placed(n, devices, device)
    threads = _threads(n, threads, pin, len(cores))
    _check_choice("transport", transport, (None, *TRANSPORTS))
    check_seconds(timeout=timeout, start_timeout=start_timeout)
    check_none_open()
    shared = _can_share_memory(transport)
    config = LaunchConfig(
        worker=_worker,
        names=names,
        devices=devices,
        threads=threads,
        cores=tuple(cores[i % len(cores)] for i in range(n)) if pin else None,
        transport=transport or ("shared_memory" if shared else "rpc"),
        rpc_transport="uv",  # shm would spin: its reactor never sleeps, and takes what others could compute with
        directory=tempfile.mkdtemp(prefix="pippy-"),
        controller=os.getpid(),
        bound=threading.current_thread() is threading.main_thread(),
        patience=_patience(patience, crowded=n * threads > len(cores)),
    )
    return _started(config, timeout, start_timeout)


def _started(config: LaunchConfig, timeout: float, start_timeout: float) -> Cluster:
    processes = LocalProcesses(config)
    try:
        addresses = processes.start(start_timeout)
    except BaseException:
        processes.close()
        raise
    return opened(
        Cluster(
            config.names,
            Control(addresses, timeout, deaths=processes.deaths, connections=processes.connections),
            processes,
        )
    )


def opened(cluster: Cluster) -> Cluster:
    """Note that this is the open cluster of this process."""
    global _open
    _open = weakref.ref(cluster)
    return cluster


def _opened() -> Cluster | None:
    cluster = _open() if _open else None
    return cluster if cluster is not None and not cluster.closed else None


def check_none_open() -> None:
    """RPC joins one group at a time. A cluster that has lost a worker is of no use, and makes room."""
    if (cluster := _opened()) is None:
        return
    if not cluster.control.broken:
        raise ClusterError(
            f"only one cluster can be open in a process, and {cluster!r} is; use it: several drivers can share one cluster; or "
            "close it first: current_cluster().close()"
        )
    cluster.close()


def _can_share_memory(transport: str | None) -> bool:
    """Whether processes of this host can; if not, a warning says what is used instead. RPC and pippy both use memfd."""
    try:
        os.close(os.memfd_create("pippy"))
        return True
    except (OSError, AttributeError) as error:
        why = f"this host cannot share memory between processes ({error})"
    if transport == "shared_memory":
        raise ClusterError(
            f'transport="shared_memory" cannot be had: {why}; leave out transport, and the workers use TCP on the loopback '
            f"interface"
        )
    warnings.warn(
        f"{why}; the workers use TCP on the loopback interface instead, which is slower", PippyWarning, stacklevel=3
    )
    return False


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def named(n: int, names: Sequence[str] | None) -> tuple[str, ...]:
    """The names of ``n`` workers: those given, or else made up."""
    if not _whole(n):
        raise ClusterError(f"n is the number of workers, 1 or more; this is {n!r}")
    if names is None:
        return tuple(f"worker{i}" for i in range(n))
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise ClusterError(f"names must be a list of {n} strings; these are {names!r}")
    if len(names) != n or len(set(names)) != n:
        raise ClusterError(f"names must name each of the {n} workers, and none twice; these are {list(names)}")
    return tuple(names)


def _threads(n: int, threads: int | None, pin: bool, cores: int) -> int:
    check_threads(threads)
    return threads or (1 if pin else max(1, cores // n))


def check_threads(threads: int | None) -> None:
    """Raise unless this is a number of threads, or none is given."""
    if threads is not None and not _whole(threads):
        raise ClusterError(f"threads is how many threads each worker computes with, 1 or more; this is {threads!r}")


def _patience(seconds: float | None, crowded: bool) -> float:
    """A worker that looks for its value on a core that others need takes it from them, perhaps from who makes the value."""
    if seconds is None:
        return 0.0 if crowded else PATIENCE
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= 1:
        raise ClusterError(
            f"patience is for how many seconds a worker looks for a value before it sleeps, 0 to 1; this is {seconds!r}"
        )
    return seconds


def _placed(n: int, devices: Sequence[str | torch.device] | None, device: str | torch.device | None) -> tuple[str, ...]:
    if devices is not None and device is not None:
        raise ClusterError("devices names one device for each worker, device one for all; give one of the two")
    if devices is not None and (isinstance(devices, str) or len(devices) != n):
        raise ClusterError(f"devices must name one device for each of the {n} workers; this is {devices!r}")
    return tuple(known(each) for each in (devices if devices is not None else [device or "cpu"] * n))


def known(device: str | torch.device) -> str:
    """The name of a device, which this host has."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ClusterError(f"{device!r} names no device of torch; a device is 'cpu', or 'cuda:0'") from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ClusterError(
            f"there is no device {str(device)!r}: torch finds {torch.cuda.device_count()} CUDA devices here"
        )
    return str(found)


def _check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise ClusterError(f"{name} must be one of {', '.join(map(repr, choices))}; this is {value!r}")


def check_seconds(**given: Any) -> None:
    """Raise unless all of these are times."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ClusterError(f"{name} is a number of seconds, more than 0; this is {value!r}")
