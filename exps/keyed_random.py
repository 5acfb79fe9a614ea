"""How much time do random numbers take that do not depend on the split?

Question: how much longer is a step of a model with dropout, if each operation that draws seeds the generator first?
Command:  python -m exps.keyed_random                (from the root of the repository; see --help)
Method:   the decoder of `versus_torch`, with dropout in its attention, behind its attention and its feed-forward layers, and
          behind its embedding, two workers, 1f1b, 8 micro-batches. One cluster, pinned, and two drivers of one Pipe: with
          ``keyed_random=False`` and with keys. Their steps take turns, in random order within each pair, and the ratio is
          taken within pairs, of the times and of the processor time of both workers, which says more on a busy machine. The
          result is the median of the ratios, and its 95 % interval by a bootstrap.
Finding:  tiny, 13 operations in 8 micro-batches, --pairs 150, on two virtual cores that did nothing else: 2.1 % more time (1.8
          to 2.6 %), and 1.8 % more processor time (1.3 to 2.3 %).
          To seed the CPU's generator takes 3 µs, most of it in torch. With --p 0 no operation is seeded, and nothing is added.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from exps.peers import gpt
from exps.recording import in_turns, interval
from pippy import Cluster, Pipe, PipelineDriver, SplitPoint, annotate_split_points, cluster, pipeline
from pippy.ir.run.random_state import seed_draws

Times = tuple[float, float]  # of a step, and of the processors


class Block(gpt.Block):
    """With dropout: of the attention, and behind both layers."""

    def __init__(self, size: gpt.Size, p: float) -> None:
        super().__init__(size)
        self.p, self.dropout1, self.dropout2 = p, nn.Dropout(p), nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.size()
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.p)
        x = x + self.dropout1(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout2(self.down(F.gelu(self.up(self.norm2(x)))))


def pipe_of(size: gpt.Size, p: float) -> Pipe:
    """The decoder with dropout, in two stages."""
    model = gpt.model(size)
    model.blocks = nn.ModuleDict({name: Block(size, p) for name in model.blocks})
    model.embed = nn.Sequential(model.embed, nn.Dropout(p))
    annotate_split_points(model, dict.fromkeys(gpt.cuts(size, 2), SplitPoint.BEGINNING))
    return pipeline(model, gpt.loss_fn)


def seeded(pipe: Pipe) -> int:
    """How many operations seed the generator first."""
    return sum(
        len(stage.graph.find_nodes(op="call_function", target=seed_draws))  # type: ignore[union-attr, operator]
        for _, stage in pipe.stages()
    )


def processor_time(workers: Cluster) -> float:
    """The seconds that the main threads of all workers have computed so far."""
    files = [Path(f"/proc/{each.pid}/schedstat") for each in workers.session.workers]
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def pairs(drivers: dict[bool, PipelineDriver], size: gpt.Size, count: int) -> list[tuple[Times, Times]]:
    """The times of steps without and with keys."""
    x, target = gpt.batch(size)

    def step(keyed: bool) -> Times:
        workers = drivers[keyed].cluster
        start, computed = time.perf_counter(), processor_time(workers)
        drivers[keyed].run(gpt.CHUNKS, x, target)
        return time.perf_counter() - start, processor_time(workers) - computed

    return in_turns(step, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["tiny", "small"], choices=list(gpt.SIZES))
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--p", type=float, default=0.1, help="the probability of dropout; with 0 nothing draws")
    options = parser.parse_args()
    print(f"{'size':8}{'seeded':>8}  {'':10}{'step':>11}{'more':>10}   95 %")
    with cluster(2, threads=1, pin=True) as workers:
        for name in options.sizes:
            size = gpt.SIZES[name]
            pipe = pipe_of(size, options.p)
            drivers = {keyed: PipelineDriver(pipe, workers, keyed_random=keyed) for keyed in (False, True)}
            found = pairs(drivers, size, options.pairs)
            for index, what in enumerate(("time", "processor")):
                middle, low, high = interval([keyed[index] / plain[index] for plain, keyed in found])
                step = statistics.median(plain[index] for plain, _ in found)
                print(
                    f"{name:8}{seeded(pipe):8}  {what:10}{step * 1e3:8.2f} ms{middle - 1:10.2%}   {low - 1:.2%} to "
                    f"{high - 1:.2%}",
                    flush=True,
                )
            for driver in drivers.values():
                driver.close()


if __name__ == "__main__":
    main()
