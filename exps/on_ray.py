"""What do workers take longer on Ray than on a local cluster: for a step, to start, and to be replaced?

Question: Ray places and watches the workers, and carries nothing in a step. Is a step as fast? How long do 2, 8 and 16 workers
          take to start on a Ray that the call starts, too, and how long does it take until a step runs again after one of
          four workers was killed, with a spare and without?
Command:  python -m exps.on_ray                    (see --help; from the root of the repository)
Method:   steps: two workers on any core, one intra-op thread each, 1F1B, 8 micro-batches of the small decoder; the controllers
          of both clusters are processes that take turns, in random order. start: until all workers have answered, by turns.
          recovery: from the signal until a step has ended: it is noticed, the worker is replaced, and takes the state of
          `driver.protect` back.
Finding:  two virtual cores: a step takes 30.3 ms (29.8–31.1) on Ray and 30.7 (29.9–31.8) on a local cluster, 0.987
          (0.952–1.020) of it, --rounds 8. 2 workers start in 3.76 s (3.63–3.87), locally in 1.37 (1.36–1.40); 8 in 11.3 s
          (10.3–11.5), locally in 1.51 (1.48–1.58): each actor imports torch, and workers of a local cluster are forks of one
          process. Later, with more to import: 2 in 4.5 s, 8 in 12.2, 16 in 25.7, locally in 1.6 to 1.9. A worker is replaced
          in 2.73 s (2.68–2.74), with a spare in 0.21 (0.19–0.22), locally in 0.75 (0.72–0.76).
"""

import argparse
import os
import signal
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import nn

from exps.peers import gpt
from exps.peers.contestant import Contestant
from exps.peers.pippy_peer import Controller, GptPipe, PippyTeam
from exps.peers.rounds import check, quartiles, ratio, started, take_turns
from exps.startup import seconds_to_start
from pippy import Pipe, PipelineDriver1F1B, cluster
from pippy.drivers.base.errors import WorkerLostError

Engine = Literal["local", "ray"]
ENGINES: tuple[Engine, ...] = ("local", "ray")
PARTS = ("steps", "start", "recovery")


def steps(size: gpt.Size, rounds: int) -> None:
    """Print how long a step takes, and the ratio."""
    of = "1f1b", gpt.CHUNKS, GptPipe(size), gpt.batch(size)
    teams: dict[str, Contestant] = {
        each: PippyTeam(1, partial(Controller, pin=None, engine=each), *of) for each in ENGINES
    }
    with started(teams):
        for each in teams.values():
            each.step()
        check("ray", teams["ray"], teams["local"])
        seconds = take_turns(teams, rounds, warm=2, steps=5)
    for name, found in seconds.items():
        low, middle, high = (1e3 * each for each in quartiles(found))
        print(f"{name:8} a step takes {middle:.1f} ms ({low:.1f}–{high:.1f})")
    print(
        "on Ray it takes {:.3f} ({:.3f}–{:.3f}) of that on a local cluster".format(
            *ratio(seconds["ray"], seconds["local"])
        )
    )


def starts(numbers: Sequence[int], rounds: int) -> None:
    """Print how long clusters take to start."""
    for n in numbers:
        found = [[seconds_to_start(n, engine)[0] for engine in ENGINES] for _ in range(rounds)]
        print(f"{n} workers start in", _said(ENGINES, found))


def recovery_seconds(engine: Engine, spares: int | None = None) -> float:
    """From the end of one of four workers until a step has run again."""
    with cluster(4, engine=engine, threads=1, spares=spares) as opened:
        pipe = Pipe.from_sequential(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), nn.MSELoss())
        driver, x = PipelineDriver1F1B(pipe, opened), torch.ones(8, 64)
        driver.run(4, x, x)
        driver.zero_grad()
        driver.protect()
        killed = time.perf_counter()
        os.kill(opened.session.workers[1].pid, signal.SIGKILL)
        try:
            while True:
                driver.run(4, x, x)
        except WorkerLostError:
            driver.recover()
        driver.run(4, x, x)
        return time.perf_counter() - killed


def recoveries(rounds: int) -> None:
    """Print how long it takes until a step has run again."""
    kinds: dict[str, tuple[Engine, int | None]] = {engine: (engine, None) for engine in ENGINES}
    if "ray" in ENGINES:
        kinds["ray with a spare"] = "ray", 1
    found = [[recovery_seconds(*kind) for kind in kinds.values()] for _ in range(rounds)]
    print("a worker is replaced in", _said([*kinds], found))


def _said(names: Sequence[str], found: Sequence[Sequence[float]]) -> str:
    return ", ".join(
        f"{name} {statistics.median(each):.2f} s ({min(each):.2f}–{max(each):.2f})"
        for name, each in zip(names, zip(*found))
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--size", choices=gpt.SIZES, default="small")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8, 16])
    parser.add_argument("--repeat", type=int, default=3, help="starts and recoveries of each kind")
    given = parser.parse_args(arguments)
    parts = given.parts or PARTS
    if "steps" in parts:
        steps(gpt.SIZES[given.size], given.rounds)
    if "start" in parts:
        starts(given.workers, given.repeat)
    if "recovery" in parts:
        recoveries(given.repeat)


if __name__ == "__main__":
    main()
