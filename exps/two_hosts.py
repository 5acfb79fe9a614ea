"""How fast is a step on two hosts, compared with torch.distributed.pipelining over gloo on the same two?

Question: with one worker on each host, 8 micro-batches and a GPT-like decoder, how long is a step (forward and backward of all
          micro-batches, no optimizer), with and without a delay of 1 ms on each packet?
Command:  python -m exps.two_hosts --size small --rounds 20       (see --help; from the root of the repository, as root)
Method:   as versus_torch.py, with the same contestants, models and checks; but each process of a contestant is on a host of
          its own, which is a network namespace, and has one core. pippy's are those that `cluster()` joins under torchrun.
Finding:  two virtual cores, a quiet machine, small, --rounds 10, --only "torch 1F1B" "pippy 1f1b" "pippy eager_1f1b", of
          torch 1F1B: without a delay (31.0 ms) pippy 1f1b 1.14 (1.09–1.17), eager_1f1b 1.17 (1.11–1.20); with 1 ms (56.7 ms)
          0.89 (0.83–0.95), 0.72 (0.68–0.76). So without a delay torch is ahead: its processes do nothing but compute, and
          rank 0 of pippy has the controller beside its worker, on one core; how much of the 4 ms that takes was not measured.
          Earlier, on busier machines: 0.92 to 1.03, and 0.80 to 0.94 with it. With all schedules, --rounds 5, then: without a
          delay pippy's fastest, 1f1b, 54.5 ms (quartiles 48.8–65.9), torch's, GPipe, 71.1 (69.2–79.0); with 1 ms eager_1f1b
          73.6 (68.4–76.4), torch's 1F1B 97.9 (90.5–100.2). When all values went by RPC, 1f1b took 1.24 and 1.04: RPC wakes
          four threads for each small value, and here the thread that computes sends it. When only small ones went by TCP, and
          large ones by RPC, two runs by turns with --rounds 3 gave 1f1b 221 and 148 ms without a delay, and 103 and 197 with
          it; with all by TCP 135 and 149, 91 and 91.
"""

import argparse
import os
import platform
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from exps import versus_torch
from exps.peers import gpt, pippy_peer, single, torch_peer
from exps.peers.contestant import Contestant
from exps.peers.hosts import Host, hosts

SIZES = ("medium", "small", "tiny")


def entries(both: list[Host]) -> dict[str, Callable[[gpt.Size], Contestant]]:
    """All contestants by name: those that are on two hosts, and 1b."""
    return {
        "1b": single.single,
        **{f"torch {name}": partial(torch_peer.torch_peer, name, hosts=both) for name in torch_peer.SCHEDULES},
        **{f"pippy {name}": partial(pippy_peer.on_hosts, name, hosts=both) for name in pippy_peer.SCHEDULES},
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[*SIZES, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--delay", type=float, nargs="+", default=[0.0, 0.001], help="seconds that a packet takes")
    parser.add_argument("--only", nargs="+", default=["torch", "pippy"], metavar="NAME", help="beginnings of names")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the hosts are to be removed
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {platform.machine()}; load {os.getloadavg()[0]:.1f}")
    wrong: list[Any] = []
    for delay in options.delay:
        with hosts(2, delay) as both:
            makers = versus_torch.chosen(entries(both), options.only)
            for size in SIZES if options.size == "all" else [options.size]:
                print(f"\n{delay * 1e3:g} ms for each packet")
                wrong += versus_torch.measure(size, options.rounds, makers)["wrong"]
    if wrong:
        raise SystemExit("some contestants compute something else than 1b")


if __name__ == "__main__":
    main()
