"""Brings the clocks of several hosts together, by what cannot be: that a value arrives before it is sent.

Each value from worker a to worker b, and each message between controller and worker, says that b's clock is ahead of a's
by at most the time that it seems to take. Values go both ways in training, so how far b is ahead lies between two numbers,
half a round trip apart on either side of the middle. The middle is taken: with it nothing arrives too early, whatever else
is known. Workers of one host share a clock and need none of this.

    a  ──sent 5.0──╲         ╱──arrived 6.2──      a sees      1.2 s  ─╮  so b is ahead by between 2.9 and 4.1:
                    ╲       ╱                                          │  3.5, give or take 0.6
    b  ──────arrived 9.1  sent 9.1───────────      b ahead by at most 4.1, and at least 2.9
"""

from collections.abc import Mapping, Sequence
from math import inf, isinf

Between = tuple[int, int]


def clock_offsets(clocks: Sequence[str], ahead: Mapping[Between, float]) -> tuple[list[float], list[float]]:
    """How far each clock is ahead of the first, and by how much that may be wrong.

    ``clocks`` names everyone's clock, and ``ahead[a, b]`` is the most that b's can be ahead of a's.

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
    for each, clock in enumerate(clocks):
        highest, lowest = most[0][each], -most[each][0]
        if clock == clocks[0]:
            highest = lowest = 0.0
        elif isinf(highest) or isinf(lowest):  # nothing came from there, or nothing went
            highest = lowest = next((end for end in (highest, lowest) if not isinf(end)), 0.0)
        offsets.append((highest + lowest) / 2)
        errors.append(max(0.0, (highest - lowest) / 2))
    return offsets, errors
