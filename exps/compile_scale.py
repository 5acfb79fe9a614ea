"""How long does `pipeline()` take for large models, and how does that grow?

Question: is compiling close to linear in the size of the model, and below 3 s for 1,000 layers and 10 s for 200
          transformer blocks in 64 stages?
Command:  python exps/compile_scale.py            (`make bench` runs it; see --help)
Finding:  see docs/decisions.md, "Compiling".
"""

import argparse
import cProfile
import io
import pstats
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from pippy import Pipe, SplitPoint, annotate_split_points, pipeline


def sequential(layers: int, stages: int = 8) -> nn.Module:
    """Linear layers and activations in a row."""
    model = nn.Sequential(*(nn.Linear(4, 4) if index % 2 == 0 else nn.ReLU() for index in range(layers)))
    cut(model, "{}", layers, stages)
    return model


class Block(nn.Module):
    """A transformer block whose attention is traced through."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.size()
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, 2, -1).transpose(1, 2) for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Blocks between an embedding and a head that are tied."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(16, 8), nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def transformer(blocks: int, stages: int) -> nn.Module:
    """A transformer cut into stages of about the same size."""
    model = Transformer(blocks)
    cut(model, "blocks.{}", blocks, stages)
    return model


def cut(model: nn.Module, name: str, parts: int, stages: int) -> None:
    """Cut a model with ``parts`` numbered modules into ``stages``."""
    places = [round(index * parts / stages) for index in range(1, stages)]
    annotate_split_points(model, {name.format(place): SplitPoint.BEGINNING for place in places})


CASES: list[tuple[str, Callable[[], nn.Module], int]] = [
    *((f"{n:5} layers,     8 stages", lambda n=n: sequential(n), 8) for n in (125, 250, 500, 1000)),
    *((f"{n:5} layers, {n // 8:5} stages", lambda n=n: sequential(n, n // 8), n // 8) for n in (125, 250, 500, 1000)),
    *(
        (f"{n:5} blocks, {s:5} stages", lambda n=n, s=s: transformer(n, s), s)
        for n, s in ((50, 16), (100, 32), (200, 64))
    ),
]


def compile_once(make: Callable[[], nn.Module], stages: int) -> float:
    """The seconds of one `pipeline()` with a loss, without the building of the model."""
    model = make()
    start = time.perf_counter()
    pipe: Pipe = pipeline(model, nn.MSELoss())
    seconds = time.perf_counter() - start
    assert pipe.num_stages == stages
    return seconds


def profile(make: Callable[[], nn.Module], entries: int) -> str:
    """The functions in which most time is spent."""
    model, profiler, text = make(), cProfile.Profile(), io.StringIO()
    profiler.runcall(pipeline, model, nn.MSELoss())
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(entries)
    return text.getvalue().split("ncalls", 1)[1]


def main() -> None:
    """Time every case, the repetitions interleaved, and print medians and spread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="how often each case is timed")
    parser.add_argument("--profile", type=int, default=8, metavar="N", help="how many entries of each profile to print")
    options = parser.parse_args()
    torch.set_num_threads(1)
    compile_once(*CASES[0][1:])  # imports, caches
    seconds: dict[str, list[float]] = {name: [] for name, _, _ in CASES}
    for _ in range(options.repeat):
        for name, make, stages in CASES:
            seconds[name].append(compile_once(make, stages))
    print(f"{'model':26}{'median':>9}{'least':>9}{'most':>9}   (seconds, {options.repeat} times each)")
    for name, times in seconds.items():
        print(f"{name:26}{statistics.median(times):9.3f}{min(times):9.3f}{max(times):9.3f}")
    for name, make, _ in (CASES[3], CASES[-1]):
        print(f"\nprofile of {name.strip()}: ncalls{profile(make, options.profile)}")


if __name__ == "__main__":
    main()
