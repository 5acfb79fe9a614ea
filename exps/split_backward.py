"""How much slower is a backward that is split into its halves I and W?

Command: ``python exps/split_backward.py``

Finding, preliminary: measured while other work kept both cores busy (load 7 to 17), so the spread is wide. On medium
I + W is 1.08 of B in the median (quartiles 1.01 to 1.09), and I and W are of about equal length. On small a forward,
I and W take 1.2 times as long as a forward and a whole backward (tenth percentiles). To defer one weight's gradient takes
18 microseconds more in the forward alone (26.8 against 8.7). On tiny no layer is split: 1.02, and W is empty.
"""

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from pippy.drivers.worker.halves.split_backward import WeightDeferral
from pippy.ir.run.stage_backward import stage_backward


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    length: int
    words: int
    runs: int  # forwards and backwards in one sample, so that a sample is long enough to time


SIZES = {
    "medium": Size(8, 512, 8, 64, 2048, runs=1),
    "small": Size(8, 64, 4, 32, 256, runs=10),
    "tiny": Size(4, 16, 2, 8, 32, runs=40),
}
BATCH = 2


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.before, self.between = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.mixed = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.between(x))))


def stage(size: Size) -> nn.Module:
    """The blocks and the head: a stage whose input is an activation."""
    blocks = [Block(size) for _ in range(size.layers)]
    return nn.Sequential(*blocks, nn.LayerNorm(size.width), nn.Linear(size.width, size.words, bias=False))


Times = dict[str, float]


def timed(times: Times, name: str, work: Callable[[], object]) -> object:
    begin = time.thread_time()
    result = work()
    times[name] = times.get(name, 0.0) + time.thread_time() - begin
    return result


def whole(model: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> Times:
    times: Times = {}
    x = x.detach().requires_grad_()
    output = timed(times, "F", lambda: model(x))
    timed(times, "B", lambda: stage_backward(output, grad, [x]))
    return times


def halves(model: nn.Module, deferral: WeightDeferral, x: torch.Tensor, grad: torch.Tensor) -> Times:
    times: Times = {}
    x = x.detach().requires_grad_()
    begin = time.thread_time()
    with deferral.recording([x]) as deferred:
        output = model(x)
    times["F'"] = time.thread_time() - begin
    timed(times, "I", lambda: deferred.backward_input(output, grad, [x]))
    timed(times, "W", deferred.run)
    return times


def sample(runs: int, chunks: int, model: nn.Module, run: Callable[[], Times]) -> Times:
    """The mean times of a micro-batch; gradients are cleared every ``chunks``, as in a training step."""
    total: Times = {}
    for _ in range(runs):
        model.zero_grad()
        for _ in range(chunks):
            for name, seconds in run().items():
                total[name] = total.get(name, 0.0) + seconds / (runs * chunks)
    return total


def measure(name: str, repeat: int, chunks: int) -> float:
    """Print one row, in CPU time of this thread. Returns how much longer the halves take, with the forward."""
    size = SIZES[name]
    model = stage(size)
    twin = copy.deepcopy(model)
    deferral = WeightDeferral(twin)
    x, grad = torch.randn(BATCH, size.length, size.width), torch.randn(BATCH, size.length, size.words)
    ones: list[Times] = []
    others: list[Times] = []
    for _ in range(repeat + 2):
        ones.append(sample(size.runs, chunks, model, lambda: whole(model, x, grad)))
        others.append(sample(size.runs, chunks, twin, lambda: halves(twin, deferral, x, grad)))
    for one, other in zip(model.parameters(), twin.parameters()):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
    ones, others = ones[2:], others[2:]
    ratios = [sum(other.values()) / sum(one.values()) for one, other in zip(ones, others)]
    backward = [(other["I"] + other["W"]) / one["B"] for one, other in zip(ones, others)]
    columns = {**_columns(ones), **_columns(others)}
    print(f"{name:8}" + "".join(f"{key:>4} {median * 1e3:8.3f}" for key, median in columns.items()), end="")
    print(f"   (I+W)/B {_spread(backward)}   (F'+I+W)/(F+B) {_spread(ratios)}", flush=True)
    return statistics.median(ratios)


def _columns(samples: list[Times]) -> Times:
    return {key: statistics.median(one[key] for one in samples) for key in samples[0]}


def _spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--core", type=int, default=0)
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})
    torch.set_num_threads(1)
    print("milliseconds of CPU a micro-batch, medians; ratios of neighbours in time, medians and quartiles")
    for name in SIZES:
        measure(name, options.repeat, options.chunks)


if __name__ == "__main__":
    main()
