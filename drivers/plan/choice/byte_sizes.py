"""Numbers of bytes as users write them, and as they are shown so that they can be written."""

import re
from collections.abc import Mapping, Sequence
from math import ceil, isfinite
from typing import Any

from pippy.drivers.plan.language.errors import ArgumentError, beginning

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BY_NAME = {name.lower(): unit for name, unit in UNITS.items()}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)\s*", re.ASCII)
EXAMPLE = 'as in "12GiB", "500MB" or 12 * 2**30'


def byte_count(given: Any, name: str = "memory=") -> int:
    """The bytes that a size stands for: a number of them, or a text with a unit.

    >>> byte_count("1.5KiB"), byte_count("2 MB"), byte_count(7)
    (1536, 2000000, 7)
    """
    count = 0.0
    if isinstance(given, str) and (parts := _SIZE.fullmatch(given)) and parts[2].lower() in _BY_NAME:
        count = float(parts[1]) * _BY_NAME[parts[2].lower()]
    elif isinstance(given, int) and not isinstance(given, bool):
        count = given
    if not (isfinite(count) and count >= 1):
        unit = isinstance(given, str) and given.strip().replace(".", "", 1).isdigit()
        why = f"it has no unit; the units are {', '.join(UNITS)}" if unit else f"give bytes, {EXAMPLE}"
        raise ArgumentError(f"{name}{beginning(given)}: {why}")
    return int(count)


def limits_of(given: Any, workers: int, name: str = "memory=") -> tuple[int, ...]:
    """The limit of each worker: one for all, one for each, or a dict by worker.

    >>> limits_of(["1KB", 7], workers=2), limits_of({1: 7, 0: "1KB"}, workers=2)
    ((1000, 7), (1000, 7))
    """
    if isinstance(given, Mapping):
        if set(given) != set(range(workers)) or any(isinstance(each, bool) for each in given):
            raise ArgumentError(
                f"{name}{beginning(dict(given))}: give a size for each worker, 0 to {workers - 1}, or one for all"
            )
        return tuple(byte_count(given[worker], name) for worker in range(workers))
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        if len(given) != workers:
            raise ArgumentError(
                f"{name}{beginning(list(given))} has {len(given)} sizes for {workers} workers; give one, or one each"
            )
        return tuple(byte_count(each, name) for each in given)
    return (byte_count(given, name),) * workers


def byte_text(count: int) -> str:
    """A number of bytes as `byte_count` reads it, in three digits, rounded up: what is advised is enough.

    >>> byte_text(1537), byte_text(3 * 2**30), byte_text(1023), byte_text(2**20 - 1)
    ('1.51 KiB', '3 GiB', '1023 B', '1 MiB')
    """
    for name in ("TiB", "GiB", "MiB", "KiB"):
        unit = UNITS[name]
        if count > unit - unit // 1024:
            steps = 100 if count < 10 * unit else 10 if count < 100 * unit else 1
            return f"{ceil(count / unit * steps) / steps:g} {name}"
    return f"{count} B"
