"""Are three steps on workers those of the plain model, or refused? Models at random, with every habit that makes steps differ.

Command: ``python -m exps.same_numbers --count 2000 --seed 1``. ``--seed 7 --count 1`` repeats one; ``--simplify`` makes what is
wrong as simple as it can be. ``--alone`` takes each habit by itself, ``--alone function`` those with this word.

Finding: before steps checked themselves, 41 of 100 models were silently wrong. Of 3,000 with a check by a few rows, 1,570 were
refused, 1,340 equal, 89 could not run, and none was silently wrong, as long as the habits were those of layers and losses
(rows that mix, buffers, hooks, shared parameters, terms of the loss, padding). With the habits of scripts (custom functions by
any name, references to other layers, derivatives, numbers of rows, changes between steps), of 1,000 (seeds 1001 to 2000, 27
minutes beside other work) 281 were silently wrong, 58 failed on a worker, 6 crashed, 2 were refused without need, 431 were
refused, 222 equal. ``--alone`` names them: 68 habits of 204 were wrong.
Once the user's own model is the witness: of 1,560 (seeds 20001 and 21501 on) 16 were silently wrong, of five causes, which are
mended; then of 980 (seeds 40001, 41001, 50001 and 51001 on, half a second an example) none, and two failed on a worker.
Then of 3,000 in one piece (seeds 60001 on): 1,021 equal, 862 refused, 1,084 could not run, 9 refused without need, 14 failed on
a worker, 2 had other bits than without the check (of a scripted function), and 4 were silently wrong, of two causes: rows of
padding that tie, and what the order of rows changes in 64 bits taken for rounding. Of 700 from 70001 on 1 was: class weights
in a closure, written in place. All of these are mended, and among the tests. Then of 660 (80001 and 81001 on) none was wrong,
none was refused without need, none failed on a worker; 2 with a scripted function had other bits than without the check.
What a check by a few rows cannot show: rows that are all alike, so that experts choose alike for whatever rows (1688).

A model is a list of parts: layers that mix rows, keep buffers, have hooks, share parameters, or add a term to the loss from
their own stage (exps/habits/parts.py), call custom functions (functions.py), read other layers' parameters (reaching.py), or
differentiate (derivatives.py). Its loss (losses.py, more_losses.py) is a function or what the model returns; its batches have
padding in some steps, and the script may change something between two steps (changes.py). How the model is cut, the schedule,
the number of micro-batches and what is said of the loss are drawn, too.
Workers are threads of this process, or with ``--processes`` processes. What an example is judged by: exps/habits/judge.py.

The status is 1 if a step was silently wrong, refused without reason, or crashed.
"""

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from exps.habits.alone import alone
from exps.habits.example import Example, draw
from exps.habits.judge import Verdict, judge
from exps.habits.simpler import simplest
from pippy import cluster
from tests.drivers.thread_cluster import one_draws_at_a_time, thread_cluster


def judged(name: str, example: Example, simplify: bool, opened: Callable[[int], Any]) -> Verdict:
    """The verdict on an example; says what is wrong."""
    with one_draws_at_a_time(), opened(3) as workers:
        verdict = judge(example, workers)
        if verdict.is_fault:
            print(f"{name}: {verdict}\n  {example}", flush=True)
        if verdict.is_fault and simplify:
            example = simplest(example, lambda each: judge(each, workers).kind == verdict.kind)
            print(f"  simpler: {judge(example, workers)}\n  {example}", flush=True)
    return verdict


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--simplify", action="store_true")
    parser.add_argument(
        "--alone", metavar="WORDS", nargs="?", const="", help="each habit by itself, if it has these words"
    )
    parser.add_argument("--processes", action="store_true", help="workers are processes, not threads")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "std|var")  # of one row
    began = time.monotonic()
    if chosen.alone is None:
        examples = {f"seed {seed}": draw(seed) for seed in range(chosen.seed, chosen.seed + chosen.count)}
    else:
        examples = {f"{name} ({number})": each for number, (name, each) in enumerate(alone()) if chosen.alone in name}
    verdicts = {
        name: judged(name, each, chosen.simplify, cluster if chosen.processes else thread_cluster)
        for name, each in examples.items()
    }
    print(f"\n{len(examples)} examples in {time.monotonic() - began:.0f} s:")
    for kind, count in Counter(each.kind for each in verdicts.values()).most_common():
        print(f"{count:6} {kind}")
        of_kind = {name: each.reason for name, each in verdicts.items() if each.kind == kind and each.reason}
        for reason, times in Counter(of_kind.values()).most_common():
            names = [name for name in of_kind if of_kind[name] == reason]
            print(f"{times:13} {reason}  ({', '.join(names[:6])}{', ...' * (len(names) > 6)})")
    return int(any(each.is_fault for each in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
