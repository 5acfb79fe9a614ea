"""Says explicitly what a program of computations implies: sends, receives, frees and reductions.

A pass over data: it takes a program of computations and leaves a lowered program of the same computations in the same order.

    worker 0: F0.0  send a.0 to 1  free a.0                     worker 1: receive a.0 from 0  F1.0  free a.0

A value is sent as soon as it is made, to every worker that needs it, once each. It is received right before its first use, or
before that of a value sent after it, because channels deliver in order. It is freed right after its last use; what a stage
keeps of its inputs for its backward, or for the weight half of it, is the stage's own affair. A reduction comes right after the
last backward that touches the worker's copies, so that it runs while the pipeline drains.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from pippy.drivers.schedules.check_values import last_backward
from pippy.drivers.schedules.graph import Edge, Pass, produced_by
from pippy.drivers.schedules.instructions import Compute, Free, Instruction, Receive, Reduce, Send
from pippy.drivers.schedules.program import Program
from pippy.drivers.schedules.waits import Location, production


def add_communication(program: Program) -> Program:
    """Lower a valid program of computations, for its own edges and replicated parameters.

    >>> from pippy.drivers.schedules import make_schedule
    >>> lowered = add_communication(make_schedule("forward_only", workers=2, chunks=1))
    >>> [str(instruction) for instruction in lowered.orders[1]]
    ['receive activation_0.0 from 0', 'F1.0', 'free activation_0.0']
    """
    added = Additions(program)
    orders = [
        [instruction for index, compute in enumerate(order) for instruction in added.around(worker, index, compute)]
        for worker, order in enumerate(program.computations)
    ]
    return replace(program, orders=tuple(map(tuple, orders)), lowered=True)


class Additions:
    """What is added around each computation of each worker."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.places = production(program)
        self.receives: dict[Location, list[Instruction]] = defaultdict(list)
        self.sends: dict[Location, list[Instruction]] = defaultdict(list)
        self.frees: dict[Location, list[Instruction]] = defaultdict(list)
        self.reductions: dict[Location, list[Instruction]] = defaultdict(list)
        edges: dict[Pass, list[Edge]] = defaultdict(list)
        for edge in program.flow:
            edges[edge.source].append(edge)
        for worker, order in enumerate(program.computations):
            self.add_transfers(worker, order, edges)
            self.add_reductions(worker)

    def around(self, worker: int, index: int, compute: Compute) -> Iterator[Instruction]:
        here = (worker, index)
        yield from self.receives.get(here, ())
        yield compute
        yield from self.sends.get(here, ())
        yield from self.frees.get(here, ())
        yield from self.reductions.get(here, ())

    def add_transfers(self, worker: int, order: Iterable[Compute], edges: Mapping[Pass, Iterable[Edge]]) -> None:
        """Move and free what this worker makes."""
        channels: dict[int, list[tuple[Receive, int]]] = defaultdict(list)
        for index, compute in enumerate(order):
            done = produced_by(compute)
            for edge in edges.get(done, ()) if done else ():
                uses = self.uses(edge, compute.microbatch)
                last = max([index, *uses.pop(worker, [])])
                self.frees[worker, last].append(Free(edge.value, compute.microbatch))
                for to, indices in sorted(uses.items()):
                    self.sends[worker, index].append(Send(edge.value, compute.microbatch, to))
                    channels[to].append((Receive(edge.value, compute.microbatch, worker), min(indices)))
                    self.frees[to, max(indices)].append(Free(edge.value, compute.microbatch))
        for to, channel in channels.items():
            self.add_receives(to, channel)

    def uses(self, edge: Edge, chunk: int) -> dict[int, list[int]]:
        """Where the value is needed, by worker."""
        found: dict[int, list[int]] = defaultdict(list)
        for target in edge.targets:
            if (target, chunk) in self.places:
                worker, index = self.places[target, chunk]
                found[worker].append(index)
        return found

    def add_receives(self, worker: int, channel: Sequence[tuple[Receive, int]]) -> None:
        """Receive in the order of sending, each value no later than its first use and all that come behind it."""
        latest = accumulate((first_use for _, first_use in reversed(channel)), min)
        for (receive, _), index in zip(channel, reversed(list(latest))):
            self.receives[worker, index].append(receive)

    def add_reductions(self, worker: int) -> None:
        last = last_backward(self.program.computations[worker])
        for copies in self.program.replicated:
            held = [last[stage] for stage in copies.stages if stage in last]
            if held:
                self.reductions[worker, max(held)].append(Reduce(copies.parameter))
