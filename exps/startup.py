"""How long `cluster(n)` takes to start, compared with one import of torch in a new process.

`python exps/startup.py --repeat 5` on two cores of an AMD EPYC, medians (and least to most):

    import torch      1.70 s (1.62–1.79)
    start 1 workers   2.98 s (2.89–3.17)    end 1 workers     0.82 s (0.77–0.92)
    start 2 workers   3.12 s (2.94–3.17)    end 2 workers     0.82 s (0.77–0.87)
    start 4 workers   3.03 s (2.95–3.39)    end 4 workers     0.82 s (0.72–0.84)
    start 8 workers   3.38 s (3.23–3.45)    end 8 workers     0.86 s (0.80–0.91)

The number of workers makes little difference: all are forks of one process, which imports torch and pippy once.
"""

import argparse
import statistics
import subprocess
import sys
import time
from typing import Literal

from pippy import cluster


def seconds_to_import() -> float:
    """The time of a new process that imports torch, from its start to its end."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - began


def seconds_to_start(n: int, engine: Literal["local", "ray"] = "local") -> tuple[float, float]:
    """The times until all workers have answered, and until all have ended."""
    began = time.perf_counter()
    with cluster(n, threads=1, engine=engine, start_timeout=600.0) as workers:
        workers.dump()
        ready = time.perf_counter()
    return ready - began, time.perf_counter() - ready


def main() -> None:
    """Print medians, and least to most."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    rows = {"import torch": [seconds_to_import() for _ in range(repeat)]}
    for n in (1, 2, 4, 8):
        started, ended = zip(*(seconds_to_start(n) for _ in range(repeat)))
        rows[f"start {n} workers"], rows[f"end {n} workers"] = list(started), list(ended)
    for name, times in rows.items():
        print(f"{name:<16} {statistics.median(times):5.2f} s ({min(times):.2f}–{max(times):.2f})")


if __name__ == "__main__":
    main()
