"""How long imports take, and how long `cluster(n)` takes to start, compared with one import of torch in a new process.

`python exps/startup.py --repeat 5` on two cores of an AMD EPYC, medians (and least to most):

    import torch                1.70 s (1.62–1.79)
    start 1 workers             2.98 s (2.89–3.17)    end 1 workers     0.82 s (0.77–0.92)
    start 2 workers             3.12 s (2.94–3.17)    end 2 workers     0.82 s (0.77–0.87)
    start 4 workers             3.03 s (2.95–3.39)    end 4 workers     0.82 s (0.72–0.84)
    start 8 workers             3.38 s (3.23–3.45)    end 8 workers     0.86 s (0.80–0.91)

The number of workers makes little difference: all are forks of one process, which imports torch and pippy once.

Imports are measured in processor time; `--imports` measures them alone, here beside other work:

    import torch                1.67 s (1.61–1.74)
    import pippy                0.03 s (0.03–0.03)
    import pippy, torch         1.64 s (1.61–1.75)
    from pippy import pipeline  2.24 s (2.13–2.27)

So `import pippy` adds nothing to the import of torch. The first public name that is used imports the rest, a third more; that
was half as much again before networkx was imported only where it is needed.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from typing import Literal

from pippy import cluster

IMPORTS = "import torch", "import pippy", "import pippy, torch", "from pippy import pipeline"


def seconds_to_import(statement: str) -> float:
    """The processor time of a new process that imports something, from its start to its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", statement], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


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
    parser.add_argument("--imports", action="store_true", help="imports only")
    given = parser.parse_args()
    repeat = given.repeat
    rows = {each: [seconds_to_import(each) for _ in range(repeat)] for each in IMPORTS}
    for n in () if given.imports else (1, 2, 4, 8):
        started, ended = zip(*(seconds_to_start(n) for _ in range(repeat)))
        rows[f"start {n} workers"], rows[f"end {n} workers"] = list(started), list(ended)
    for name, times in rows.items():
        print(f"{name:<26} {statistics.median(times):5.2f} s ({min(times):.2f}–{max(times):.2f})")


if __name__ == "__main__":
    main()
