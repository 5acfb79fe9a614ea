"""How long does it take to run a schedule if the stages do nothing?

Question: how many microseconds does a step take for each computation of a worker (a forward, or a whole backward, of
          one stage on one micro-batch; a backward in two halves counts once), when a stage only adds one number?
Command:  python -m exps.control                  (see --help; from the root of the repository)
Method:   as in versus_torch: the contestants take turns, pinned to cores, and sleep in between. The time of a computation
          is all that a worker does for it: Python, autograd, sending and receiving one number. With --workers N, more
          workers than cores share these, and the clock is the step times the cores over the computations of all workers:
          how long a core is busy with one. "of all" is the step over the computations of all workers, and the aim for 16
          workers on two cores was 60 µs of that. The processor time of the workers counts no waiting, but work beside them
          fills the caches, and so lengthens it.
Finding:  two cores, two workers, 10 rounds of 5 steps, 128 micro-batches, µs for each computation by the clock (quartiles), and
          of processor time: pippy fill_drain 123 (99–131) and 100, 1f1b 142 (126–147) and 130; torch GPipe 550 (533–559) and
          330, 1F1B 408 (296–491) and 334. So a computation takes pippy 0.22 to 0.35 of the time that it takes torch. Earlier,
          with 8 micro-batches: pippy fill_drain 191, 1f1b 207; torch GPipe 641, 1F1B 447: 0.30 to 0.46, as the fixed cost
          of a step counts more. 16 workers on these cores, 1f1b: 201 (188–221) by the clock of a core, so 101 (94–111) of
          all, and 194 of processor time; the aim was 60 of all. One worker alone, which has to wait for nobody, takes about
          40. In a later run of three rounds with 64 micro-batches, 1f1b took 83 of all and 164 of processor time, and
          fill_drain 45 and 85. The difference is sleep: in 1f1b a worker sleeps 0.53 times for each computation, in
          fill_drain 0.07 times. It cannot be less than once for two, as between two neighbours one micro-batch is under way.
          The system's part is small, 10 to 15 µs. But after each sleep all code of the worker is slower, that of autograd
          too, since others have used the core: this is the caches. What helps is less code, and to stay on a core.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from exps.peers import pippy_peer, torch_peer
from exps.peers.contestant import Team
from exps.peers.empty import pippy_control, torch_control
from exps.peers.rounds import quartiles, started, take_turns

STAGES = {
    **{f"torch {name}": peer.stages_per_worker for name, peer in torch_peer.SCHEDULES.items()},
    **{f"pippy {name}": stages for name, stages in pippy_peer.SCHEDULES.items()},
}


def computations(name: str, chunks: int) -> int:
    """Forwards and backwards of one worker in one step.

    >>> computations("torch 1F1B", 8), computations("pippy dualpipe_v", 8)
    (16, 32)
    """
    return 2 * chunks * STAGES[name]


def contestant(name: str, chunks: int, workers: int = 2) -> Team:
    """The contestant of this name."""
    who, _, schedule = name.partition(" ")
    return (torch_control if who == "torch" else pippy_control)(schedule, chunks, workers)


def processor_seconds(pids: Sequence[int]) -> float:
    """The processor time that all threads of some processes have taken, of user and system.

    >>> processor_seconds([os.getpid()]) > 0
    True
    """
    files = [file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def measure(
    peers: Mapping[str, Team], rounds: int, warm: int = 2, steps: int = 5
) -> dict[str, tuple[list[float], float]]:
    """For each contestant the seconds of a step, one number for each round, and the processor time of all workers in a step."""
    pids = {name: peer.pids() for name, peer in peers.items()}
    before = {name: processor_seconds(pids[name]) for name in peers}
    seconds = take_turns(peers, rounds, warm, steps)
    taken = {name: processor_seconds(pids[name]) - before[name] for name in peers}
    return {name: (times, taken[name] / (rounds * (warm + steps))) for name, times in seconds.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", nargs="+", choices=list(STAGES), default=list(STAGES), metavar="NAME")
    options = parser.parse_args(arguments)
    cores = min(options.workers, len(os.sched_getaffinity(0)))
    print(
        f"{options.workers} workers on {cores} cores, µs for each computation: by the clock, and processor time of the workers"
    )
    print(f"{'schedule':28}{'chunks':>7}{'step ms':>10}{'clock':>8}{'quartiles':>16}{'of all':>8}{'processor':>11}")
    for chunks in options.chunks:
        peers = {name: contestant(name, chunks, options.workers) for name in options.only}
        with started(peers):
            measured = measure(peers, options.rounds)
        for name, (times, processor) in measured.items():
            low, median, high = quartiles(times)
            all_of_them = options.workers * computations(name, chunks)
            each = 1e6 * cores / all_of_them
            print(
                f"{name:28}{chunks:7}{median * 1e3:10.2f}{median * each:8.1f}{f'{low * each:.1f}–{high * each:.1f}':>16}"
                f"{median * 1e6 / all_of_them:8.1f}{processor * 1e6 / all_of_them:11.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
