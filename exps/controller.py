"""How much does the controller do in a step, and does this grow with the number of micro-batches?

Question: how many messages and how much CPU time does a step take the controller for m = 8 … 512 micro-batches, and how much
          time does an instruction take a worker if the stages are empty?
Command:  python -m exps.controller                     (from the root of the repository; --chunks, --steps, --schedule)
Method:   two workers, one core each; a stage adds one number to its input. The controller's CPU time is that of its whole
          process, with RPC's threads, over many steps. The time of an instruction is the time of the step, divided by the
          length of the longest list of instructions, in which computations, sends, receives and frees count alike.
Finding:  on two cores, for 1, 8, 64 and 512 micro-batches: 2 messages a step for each; 0.9, 1.0, 1.6 and 2.1 ms of CPU time;
          244, 81, 47 and 42 µs an instruction, 126 µs a computation where there are many. A step of one micro-batch takes
          1.5 ms, most of it to wake processes that sleep: this machine is a virtual one that halts idle cores, where the
          waking takes the sender alone 0.1 to 0.2 ms.
"""

import argparse
import statistics
import time

import torch
from torch import nn

from exps.peers.empty import Empty, loss_fn
from pippy import Pipe, PipelineDriver, cluster
from pippy.drivers.plan.language.instructions import Compute


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, nargs="+", default=[8, 32, 128, 512])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--schedule", default="1f1b")
    options = parser.parse_args()
    print(
        f"{'chunks':>6}{'messages':>10}{'controller ms':>15}{'step ms':>10}{'µs/instruction':>16}{'µs/computation':>16}"
    )
    with cluster(2, threads=1, pin=True) as workers:
        pipe = Pipe.from_sequential(nn.Sequential(Empty(), Empty()), loss_fn)
        driver = PipelineDriver(pipe, workers, schedule=options.schedule)
        for chunks in options.chunks:
            x, target = torch.zeros(chunks, 1), torch.ones(chunks, 1)
            for _ in range(5):
                driver.run(chunks, x, target)
            messages, cpu, steps = sum(workers.session.counts), time.process_time(), []
            for _ in range(options.steps):
                begin = time.perf_counter()
                driver.run(chunks, x, target)
                steps.append(time.perf_counter() - begin)
            cpu = (time.process_time() - cpu) / options.steps
            messages = (sum(workers.session.counts) - messages) / options.steps
            orders = driver.program(chunks).orders
            longest = max(map(len, orders))
            computes = max(sum(isinstance(each, Compute) for each in order) for order in orders)
            step = statistics.median(steps)
            print(
                f"{chunks:6}{messages:10g}{cpu * 1e3:15.2f}{step * 1e3:10.2f}{step / longest * 1e6:16.1f}"
                f"{step / computes * 1e6:16.1f}",
                flush=True,
            )
        driver.close()


if __name__ == "__main__":
    main()
