"""How fast is a step on two hosts, compared with torch.distributed.pipelining over gloo on the same two?

Question: with one worker on each host, 8 micro-batches and a GPT-like decoder, how long is a step (forward and backward of all
          micro-batches, no optimizer), with and without a delay of 1 ms on each packet?
Command:  python -m exps.two_hosts --size small --rounds 20       (see --help; from the root of the repository, as root)
Method:   as versus_torch.py, with the same contestants, models and checks; but each process of a contestant is on a host of
          its own, which is a network namespace, and has one core. pippy's are those that `cluster()` joins under torchrun.
Finding:  when all values went by RPC (small ones have a connection of TCP now, and this is to be measured again). Two virtual
          cores. small, --rounds 12, --only "torch 1F1B" "pippy 1f1b" "pippy eager_1f1b" "pippy fill_drain", of torch 1F1B:
          without a delay pippy 1f1b 1.24 (1.17–1.29), eager_1f1b 1.22, fill_drain 1.29; with 1 ms 1.04 (1.01–1.09), 0.94
          (0.92–0.97), 0.95. All contestants, 8 rounds, without a delay: 1.06 (1.03–1.16), 0.95, 0.97; torch's other schedules
          1.1 to 2.0. So 1f1b is not yet as fast as torch's over gloo. Where packets take time, eager_1f1b is: its values
          travel while others are computed.
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
