"""What takes the quarter of a step that lies between a schedule and the bound?

Question: two processes that compute half of the model each and never speak (the bound) take about three quarters of a step
          of 1F1B, torch's and pippy's. Which costs stand between?
Command:  python -m exps.step_and_bound --size small --rounds 60        (see --help; from the root of the repository)
Method:   as exps/versus_torch.py does it. One cost is added to the next: "by turns" is the longer half with no neighbour;
          "bound" is both halves at once; "in order" computes in the order of 1F1B, so more is alive at a time, and never
          waits; "bytes, awake" waits where a value would come, for one byte, in a loop, so fill and drain are there;
          "bytes, asleep" sleeps while it waits. Then pippy's and torch's 1F1B, whose values travel. Beside each: the time
          over the one before; of the last two, over "bytes, asleep".
Finding:  two virtual cores. small, 60 rounds, of torch's 1F1B (29.2 ms): the bound 0.65 (0.58–0.71), in the order of 1F1B 0.67,
          with fill and drain 0.78 (0.71–0.88), asleep 0.82 (0.74–0.90), pippy 0.95 (0.85–1.05). tiny, 40 rounds, of 16.0 ms:
          0.31, 0.32, 0.37, 0.40 (0.34–0.48), pippy 0.60 (0.51–0.73). So of what lies between the bound and torch's step on
          small, fill and drain are a third, the order and sleeping a sixth, and what travels and runs around it the rest: 0.13
          of pippy's step, 0.18 of torch's. No neighbour costs anything ("by turns" takes 1.02 of the bound). The stages of
          pippy compute as long as the plain parts (524 and 530 µs for forward and backward on tiny, 2.8 ms and 2.8 on small);
          what is pippy's own is about 1.4 ms a step, and 0.1 to 0.15 ms for each of 16 computations: the value's copy
          into shared memory and out, waking, autograd's leaves. Of that, pippy's own code takes 23 to 34 µs of processor
          time a computation (measured on two workers that are threads, beside the plain parts), a fifth; exps/control says
          what a computation costs by the clock, 0.22 to 0.35 of torch's. The rest is sleep, and caches after it.
"""

import argparse
import os
import platform
from collections.abc import Callable, Mapping
from functools import partial

import torch

from exps.peers import gpt, halves, single, torch_peer
from exps.peers.contestant import Contestant
from exps.peers.pippy_peer import pippy_peer
from exps.peers.rounds import quartiles, ratio, started, take_turns
from exps.versus_torch import TURNS


def contestants(size: gpt.Size) -> Mapping[str, Contestant]:
    """From the least that must be computed to what trains."""
    makers: dict[str, Callable[[], Contestant]] = {
        "by turns": partial(halves.by_turns, size),
        "bound": partial(single.bound, size),
        "in order": partial(halves.HalvesTeam, size, "never"),
        "bytes, awake": partial(halves.HalvesTeam, size, "awake"),
        "bytes, asleep": partial(halves.HalvesTeam, size, "asleep"),
        "pippy 1f1b": partial(pippy_peer, "1f1b", size),
        "torch 1F1B": partial(torch_peer.torch_peer, "1F1B", size),
    }
    return {name: make() for name, make in makers.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(gpt.SIZES), default="small")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args(arguments)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {platform.machine()}; load {os.getloadavg()[0]:.1f}")
    warm, steps = TURNS[options.size]
    with started(all_of := contestants(gpt.SIZES[options.size])):
        for each in all_of.values():
            each.step()
        seconds = take_turns(all_of, options.rounds, warm, steps)
    print(f"{options.size}, {options.rounds} rounds\n{'':16}{'step ms':>9}   {'of torch 1F1B':24}of the one before")
    before = ""
    for name in all_of:
        beside = "{:.3f} ({:.3f}–{:.3f})".format(*ratio(seconds[name], seconds["torch 1F1B"]))
        over = "{:.3f} ({:.3f}–{:.3f})".format(*ratio(seconds[name], seconds[before])) if before else ""
        print(f"{name:16}{quartiles(seconds[name])[1] * 1e3:9.2f}   {beside:24}{over}", flush=True)
        before = name if name != "pippy 1f1b" else "bytes, asleep"  # both are beside what only lacks values


if __name__ == "__main__":
    main()
