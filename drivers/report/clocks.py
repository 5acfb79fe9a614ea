"""Finds how far the clocks of several hosts are apart, from the rule that no value arrives before it is sent.

A value goes from worker a to worker b. The clock of b is ahead of a's by at most the time that the value seems to take. In
training, values go both ways, and so do the messages between controller and workers. So two bounds are known for how far b is
ahead, and they are a round trip apart. The middle of the two is taken. Workers of one host share a clock and need none of this.

    a  ──sent 5.0──╲         ╱──arrived 6.2──      a sees      1.2 s  ─╮  so b is ahead by between 2.9 and 4.1:
                    ╲       ╱                                          │  3.5, give or take 0.6
    b  ──────arrived 9.1  sent 9.1───────────      b ahead by at most 4.1, and at least 2.9
"""

from collections.abc import Mapping, Sequence
from math import inf, isinf

Between = tuple[int, int]


def clock_offsets(clocks: Sequence[str], ahead: Mapping[Between, float]) -> tuple[list[float], list[float]]:
    """How far each clock is ahead of the first, and by how much that may be wrong.

    ``clocks`` names the clock of each participant. ``ahead[a, b]`` is the most by which b's can be ahead of a's.

    >>> clock_offsets(["one", "one", "other"], {(0, 2): 4.0, (2, 1): -3.0})
    ([0.0, 0.0, 3.5], [0.0, 0.0, 0.5])
    """
    everyone = range(len(clocks))
    most = [[0.0 if clocks[a] == clocks[b] else ahead.get((a, b), inf) for b in everyone] for a in everyone]
    for through in everyone:
        for a in everyone:
            for b in everyone:
                most[a][b] = min(most[a][b], most[a][through] + most[through][b])
    offsets, errors = [], []
    for worker, clock in enumerate(clocks):
        highest, lowest = most[0][worker], -most[worker][0]
        if clock == clocks[0]:
            highest = lowest = 0.0
        elif isinf(highest) or isinf(lowest):  # messages went in one direction only, or in none
            highest = lowest = next((end for end in (highest, lowest) if not isinf(end)), 0.0)
        offsets.append((highest + lowest) / 2)
        errors.append(max(0.0, (highest - lowest) / 2))
    return offsets, errors
