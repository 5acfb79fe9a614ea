"""How much slower does a core compute while another core computes, too?

Question: layers are timed alone, and stages run while a neighbour computes. How long does the same work take then?
Command:  python -m exps.neighbours                (see --help; from the root of the repository)
Method:   one process pinned to a core does some work, alone or while another does the same work on the next core; one intra-op
          thread each. They take turns in random order; the ratio is one of medians, with its 95 % interval.
Finding:  additions in memory take 1.80 (1.71–1.99) of their time alone, convolutions 1.11 (0.91–1.26), additions in a cache
          1.03, and all else 0.99 to 1.02: a loop of Python, products 64 and 1024 wide, half of the small and of the medium
          model of exps/versus_torch. Two virtual cores, 12 rounds. So the cores share nothing but the way to memory, and a
          step of a model whose layers wait for memory gains less from a second core (exps/unet.py, exps/amoebanet.py).
"""

import argparse

from exps.peers.contestant import Team
from exps.peers.kernels import WORKS, Work
from exps.peers.rounds import quartiles, ratio, started, take_turns


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=list(WORKS), default=list(WORKS))
    options = parser.parse_args(arguments)
    print(f"{'work':26}{'alone ms':>10}{'both ms':>10}   ratio")
    for name in options.only:
        with started({"alone": (alone := Team(1, Work, name)), "both": (both := Team(2, Work, name))}):
            seconds = take_turns({"alone": alone, "both": both}, options.rounds, warm=1, steps=3)
        alone_ms, both_ms = (quartiles(seconds[each])[1] * 1e3 for each in ("alone", "both"))
        beside = "{:.2f} ({:.2f}–{:.2f})".format(*ratio(seconds["both"], seconds["alone"]))
        print(f"{name:26}{alone_ms:10.1f}{both_ms:10.1f}   {beside}", flush=True)


if __name__ == "__main__":
    main()
