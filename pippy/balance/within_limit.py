"""Finds the best cuts whose stages stay within a limit of bytes, counted as drivers count.

The bytes of a stage between computations are known for all cuts. Its peak, with the bytes that a computation takes for itself,
is counted for one set of cuts at a time. So these steps are repeated until the peaks are within the limit:

    1 search the best cuts whose stages are within it, with the bytes that computations of each stage were seen to take
    2 count the peaks of their stages

Each time a stage is seen to take more than before. If no cuts are left, the lightest cuts are searched in the same way. They do
not depend on the limit. So if their peak breaks it, the error can name that peak as a limit under which there are cuts.
"""

from collections.abc import Callable, Sequence

from pippy.balance.weighing import Weighing

Peaks = tuple[int, ...]
Count = Callable[
    [Sequence[int]], Peaks | None
]  # what the stages of cuts hold at their peaks; None where that is not known


def cuts_within(weighing: Weighing, limit: int, count: Count) -> tuple[list[int], Peaks | None]:
    """The best cuts under a limit, and the peaks of their stages. Raises BalanceError if there are none."""
    besides = [0] * weighing.stages
    while (cuts := weighing.search(limit, besides)) is not None:
        peaks = count(cuts)
        if peaks is None or max(peaks) <= limit:
            return cuts, peaks
        besides = _seen(weighing, cuts, peaks, besides)
    lightest = _lightest(weighing, count)
    if lightest is None:
        raise weighing.refusal(limit)
    cuts, peaks = lightest
    least = weighing.greatest(cuts, peaks)
    if least > limit:
        raise weighing.refusal(limit, least)
    return cuts, peaks


def _lightest(weighing: Weighing, count: Count) -> tuple[list[int], Peaks | None] | None:
    """The lightest cuts that are found, whatever the limit; None if there are no cuts."""
    tried: list[tuple[list[int], Peaks | None]] = []
    besides = [0] * weighing.stages
    while (cuts := weighing.lightest(besides)) is not None and all(cuts != before for before, _ in tried):
        peaks = count(cuts)
        tried.append((cuts, peaks))
        besides = besides if peaks is None else _seen(weighing, cuts, peaks, besides)
    return min(tried, key=lambda each: weighing.greatest(*each), default=None)


def _seen(weighing: Weighing, cuts: Sequence[int], peaks: Peaks, before: Sequence[int]) -> list[int]:
    return [max(most, peak - kept) for most, peak, kept in zip(before, peaks, weighing.memories(cuts))]
