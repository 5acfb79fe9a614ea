"""How fast are compiled stages, beside torch.distributed.pipelining over `torch.compile`d stages and one compiled model?

Question: with two workers and 8 micro-batches of a decoder, how long is a step under 1F1B, zb_h1 and zb_v whose stages are
          compiled, with halves of compiled code? And how long is a first step, when equal stages are compiled once?
Command:  python -m exps.compiled --size small --rounds 10        (--size gpt2 is Hugging Face's; see --help)
          python -m exps.compiled --first-step
Method:   as exps/versus_torch.py does it: processes pinned one to a core, one intra-op thread each, turns in random order, loss
          and gradients first compared with 1b, one process that does all the work. "compiled torch" calls `compile()` on each
          stage of torch's, "compiled 1b" on the whole model; what is compiled, is compiled before the first turn. A first step
          is timed with an empty cache: of twelve equal blocks in four stages on two workers, and of three of them in one stage
          on one worker; it has the compiling, the recording and the start of what compiles.
Finding:  two virtual cores, --size small --rounds 8, of torch's 1F1B (33.8 ms): compiled pippy 1f1b 0.78 (0.72–0.81), zb_h1
          0.83 (0.77–0.86) and zb_v 0.88 (0.80–0.91), compiled torch 1F1B 0.85 (0.78–0.87), the compiled model in one process
          1.08 (0.99–1.11); as graphs 1f1b 0.99 (0.91–1.02), zb_h1 0.97 (0.90–0.98), zb_v 1.07 (0.99–1.10); without, 1f1b 1.01
          (0.93–1.05), zb_h1 1.01 (0.93–1.05), zb_v 1.10 (1.01–1.13). So compiled 1f1b takes 0.92 of torch's compiled best,
          and zb_h1 0.98: I and W are two graphs, in which less is fused than in B, and with two workers there is little idle
          time to fill. torch's ZBV over compiled stages ran on tiny only, without donated buffers. medium, --rounds 4, of
          torch's 1F1B (877 ms): compiled zb_h1 0.91 (0.86–0.97), without 0.93 (0.88–1.02); 1f1b without 0.94 (0.87–1.08),
          compiled 0.98 (0.94–1.31), as graphs 0.98 (0.93–1.03); compiled torch 1F1B 1.09 (1.01–1.17). There compiled zb_h1
          takes 0.84 of torch's compiled best, and compiled 1f1b 1.04 of 1f1b: a product has the same kernel, and each step
          begins with sums of zeros.
          --first-step, three rounds: one stage takes 25.1 to 25.8 s, four stages 31.4 to 31.8 s: 1.23 to 1.26 times as long.
"""

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from exps.peers import gpt, gpt2, single
from exps.peers.compiled_peers import CompiledSingle, CompiledSingleGpt2
from exps.peers.contestant import Contestant, Rank, Team
from exps.peers.pippy_peer import Controller, GptPipe, PippyTeam
from exps.peers.torch_peer import CompiledParts, GptParts, TorchTeam
from exps.versus_torch import RIVAL, chosen, compare
from pippy import Pipe, PipelineDriver, cluster

TURNS = {"gpt2": (0, 1), "medium": (0, 1), "small": (1, 3), "tiny": (2, 5)}  # untimed and timed steps of a turn
SCHEDULES = ("1f1b", "zb_h1", "zb_v")
BLOCKS, STAGES = 12, 4

Entries = Mapping[str, Callable[[], Contestant]]


def entries(name: str) -> Entries:
    """All contestants on the model of this name, by their names."""
    parts: Callable[[int, int], nn.Module]
    form: Callable[[int], Pipe]
    whole: tuple[Callable[..., Rank], Callable[..., Rank]]  # as it is, and compiled
    if name == "gpt2":
        size, loss_fn, whole = gpt2.SIZES["full"], gpt2.loss_fn, (gpt2.SingleRank, CompiledSingleGpt2)
        parts, form = gpt2.Parts(size).__call__, gpt2.FromExample(size).__call__
    else:
        size, loss_fn, whole = gpt.SIZES[name], gpt.loss_fn, (single.SingleRank, CompiledSingle)
        parts, form = GptParts(size).__call__, GptPipe(size).__call__
    batch = gpt.batch(size)

    def torch_team(schedule: str, parts: Callable[[int, int], nn.Module]) -> Team:
        return TorchTeam(schedule, gpt.CHUNKS, parts, batch, loss_fn)

    def pippy_team(schedule: str, compile: bool | str) -> Team:
        return PippyTeam(1, partial(Controller, compile=compile), schedule, gpt.CHUNKS, form, batch)

    found: dict[str, Callable[[], Contestant]] = {
        "1b": partial(Team, 1, whole[0], size),
        "compiled 1b": partial(Team, 1, whole[1], size),
        RIVAL: partial(torch_team, "1F1B", parts),
    }
    for schedule in ("1F1B", "ZBVZeroBubble"):
        found[f"compiled torch {schedule}"] = partial(torch_team, schedule, CompiledParts(parts).__call__)
    ways: dict[str, bool | str] = {"": False, "graphs ": "graphs", "compiled ": True}
    for word, compile in ways.items():
        for schedule in SCHEDULES:
            found[f"{word}pippy {schedule}"] = partial(pippy_team, schedule, compile)
    return found


class Blocks(nn.Sequential):
    """Equal blocks of a decoder, in equal stages."""

    def __init__(self, blocks: int) -> None:
        super().__init__(*(gpt.Block(gpt.SIZES["small"]) for _ in range(blocks)))


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def first_step(blocks: int, stages: int, workers: int) -> float:
    """Seconds of the first step of so many blocks, compiled with an empty cache; the cluster is there."""
    size = gpt.SIZES["small"]
    rows = torch.randn(gpt.BATCH, size.length, size.width)
    cuts = [stage * blocks // stages for stage in range(1, stages)]
    parts = [Blocks(end - begin) for begin, end in zip([0, *cuts], [*cuts, blocks])]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # the workers take it over
        pipe = Pipe.from_sequential(nn.Sequential(*parts), squares)
        schedule = "1f1b" if stages == workers else "interleaved_1f1b"
        with cluster(workers, threads=1) as opened:
            driver = PipelineDriver(pipe, opened, schedule=schedule, compile=True, check=False)
            begun = time.perf_counter()
            driver.run(gpt.CHUNKS, rows, torch.zeros_like(rows))
            return time.perf_counter() - begun


def first_steps(rounds: int) -> None:
    """Print how long the first steps of one stage and of four take, by turns."""
    for _ in range(rounds):
        one = first_step(BLOCKS // STAGES, 1, 1)
        four = first_step(BLOCKS, STAGES, 2)
        print(f"one stage {one:.1f} s, four stages {four:.1f} s: {four / one:.2f} times as long", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(TURNS), default="small")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="beginnings of names; 1b always runs")
    parser.add_argument("--beside", default=RIVAL, metavar="NAME", help="the contestant that others are compared with")
    parser.add_argument("--first-step", action="store_true", help="time first steps instead, which compile")
    options = parser.parse_args(arguments)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {platform.machine()}; load {os.getloadavg()[0]:.1f}")
    if options.first_step:
        first_steps(options.rounds)
        return
    makers: Mapping[str, Any] = chosen(entries(options.size), options.only)
    result = compare(options.size, options.rounds, TURNS[options.size], makers, options.beside)
    if result["wrong"]:
        raise SystemExit("some contestants compute something else than 1b")


if __name__ == "__main__":
    main()
