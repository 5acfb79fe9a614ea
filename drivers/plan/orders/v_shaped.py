"""Orders made of a building block: the passes of one micro-batch on a V-shaped placement, repeated and squeezed.

    worker 0   F0 .  .  F3 I3 .  .  I0      A block says when each stage starts its forward (F) and the input half of its
    worker 1   .  F1 F2 .  .  I2 I1 .       backward (I), if a pass takes 1. The block of the next micro-batch starts 6
                                            later, because a worker computes F, I and W of two stages.

The shorter the steps from stage to stage, the shorter a micro-batch lives, and the less is held. To squeeze the blocks, each
worker takes their passes in order, but does not wait for their times. Where it would wait, or has no room for a forward, it
does a weight half (W) that it put off; if there is none, a later pass overtakes.
"""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from pippy.drivers.plan.language.instructions import Compute, Op
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.orders.schedule import F, I, RepeatedPasses, W, WorkerOrders, keep, require_v, write_out

PERIOD = 6
Block = dict[tuple[Op, int], int]


def building_block(workers: int, down: int, up: int, turns: Sequence[int]) -> Block:
    """When each stage starts its F and its I on the first micro-batch.

    ``down`` and ``up`` are the steps between stages, towards the last worker and back from it. ``turns`` are those between two
    passes of one worker: from F to F on the last, from F to I on the first, from I to I on the last.

    >>> list(building_block(2, down=1, up=2, turns=(1, 4, 2)).values())
    [0, 1, 2, 4, 8, 9, 11, 13]
    """
    there, back = [down] * (workers - 1), [up] * (workers - 1)
    passes = [(F, stage) for stage in range(2 * workers)]
    passes += [(I, stage) for stage in reversed(range(2 * workers))]
    steps = [0, *there, turns[0], *back, turns[1], *there, turns[2], *back]
    return dict(zip(passes, accumulate(steps)))


def squeeze(placement: Placement, block: Block, chunks: int, memory: int) -> list[list[Compute]]:
    """The order of each worker. None holds more stage-micro-batches than ``memory``.

    >>> block = building_block(2, down=1, up=1, turns=(1, 5, 1))
    >>> " ".join(map(str, squeeze(Placement((0, 1, 1, 0)), block, chunks=2, memory=4)[0]))
    'F0.0 F0.1 F3.0 I3.0 F3.1 W3.0 I0.0 I3.1 W0.0 W3.1 I0.1 W0.1'
    """
    workers = [SqueezedOrder(placement.stages_of(worker), block, chunks, memory) for worker in range(placement.workers)]
    done: set[Compute] = set()
    while not all(worker.complete for worker in workers):
        chosen = [(worker, compute) for worker in workers if (compute := worker.next(done))]
        assert chosen, "no worker can go on: the block needs more memory"
        for worker, compute in chosen:
            worker.add(compute)
        done.update(compute for _, compute in chosen)
    return [worker.order for worker in workers]


class SqueezedOrder:
    """The beginning of a worker's order."""

    def __init__(self, stages: Sequence[int], block: Block, chunks: int, memory: int) -> None:
        self.order: list[Compute] = []
        self.block = block
        self.chunks = chunks
        self.memory = memory
        self.last_stage = max(stage for _, stage in block)
        self.coming = {(op, stage): Compute(op, stage, 0) for op, stage in block if stage in stages}
        self.put_off: deque[Compute] = deque()
        self.live = 0

    @property
    def complete(self) -> bool:
        return not self.coming and not self.put_off

    def next(self, done: set[Compute]) -> Compute | None:
        """What the worker does next, if it can do anything."""
        coming = sorted(self.coming.values(), key=self.starts)
        if coming and self.possible(coming[0], done, self.memory):
            return coming[0]
        if self.put_off:
            return self.put_off[0]
        return next((each for each in coming[1:] if self.possible(each, done, self.room_to_overtake(each))), None)

    def starts(self, compute: Compute) -> int:
        return self.block[compute.op, compute.stage] + PERIOD * compute.microbatch

    def room_to_overtake(self, compute: Compute) -> int:
        """A new micro-batch may fill half of the memory, so that those that are begun can always go on."""
        return self.memory // 2 if 2 * compute.stage < self.last_stage else self.memory

    def possible(self, compute: Compute, done: set[Compute], memory: int) -> bool:
        needs = needed_by(compute, self.last_stage)
        return (needs is None or needs in done) and (compute.op != F or self.live < memory)

    def add(self, compute: Compute) -> None:
        self.order.append(compute)
        op, stage, microbatch = compute.op, compute.stage, compute.microbatch
        if op == W:
            self.put_off.popleft()
            self.live -= 1
            return
        if op == F:
            self.live += 1
        else:
            self.put_off.append(Compute(W, stage, microbatch))
        if microbatch + 1 < self.chunks:
            self.coming[op, stage] = Compute(op, stage, microbatch + 1)
        else:
            del self.coming[op, stage]


