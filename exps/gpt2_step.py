"""How fast is a step of Hugging Face's GPT-2, compared with a GPT-2 written for a pipeline, and with torch's 1F1B?

Question: with two workers and 8 micro-batches, how long is a step (forward and backward, no optimizer) of the model that
          `pipeline` has traced from an example, of the same model written with `pipe_split()`, and of the same blocks in
          stages of torch.distributed.pipelining? What does zb_h1 save?
Command:  python -m exps.gpt2_step --rounds 15       (from the root of the repository; --size tiny takes seconds)
Method:   as exps/versus_torch.py does it: processes pinned one to a core, one intra-op thread each, turns in random order,
          loss and gradients first compared with one process that does all the work. torch's `pipeline()` traces this model only
          without its loss, so its stages are made by hand, of Hugging Face's blocks.
Finding:  on two cores of a virtual machine, 9 rounds, of torch's 1F1B (2.72 s), with 95 % intervals: traced from an example,
          1F1B takes 0.95 (0.84 to 1.14), zb_h1 0.92 (0.83 to 1.04) and fill_drain 1.01 (0.83 to 1.18); written, 0.94 (0.84 to
          1.07) and 0.98 (0.88 to 1.10). torch's GPipe takes 0.99 (0.90 to 1.14), one process 1.60 (1.40 to 1.82). Within this
          spread the pipelines are alike. Earlier: 0.98 (quartiles 0.82 to 1.15) for traced 1F1B.
"""

import argparse
import os
import platform
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from exps.peers import gpt, gpt2
from exps.peers.contestant import Contestant, Team
from exps.peers.pippy_peer import Controller, PippyTeam
from exps.peers.rounds import quartiles, ratio, started, take_turns
from exps.peers.torch_peer import TorchTeam
from exps.versus_torch import agreement, chosen

RIVALS = ("written 1f1b", "torch 1F1B")  # what the others are compared with
TURNS = {"full": (0, 1), "tiny": (1, 3)}  # untimed and timed steps of a turn

Entries = Mapping[str, Callable[[gpt.Size], Contestant]]


def single(size: gpt.Size, keep_memory: bool) -> Team:
    return Team(1, gpt2.SingleRank, size, keep_memory=keep_memory)


def torch_peer(name: str, size: gpt.Size, keep_memory: bool) -> Team:
    return TorchTeam(name, gpt.CHUNKS, gpt2.Parts(size), gpt.batch(size), gpt2.loss_fn, keep_memory=keep_memory)


def pippy_peer(schedule: str, form: Callable[[gpt.Size], Any], size: gpt.Size) -> Team:
    return PippyTeam(1, Controller, schedule, gpt.CHUNKS, form(size), gpt.batch(size))


def entries(keep_memory: bool) -> Entries:
    """All contestants by name; "example" is pippy on Hugging Face's model, "written" on the one with marks."""
    found: dict[str, Callable[[gpt.Size], Contestant]] = {"1b": partial(single, keep_memory=keep_memory)}
    for name in ("1F1B", "GPipe"):
        found[f"torch {name}"] = partial(torch_peer, name, keep_memory=keep_memory)
    for word, form in {"example": gpt2.FromExample, "written": gpt2.FromMarks}.items():
        for schedule in ("1f1b", "zb_h1"):
            found[f"{word} {schedule}"] = partial(pippy_peer, schedule, form)
    found["example fill_drain"] = partial(pippy_peer, "fill_drain", gpt2.FromExample)
    return found


def table(seconds: Mapping[str, list[float]]) -> str:
    """Medians, quartiles and the ratios to each rival that has run, with their intervals."""
    rivals = [rival for rival in RIVALS if rival in seconds]
    lines = [f"{'contestant':16}{'step ms':>10}   {'quartiles':20}" + "".join(f"{'of ' + each:24}" for each in rivals)]
    for name in sorted(seconds, key=lambda name: quartiles(seconds[name])[1]):
        low, median, high = (value * 1e3 for value in quartiles(seconds[name]))
        beside = ["{:.3f} ({:.3f}–{:.3f})".format(*ratio(seconds[name], seconds[rival])) for rival in rivals]
        lines.append(
            f"{name:16}{median:10.2f}   {f'{low:.2f}–{high:.2f}':20}" + "".join(f"{each:24}" for each in beside)
        )
    return "\n".join(lines)


def measure(name: str, rounds: int, makers: Entries) -> dict[str, list[float]]:
    """Check and time the contestants on the model of one size, and print the table."""
    size = gpt2.SIZES[name]
    contestants = {who: make(size) for who, make in makers.items()}
    with started(contestants):
        agreed, wrong = agreement(contestants)
        timed = {who: contestant for who, contestant in contestants.items() if who not in wrong}
        seconds = take_turns(timed, rounds, *TURNS[name])
    print(f"\n{name}: {size}, {rounds} rounds\n{table(seconds)}")
    for fault in wrong.values():
        print(f"\nNOT TIMED: {fault}")
    if agreed:
        print(f"loss and gradients agree with 1b to {max(agreed.values()):.1e} of their size")
    if wrong:
        raise SystemExit("some contestants compute something else than 1b")
    return seconds


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(gpt2.SIZES), default="full")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="beginnings of names; 1b always runs")
    parser.add_argument(
        "--keep-memory",
        action="store_true",
        help="give the other contestants the allocator settings that pippy gives its workers",
    )
    options = parser.parse_args(arguments)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {platform.machine()}; load {os.getloadavg()[0]:.1f}")
    measure(options.size, options.rounds, chosen(entries(options.keep_memory), options.only))


if __name__ == "__main__":
    main()
