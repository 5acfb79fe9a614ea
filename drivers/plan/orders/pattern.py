"""Orders written as papers write them: a few passes, repeated some times, then others."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from pippy.drivers.plan.language.errors import PlacementError
from pippy.drivers.plan.language.instructions import Compute, Op
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.orders.schedule import B, I, W

RepeatedPasses = tuple[int, str]


def write_out(stages: Sequence[int], phases: Iterable[RepeatedPasses]) -> list[Compute]:
    """Write out repeated passes. "F1" is the next forward of the worker's second stage, "W" the oldest W that is put off.

    >>> order = write_out((0, 3), [(2, "F0"), (1, "F1 I1 I0"), (2, "W")])
    >>> " ".join(map(str, order))
    'F0.0 F0.1 F3.0 I3.0 I0.0 W3.0 W0.0'
    """
    order: list[Compute] = []
    begun: Counter[tuple[Op, int]] = Counter()
    put_off: deque[Compute] = deque()
    for repeats, passes in phases:
        for name in passes.split() * repeats:
            if name == W:
                order.append(put_off.popleft())
                continue
            op, stage = Op(name[0]), stages[int(name[1])]
            counted = I if op == B else op  # a whole backward and its half I count as the same
            order.append(Compute(op, stage, begun[counted, stage]))
            begun[counted, stage] += 1
            if op == I:
                put_off.append(Compute(W, stage, order[-1].microbatch))
    return order


def require_v(placement: Placement, schedule: str) -> list[int]:
    """The workers in the order in which a V-shaped placement first visits them. Any other placement is refused."""
    way_down = placement.worker_of[: placement.workers]
    if placement.worker_of != (*way_down, *reversed(way_down)) or len(set(way_down)) != placement.workers:
        raise PlacementError(
            f"{schedule} needs a V-shaped placement with two stages on each worker, such as 0 1 1 0, not {placement}; "
            "pass stages_per_worker=2 and leave the placement out, or take interleaved_1f1b, which works on any"
        )
    return list(way_down)