def needed_by(compute: Compute, last_stage: int) -> Compute | None:
    """What F or I of a stage waits for.

    >>> str(needed_by(Compute(I, 3, 0), last_stage=3)), str(needed_by(Compute(I, 2, 0), last_stage=3))
    ('F3.0', 'I3.0')
    """
    op, stage, microbatch = compute.op, compute.stage, compute.microbatch
    if op == F:
        return Compute(F, stage - 1, microbatch) if stage else None
    return Compute(F, stage, microbatch) if stage == last_stage else Compute(I, stage + 1, microbatch)


def v_half(placement: Placement, chunks: int) -> WorkerOrders:
    """V-Half: the V of ZB-V in about half of 1F1B's memory: p/2 + 1 micro-batches of a worker, rounded up.

    The building block takes steps of 1 towards the last worker and of 2 back. The turns were found by trying. If F, I and W
    take the same time and m >= p > 3, a worker idles for (3p-7)/2 forwards of a worker, and for half a forward less if p is
    odd.

    For two stages on each worker, placed in a V.

    >>> result = v_half(Placement((0, 1, 1, 0)), chunks=1)
    >>> " ".join(map(str, result.orders[1]))
    'F1.0 F2.0 I2.0 I1.0 W2.0 W1.0'
    """
    require_v(placement, "v_half")
    p = placement.workers
    block = building_block(p, down=1, up=2, turns=(1, 6, 3) if p % 2 else (1, 4, 2))
    memory = 2 * min(chunks, p, (p + 1) // 2 + 1)
    return WorkerOrders(squeeze(placement, block, chunks, memory), memory=[memory] * p)


def v_min(placement: Placement, chunks: int) -> WorkerOrders:
    """V-Min: the V of ZB-V in about a third of 1F1B's memory: (p+4)/3 micro-batches of a worker, rounded down.

    The building block takes the shortest steps, so a micro-batch is soon done. If F, I and W take the same time and m >= p > 2,
    a worker idles for (4p-5-2x)/2 forwards of a worker, where x is the distance from p up to the next number that is 1 modulo
    3.

    For two stages on each worker, placed in a V.

    >>> result = v_min(Placement((0, 1, 1, 0)), chunks=1)
    >>> " ".join(map(str, result.orders[1]))
    'F1.0 F2.0 I2.0 I1.0 W2.0 W1.0'
    """
    require_v(placement, "v_min")
    p = placement.workers
    x = (1 - p) % 3
    block = building_block(p, down=1, up=1, turns=(1, 1 + 2 * x, 1))  # so no two passes of a worker meet
    memory = min(2 * chunks, 2 * ((p + 4) // 3))
    return WorkerOrders(squeeze(placement, block, chunks, memory), memory=[memory] * p)


def dualpipe_v(placement: Placement, chunks: int) -> WorkerOrders:
    """DualPipeV: the V-shaped half of DualPipe. A forward and a backward of different micro-batches come in pairs.

    A runtime may overlap the communication of one with the computation of the other. The order here has the forward first.
    Backwards come in halves only where they fill gaps at the ends. A worker holds at most 2p+1 stage-micro-batches.

    For two stages on each worker, placed in a V.

    >>> result = dualpipe_v(Placement((0, 1, 1, 0)), chunks=1)
    >>> " ".join(map(str, result.orders[1]))
    'F1.0 F2.0 B2.0 B1.0'
    """
    orders: list[list[Compute]] = [[] for _ in range(placement.workers)]
    for w, worker in enumerate(require_v(placement, "dualpipe_v")):
        regular = max(chunks, 2 * placement.workers)
        order = write_out(placement.stages_of(worker), phases(placement.workers, w, regular))
        orders[worker] = keep(order, chunks)
    return WorkerOrders(orders, memory=[min(2 * chunks, 2 * placement.workers + 1)] * placement.workers)


def phases(p: int, w: int, chunks: int) -> list[RepeatedPasses]:
    """Worker w's order, for at least 2p chunks."""
    after = p - w - 1
    return [
        (2 * after, "F0"),
        (w + 1, "F0 F1"),
        (after, "I1 W F1"),
        (chunks - 2 * p + w + 1, "F0 B1 F1 B0"),
        (after, "B1 F1 B0"),
        *drain(w + 1),
        (after, "W I0"),
        (w + 1, "W"),
    ]


def drain(pairs: int) -> list[RepeatedPasses]:
    """Pairs of backwards: whole ones first, then halves whose W is put off to the end."""
    if pairs % 2:
        return [(pairs // 2, "B1 B0"), (1, "B1 I0"), (pairs // 2, "I1 I0")]
    return [(pairs // 2, "B1 B0"), (pairs // 2, "I1 I0")]
