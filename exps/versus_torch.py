"""How fast is a training step, compared with torch.distributed.pipelining, a single process, and the bound?

Question: with two workers, 8 micro-batches and a GPT-like decoder, how long is a step (forward and backward of all
          micro-batches, no optimizer) under each schedule of torch and of pippy?
Command:  python -m exps.versus_torch --size small --rounds 30       (see --help; from the root of the repository)
Method:   every contestant has processes of its own, pinned one to a core, one intra-op thread each. They take turns in
          random order, round after round; the others sleep on a socket. First, the loss and all gradients of each
          are compared with those of 1b, the single process. A ratio is one of medians over rounds; its interval is from a
          bootstrap over rounds. "normal" is step / (1b/2 × 9/8): a perfect fill and drain of 8 micro-batches over
          two workers, each half as long as 1b. "µs/mb" is the time above that, for each micro-batch. torch's steps are
          timed from the start of its first rank to the end of its last, without a barrier; pippy's from the call of the
          controller to its return.
Finding:  two cores of a virtual machine, of torch 1F1B. small (40 rounds): pippy 1f1b 0.91 (0.88–0.98), zb_v 0.94 (0.92–1.02),
          fill_drain 0.94; torch's best is 1F1B; the bound 0.63. Compiled: pippy 1f1b 0.76 (0.74–0.82), zb_v 0.77, torch's 1F1B
          0.84 (0.81–0.91); as graphs zb_h1 0.88 (0.85–0.95). tiny (40 rounds): pippy fill_drain 0.63 (0.60–0.69), 1f1b 0.68
          (0.64–0.74), with 326 and 391 µs of overhead a micro-batch where torch 1F1B has 868; compiled, pippy 0.48 (0.45–0.52),
          torch 0.64 (0.60–0.70); the bound 0.41. medium (14 rounds): pippy zb_v 0.89 (0.86–0.91), 1f1b 0.96 (0.94–0.98),
          torch's best, DualPipeV, 0.94 (0.91–0.96); compiled, pippy zb_v 0.86 (0.83–0.88), 1f1b 0.93 (0.91–0.95), torch's 1F1B
          1.07 (1.04–1.09).
          While other work ran, intervals were twice as wide, and another processor had 1f1b on small at 0.986 (0.943–1.032, 60
          rounds). Fewer than 30 rounds on small and tiny, and 12 on medium, decide nothing. docs/decisions.md says what lies
          between a step and the bound.
          Forwards computed again (medium, 7 rounds, --only "torch 1F1B" again "pippy 1f1b" --beside "pippy 1f1b"): of pippy's
          1f1b, "always" takes 1.29 (1.21–1.40), torch's 1F1B with torch.utils.checkpoint around its blocks 1.30 (1.24–1.38),
          "except_last" 1.15 (1.03–1.23), and torch's without 1.10 (1.06–1.17). The aim was 1.34.
          Stages as graphs (small, 10 rounds, --only "torch 1F1B" "pippy 1f1b" "pippy zb_h1" "graphs pippy"): graphs zb_h1 0.94
          (0.90–1.01), where zb_h1 with autograd's halves has 1.00 (0.95–1.09); graphs 1f1b 0.97 (0.93–1.03), 1f1b 0.96.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from exps.peers import gpt, pippy_peer, single, torch_peer
from exps.peers.contestant import Contestant
from exps.peers.rounds import Disagreement, check, quartiles, ratio, started, take_turns

TURNS = {"medium": (0, 1), "small": (1, 3), "tiny": (2, 7)}  # untimed and timed steps of a turn
RIVAL = "torch 1F1B"
PERFECT = (gpt.CHUNKS + 1) / gpt.CHUNKS  # with two workers the first micro-batch fills, the last drains

Entries = Mapping[str, Callable[[gpt.Size], Contestant]]
Maker = TypeVar("Maker")


def entries(keep_memory: bool) -> Entries:
    """All contestants by name, pippy's among them."""
    torches = {
        f"torch {name}": partial(torch_peer.torch_peer, name, keep_memory=keep_memory) for name in torch_peer.SCHEDULES
    }
    pippys = {f"pippy {name}": partial(pippy_peer.pippy_peer, name) for name in pippy_peer.SCHEDULES}
    # these compute forwards again: torch those of the blocks, pippy those of the stages
    again: dict[str, Callable[[gpt.Size], Contestant]] = {}
    again[f"again {RIVAL}"] = partial(torch_peer.torch_peer, "1F1B", keep_memory=keep_memory, again=True)
    for mode in ("always", "except_last"):
        again[f"again pippy 1f1b {mode}"] = partial(pippy_peer.pippy_peer, "1f1b", checkpoint=mode)
    # their stages run as graphs, or compiled piece by piece; torch's are compiled as torch.compile does it
    compiled: dict[str, Callable[[gpt.Size], Contestant]] = {
        f"{compile} pippy {name}": partial(pippy_peer.pippy_peer, name, compile=compile)
        for compile in ("graphs", "inductor")
        for name in ("1f1b", "zb_h1", "zb_v")
    }
    compiled[f"inductor {RIVAL}"] = partial(torch_peer.torch_peer, "1F1B", keep_memory=keep_memory, compile=True)
    return {
        "1b": partial(single.single, keep_memory=keep_memory),
        "bound": partial(single.bound, keep_memory=keep_memory),
        **torches,
        **pippys,
        **again,
        **compiled,
    }


