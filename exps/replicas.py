"""How fast is a step of two replicas of a pipeline, compared with torch.distributed.pipelining in DDP?

Question: with two replicas of two stages, on four workers, 8 micro-batches and a GPT-like decoder, how long is a step (forward
          and backward of all micro-batches, and the sums of all gradients; no optimizer)? And what does a divided state save?
Command:  python -m exps.replicas --size small --rounds 20       (see --help; from the root of the repository)
Method:   as versus_torch.py, with the same model and checks: the loss and the gradients of each contestant are compared with
          those of 1b, one process with the whole mini-batch. torch's four ranks use gloo; DDP adds up gradients in the last
          micro-batch's backward, and looks for unused parameters, as without that it fails in its second step. pippy adds
          them up in the step, too. Of the memory, the resident bytes of each worker are read before and after AdamW's first
          step.
Finding:  four workers on two virtual cores, so that they wait for cores, too. small, --rounds 4, of torch 1F1B: pippy 1f1b 0.70
          (0.68–0.84), fill_drain 0.70 (0.66–0.78); torch GPipe 1.01, one process 0.82. Not measured with a core for each
          worker, nor what a divided state saves on a model that is large enough to show it.
"""

import argparse
import os
import platform
from functools import partial
from pathlib import Path

import torch

from exps import versus_torch
from exps.peers import gpt, pippy_peer, replica_peers, single
from pippy import PipelineDriver, cluster

RIVAL = "torch 1F1B"
PIPPY = ("1f1b", "fill_drain", "eager_1f1b", "zb_h1")


def entries() -> versus_torch.Entries:
    """All contestants by name."""
    return {
        "1b": single.single,
        **{f"torch {name}": partial(replica_peers.torch_replicas, name) for name in replica_peers.SCHEDULES},
        **{f"pippy {name}": partial(replica_peers.pippy_replicas, name) for name in PIPPY},
    }


def state_bytes(size: gpt.Size, divided: bool) -> list[int]:
    """By how many bytes each worker's resident memory grows with the first step of AdamW."""
    with cluster(replica_peers.REPLICAS * replica_peers.STAGES, threads=1) as workers:
        pipe = pippy_peer.GptPipe(size)(replica_peers.STAGES)
        driver = PipelineDriver(pipe, workers, schedule="1f1b", replicas=replica_peers.REPLICAS)
        optimizer = driver.instantiate_optimizer(torch.optim.AdamW, lr=1e-4, divide_state=divided)
        pids = [address.pid for address in workers.session.workers]
        for _ in range(2):
            driver.run(gpt.CHUNKS, *gpt.batch(size))
            driver.zero_grad()
        driver.run(gpt.CHUNKS, *gpt.batch(size))
        before = list(map(_resident, pids))
        optimizer.step()
        return [_resident(pid) - was for pid, was in zip(pids, before)]


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(gpt.SIZES), default="small")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="beginnings of names; 1b always runs")
    options = parser.parse_args(arguments)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {platform.machine()}; load {os.getloadavg()[0]:.1f}")
    makers = versus_torch.chosen(entries(), options.only)
    result = versus_torch.measure(options.size, options.rounds, makers, RIVAL)
    for divided in (False, True):
        grown = ", ".join(f"{size / 2**20:.1f}" for size in state_bytes(gpt.SIZES[options.size], divided))
        print(f"AdamW's first step, divide_state={divided}: the workers grew by {grown} MiB")
    if result["wrong"]:
        raise SystemExit("some contestants compute something else than 1b")


if __name__ == "__main__":
    main()
