"""Merges the traces of the workers of a profile into one file: on one clock, and each worker a process with its name.

Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing) open it. It is written in parts, so no process holds all of it.
"""

import gzip
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from pippy.drivers.protocol.profiles import ProfileStarted, ProfileStopped
from pippy.drivers.report.clocks import clock_offsets
from pippy.drivers.worker.measure.recorder import clock


def shifts(
    started: Mapping[int, ProfileStarted],
    stopped: Mapping[int, ProfileStopped],
    posted: float,
    answered: float,
) -> dict[int, float]:
    """By how many seconds the times of each worker's trace are shifted, so that all count from when the first one began.

    The controller sent the profile's begin at ``posted`` and had all answers at ``answered``, by its own clock.

    >>> here, there = ProfileStarted("one", 5.0, 6.0), ProfileStarted("other", 105.0, 106.0)
    >>> first = ProfileStopped(5.0, sends=[("x", 7.0)], receives=[("y", 9.5)])
    >>> second = ProfileStopped(105.0, sends=[("y", 109.0)], receives=[("x", 107.5)])
    >>> shifts({0: here, 1: there}, {0: first, 1: second}, posted=5.0, answered=6.0)
    {0: 0.0, 1: 0.0}
    """
    workers = sorted(stopped)
    controller = len(workers)
    ahead: dict[tuple[int, int], float] = {}
    sent = {key: (at, time) for at, worker in enumerate(workers) for key, time in stopped[worker].sends}
    for at, worker in enumerate(workers):
        ahead[controller, at] = started[worker].told - posted
        ahead[at, controller] = answered - started[worker].answered
    for at, worker in enumerate(workers):
        for key, time in stopped[worker].receives:
            if key in sent:
                source, begun = sent[key]
                ahead[source, at] = min(ahead.get((source, at), float("inf")), time - begun)
    offsets, _ = clock_offsets([*(started[worker].clock for worker in workers), clock()], ahead)
    begins = {worker: stopped[worker].began - offset for worker, offset in zip(workers, offsets)}
    return {worker: begin - min(begins.values()) for worker, begin in begins.items()}


@contextmanager
def trace_file(path: Path, names: Mapping[int, str]) -> Iterator[Callable[[bytes], int]]:
    """Write a trace of workers with these names. Gives a function that takes events as JSON, with commas between them.

    The file is there when the block has ended without an error, and else it is as it was before.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as plain, gzip.GzipFile("", "wb", 5, plain) if path.suffix == ".gz" else plain as file:
            rows = [json.dumps(each) for worker, name in names.items() for each in _row(worker, name)]
            file.write(('{"displayTimeUnit": "ms", "traceEvents": [\n' + ",\n".join(rows)).encode())
            yield lambda events: file.write(b",\n" + events)
            file.write(b"\n]}\n")
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def _row(worker: int, name: str) -> Iterator[dict[str, object]]:
    process = {"ph": "M", "pid": worker + 1, "tid": 0}
    yield {**process, "name": "process_name", "args": {"name": name}}
    yield {**process, "name": "process_sort_index", "args": {"sort_index": worker}}