def chosen(all_entries: Mapping[str, Maker], only: list[str]) -> Mapping[str, Maker]:
    """1b and the named contestants. A word selects every contestant whose name begins with it.

    >>> list(chosen({"1b": ..., "bound": ..., "torch GPipe": ..., "torch 1F1B": ...}, ["torch"]))
    ['1b', 'torch GPipe', 'torch 1F1B']
    """
    unknown = [word for word in only if not any(name.startswith(word) for name in all_entries)]
    if unknown:
        raise SystemExit(f"no contestant's name begins with {unknown}; there are {list(all_entries)}")
    return {name: make for name, make in all_entries.items() if name == "1b" or name.startswith(tuple(only))}


def agreement(contestants: Mapping[str, Contestant]) -> tuple[dict[str, float], dict[str, str]]:
    """Run two steps of each contestant and compare it with 1b. Returns the differences, and the faults of wrong ones."""
    agreed, wrong = {}, {}
    for contestant in contestants.values():
        contestant.step()
        contestant.step()  # gradients that were not emptied would be twice too large
    for name, contestant in contestants.items():
        if name not in ("1b", "bound"):  # the bound computes on made-up inputs
            try:
                agreed[name] = check(name, contestant, contestants["1b"])
            except Disagreement as disagreement:
                wrong[name] = str(disagreement)
    return agreed, wrong


def row(name: str, seconds: Mapping[str, list[float]], rival: str = RIVAL) -> dict[str, Any]:
    """The results of a contestant, beside those of ``rival``; times in milliseconds."""
    low, median, high = quartiles(seconds[name])
    perfect = quartiles(seconds["1b"])[1] / 2 * PERFECT
    return {
        "name": name,
        "median": median * 1e3,
        "quartiles": [low * 1e3, high * 1e3],
        "ratio": ratio(seconds[name], seconds[rival]) if rival in seconds else None,
        "normal": median / perfect,
        "overhead": (median - perfect) / gpt.CHUNKS * 1e6,
    }


def text(each: Mapping[str, Any]) -> str:
    """A row of the table."""
    spread = "{:.2f}–{:.2f}".format(*each["quartiles"])
    line = f"{each['name']:28}{each['median']:10.2f}   {spread:20}"
    beside = "{:.3f} ({:.3f}–{:.3f})".format(*each["ratio"]) if each["ratio"] else "–"
    return f"{line}{beside:24}{each['normal']:8.3f}{each['overhead']:10.0f}"


def print_table(title: str, rows: list[dict[str, Any]], rival: str) -> None:
    print(f"\n{title}")
    print(f"{'contestant':28}{'step ms':>10}   {'quartiles':20}{'of ' + rival:24}{'normal':>8}{'µs/mb':>10}")
    for each in sorted(rows, key=lambda each: each["median"]):
        print(text(each))


def measure(name: str, rounds: int, makers: Entries, rival: str = RIVAL) -> dict[str, Any]:
    """Check and time the contestants on the model of one size, and print the table."""
    size = gpt.SIZES[name]
    return compare(
        f"{name}: {size}", rounds, TURNS[name], {who: partial(make, size) for who, make in makers.items()}, rival
    )


def compare(
    name: str,
    rounds: int,
    turn: tuple[int, int],
    makers: Mapping[str, Callable[[], Contestant]],
    rival: str = RIVAL,
) -> dict[str, Any]:
    """Check contestants and time them, with so many untimed and timed steps in a ``turn``, and print the table."""
    contestants = {who: make() for who, make in makers.items()}
    warm, steps = turn

    def done(number: int) -> None:
        if sys.stderr.isatty():
            print(
                f"\r{name}: round {number + 1} of {rounds}",
                end="\n" if number + 1 == rounds else "",
                file=sys.stderr,
                flush=True,
            )

    with started(contestants):
        agreed, wrong = agreement(contestants)
        timed = {who: contestant for who, contestant in contestants.items() if who not in wrong}
        seconds = take_turns(timed, rounds, warm, steps, done=done)
    rows = [row(who, seconds, rival) for who in timed]
    print_table(f"{name}, {rounds} rounds of {steps} step(s)", rows, rival)
    for fault in wrong.values():
        print(f"\nNOT TIMED: {fault}")
    if agreed:
        print(f"loss and gradients agree with 1b to {max(agreed.values()):.1e} of their size")
    return {"name": name, "rounds": rounds, "rows": rows, "seconds": seconds, "agreed": agreed, "wrong": wrong}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[*gpt.SIZES, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="beginnings of names; 1b always runs")
    parser.add_argument(
        "--beside", default=RIVAL, metavar="NAME", help="the contestant that the others are compared with"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times to this file")
    parser.add_argument(
        "--keep-memory",
        action="store_true",
        help="give the other contestants the allocator settings that pippy gives its workers",
    )
    options = parser.parse_args(arguments)
    everybody = entries(options.keep_memory)
    if options.beside not in everybody:
        raise SystemExit(f"no contestant is called {options.beside!r}; there are {list(everybody)}")
    makers = chosen(everybody, options.only)
    sizes = list(gpt.SIZES) if options.size == "all" else [options.size]
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {platform.machine()}; load {os.getloadavg()[0]:.1f}")
    results = [measure(size, options.rounds, makers, options.beside) for size in sizes]
    if options.json:
        options.json.write_text(json.dumps({"keep_memory": options.keep_memory, "results": results}, indent=1))
    if any(result["wrong"] for result in results):
        raise SystemExit("some contestants compute something else than 1b")


if __name__ == "__main__":
    main()
