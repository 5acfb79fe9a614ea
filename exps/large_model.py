"""How much memory does the script take for a model that it does not hold, and how much do the workers take?

Question: a language model with a tied embedding is made on the meta device, cut, balanced, initialized by its workers, and
          computes. How far does the memory of the script's process rise above what it had with pippy imported; what do the
          workers hold, beside the bytes of their parameters?
Command:  python -m exps.large_model              (see --help; from the root of the repository)
Method:   the kernel's peak of resident memory of each process (VmHWM), reset before: for the script before it makes the
          model, for the workers before driver.initialize(). The workers' memory afterwards is their private memory.
Finding:  a model of 3,091 MiB on four workers: the script's process rose by 95 MiB, and by 90 for one of 336 MiB: that is
          what Python imports. The workers hold 769 to 785 MiB of parameters; their memory rose by 7 to 8 MiB more than
          that, and while they initialized by at most 15 to 17 MiB more.
"""

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from exps.memory import forget_peak, held, kilobytes
from pippy import MultiUseParameterConfig, PipelineDriver1F1B, local_cluster, pipeline

VOCABULARY = 4096


class Block(nn.Module):
    """Two linear layers, with a norm before them and a sum behind them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the layers give."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """An embedding, blocks, and a head that shares the embedding's weight."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The logits."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(frozen=True)
class WorkerMemory:
    """The MiB of one worker: its parameters, by how much its private memory rose, and by how much all of it rose at most.

    >>> WorkerMemory(80, 82.5, 90).parameters
    80
    """

    parameters: float
    rose: float
    most: float


@dataclass(frozen=True)
class Measured:
    """The MiB of the model, by how much the script's memory rose at most, and the workers; seconds to initialize.

    >>> Measured(300, 12, [], 1.0).script
    12
    """

    model: float
    script: float
    workers: list[WorkerMemory]
    seconds: float


def measure(mib: float, workers: int, width: int = 1024) -> Measured:
    """Make a model of this size, initialize it, and compute with it."""
    blocks = max(workers, round((mib - VOCABULARY * width / 2**18) * 2**18 / (8 * width * width)))
    with local_cluster(workers, threads=1) as cluster:
        before = _resident(os.getpid())
        forget_peak(os.getpid())
        with torch.device("meta"):
            model = Model(width, blocks)
        example = torch.empty(4, dtype=torch.long, device="meta"), torch.empty(4, dtype=torch.long, device="meta")
        pipe = pipeline(
            model,
            nn.CrossEntropyLoss(),
            split="parameters",
            num_stages=workers,
            example_args=example,
            multi_use_param_spec=MultiUseParameterConfig.REPLICATE,
        )
        driver = PipelineDriver1F1B(pipe, cluster)
        pids = [worker.pid for worker in cluster.session.workers]  # type: ignore[attr-defined]
        for pid in pids:
            forget_peak(pid)
        started = [(held(pid)["own"], _resident(pid)) for pid in pids]
        start = time.perf_counter()
        driver.initialize(seed=0)
        seconds = time.perf_counter() - start
        ids = torch.arange(8)
        with torch.no_grad():
            assert driver.run(2, ids, ids).isfinite()
        ended = [held(pid) for pid in pids]
        sizes = [sum(each.nbytes for each in stage.parameters()) / 2**20 for _, stage in pipe.stages()]
        found = [
            WorkerMemory(size, after["own"] - own, after["most"] - resident)
            for size, (own, resident), after in zip(sizes, started, ended)
        ]
        whole = sum(each.nbytes for each in model.parameters()) / 2**20
        return Measured(whole, _peak(os.getpid()) - before, found, seconds)


def _resident(pid: int) -> float:
    return _status(pid)["VmRSS"] / 1024


def _peak(pid: int) -> float:
    return _status(pid)["VmHWM"] / 1024


def _status(pid: int) -> dict[str, int]:
    return kilobytes(Path(f"/proc/{pid}/status"))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=3072, help="The MiB of the model.  [3072]")
    parser.add_argument("--workers", type=int, default=4)
    given = parser.parse_args(arguments)
    found = measure(given.mib, given.workers)
    print(f"the model has {found.model:.0f} MiB; the script's process rose by at most {found.script:.0f} MiB")
    print(f"initialize() took {found.seconds:.1f} s")
    print("worker   parameters   memory rose by   at most")
    for number, each in enumerate(found.workers):
        print(f"{number:<6} {each.parameters:8.1f} MiB {each.rose:12.1f} MiB {each.most:6.1f} MiB")


if __name__ == "__main__":
    main()
