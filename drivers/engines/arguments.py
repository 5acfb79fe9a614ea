"""The checks of arguments that all kinds of clusters take."""

from collections.abc import Iterable, Sequence, Sized
from typing import Any

import torch

from pippy.drivers.base.errors import ClusterError
from pippy.ir.base.public_calls import check_amount, check_count
from pippy.ir.base.readable import brief

PATIENCE = 0.001  # seconds that a worker with a core of its own polls for a value before it sleeps


def worker_names(n: int, names: Sequence[str] | None) -> tuple[str, ...]:
    """The names of ``n`` workers: the given names, or else worker0, worker1, and so on.

    >>> worker_names(2, None)
    ('worker0', 'worker1')
    """
    check_count("n", n, "the number of workers", ClusterError)
    if names is None:
        return tuple(f"worker{i}" for i in range(n))
    if (
        isinstance(names, str)
        or not isinstance(names, Iterable)
        or not all(isinstance(name, str) and name for name in names)
    ):
        raise ClusterError(f"names must be a list of {n} strings; these are {brief(names)}")
    if len(names) != n or len(set(names)) != n:
        raise ClusterError(f"names must name each of the {n} workers, and none twice; these are {brief(list(names))}")
    return tuple(names)


def check_devices(n: int, devices: Sequence[str | torch.device] | None, device: str | torch.device | None) -> None:
    """Raise unless this is one device for each of ``n`` workers, or one for all, or none is given."""
    if devices is not None and device is not None:
        raise ClusterError(
            "devices names one device for each worker, and device names one for all; give only one of the two"
        )
    if devices is not None and (isinstance(devices, str) or not isinstance(devices, Sized) or len(devices) != n):
        raise ClusterError(f"devices must name one device for each of the {n} workers; this is {brief(devices)}")


def device_name(device: str | torch.device) -> str:
    """The name of a device of this host.

    >>> device_name(torch.device("cpu"))
    'cpu'
    """
    try:
        known = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ClusterError(
            f"{brief(device)} is not a device of torch; give a device such as 'cpu' or 'cuda:0'"
        ) from error
    if known.type == "cuda" and (known.index or 0) >= torch.cuda.device_count():
        raise ClusterError(
            f"there is no device {str(device)!r}: torch finds {torch.cuda.device_count()} CUDA devices here"
        )
    return str(known)


def check_threads(threads: int | None) -> None:
    """Raise unless this is a number of threads, or none is given."""
    what = "how many threads each worker computes with"
    check_count("threads", threads, what, ClusterError, none="for its share of the cores")
    if threads is not None and threads >= 2**31:
        raise ClusterError(f"threads={brief(threads)}: give {what}, fewer than {2**31}")


def check_seconds(**given: Any) -> None:
    """Raise unless all of these are positive numbers of seconds."""
    for name, value in given.items():
        check_amount(name, value, "a number of seconds", ClusterError)


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise unless the value is one of these."""
    if value not in choices:
        raise ClusterError(f"{name} must be one of {', '.join(map(repr, choices))}; this is {brief(value)}")


def polling_time(seconds: float | None, crowded: bool) -> float:
    """The seconds that workers poll. Without a core of its own, a worker that polls would slow down the other processes."""
    if seconds is None:
        return 0.0 if crowded else PATIENCE
    what = "how many seconds a worker polls for a value before it sleeps"
    check_amount("patience", seconds, what, ClusterError, most=1, zero=True)
    return seconds


def checked_names(
    n: int,
    names: Sequence[str] | None,
    threads: int | None = None,
    devices: Sequence[str | torch.device] | None = None,
    device: str | torch.device | None = None,
    **seconds: float,
) -> tuple[str, ...]:
    """The names of ``n`` workers. Raises unless all of these arguments can be those of a cluster.

    >>> checked_names(1, ["only"], timeout=5.0)
    ('only',)
    """
    names = worker_names(n, names)
    check_devices(n, devices, device)
    check_threads(threads)
    check_seconds(**seconds)
    return names
