"""How much processor time and memory does the first step of a worker take?

Question: what does each worker of a new cluster pay for a driver, an optimizer, and the first step of both?
Command:  python -m exps.first_seconds                        (from the root of the repository; --workers, --chunks)
Method:   a new local cluster for each number of workers, with one intra-op thread a worker; as many linear layers, one a
          worker; a driver that checks its first step, with AdamW. Read from the kernel's files after that step: the processor
          time of each worker since it was forked, and the memory that it shares with no other process. The seconds are those
          of a clock, from the making of the driver to the end of the optimizer's step, and contain what else the machine does.
Finding:  two cores with three, five and nine times the work that they can do, in three runs. 8 workers took 0.04 to 0.07 s
          of processor time and held 19 to 20 MB of their own, and 0.4, 0.7 and 1.2 s passed. 64 workers took 0.04 to 0.09 s
          and held 19 to 21 MB, and 2.9, 4.4 and 12.4 s passed, of which the script computed for 0.6. Before optimizers and
          modes did without torch._dynamo, each of 8 workers took 0.79 s and held 95 MB, the script took 0.95 s; 16 s passed.
"""

import argparse
import os
import resource
import time
from pathlib import Path

import torch
from torch import nn

from exps.memory import held
from pippy import Pipe, PipelineDriver1F1B, cluster

WIDTH = 8


def processor_time(pid: int) -> float:
    """The seconds that a process has computed, for itself and for the system."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def measured(count: int, chunks: int) -> list[float]:
    """The seconds, the script's processor time, that of the worker with the most and of all, the MB of that with the most."""
    pipe = Pipe.from_sequential(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count))), nn.MSELoss())
    rows = torch.randn(2 * chunks, WIDTH)
    with cluster(count, threads=1, start_timeout=600.0) as workers:
        began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        driver = PipelineDriver1F1B(pipe, workers)
        optimizer = driver.instantiate_optimizer(torch.optim.AdamW, lr=0.1)
        driver.run(chunks, rows, rows)
        optimizer.step()
        took, uses = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
        pids = [each.pid for each in workers.session.workers]
        times = [processor_time(pid) for pid in pids]
        script = uses.ru_utime + uses.ru_stime - used.ru_utime - used.ru_stime
        return [took, script, max(times), sum(times), max(held(pid)["own"] for pid in pids)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--chunks", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'workers':>8}{'seconds':>10}{'script, s':>11}{'a worker, s':>13}{'workers, s':>12}{'a worker, MB':>14}")
    for count in given.workers:
        took, script, most, total, memory = measured(count, given.chunks)
        print(f"{count:8}{took:10.2f}{script:11.2f}{most:13.2f}{total:12.2f}{memory:14.1f}", flush=True)


if __name__ == "__main__":
    main()
