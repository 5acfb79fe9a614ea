"""Adds to a program of computations what it implies: sends, receives, frees and reductions.

This is a pass over data. It takes a program of computations and returns a lowered program, with the same computations in the
same order:

    worker 0: F0.0  send a.0 to 1  free a.0                     worker 1: receive a.0 from 0  F1.0  free a.0

A value is sent as soon as it is made, once to each worker that needs it. It is received right before its first use, or before
that of a value that is sent after it, because channels deliver in order. It is freed right after its last use. A stage itself
keeps what it needs of its inputs for its backward. A reduction comes right after the last backward that uses the worker's
copies, so that it runs while the pipeline drains.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import itemgetter

from pippy.drivers.plan.language.edges import Edge, Pass, produced_by
from pippy.drivers.plan.language.errors import require
from pippy.drivers.plan.language.instructions import (
    Compute,
    Free,
    Instruction,
    Op,
    Receive,
    Reduce,
    ReduceStage,
    Send,
)
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.proofs.computations import check_computations
from pippy.drivers.plan.proofs.faults import Faults
from pippy.drivers.plan.proofs.values import last_backward
from pippy.drivers.plan.proofs.waits import Location, production


def add_communication(program: Program, early_recompute: bool = True) -> Program:
    """Lower a valid program for its edges and replicated parameters. A lowered program is lowered again.

    A forward is computed again before the gradients for its backward are received, so that it is done while the worker would
    wait for them; with ``early_recompute=False``, after they are received.

    >>> from pippy.drivers.plan import make_schedule
    >>> lowered = add_communication(make_schedule("forward_only", workers=2, chunks=1))
    >>> [str(instruction) for instruction in lowered.orders[1]]
    ['receive activation_0.0 from 0', 'F1.0', 'free activation_0.0']
    """
    require("program", program, Program, "make one with make_schedule, or read its text with parse_program")
    computations = replace(program, orders=program.computations, lowered=False)
    faults = Faults(computations)
    check_computations(computations, faults)
    faults.raise_if_any()
    return replace(program, orders=tuple(Communication(computations, early_recompute).orders()), lowered=True)


# The order of what belongs to the same computation.
RECEIVE, COMPUTE, SEND, FREE, REDUCE = range(5)


class Communication:
    """The instructions of each worker, each with the index of the computation it belongs to, and its rank there."""

    def __init__(self, program: Program, early_recompute: bool) -> None:
        self.program = program
        self.places = production(program)
        self.receiving = self.places if early_recompute else self.places | places_of_recomputes(program)
        self.targets = {edge.value: targets_by_worker(program, edge) for edge in program.flow}
        self.due: list[list[tuple[int, int, Instruction]]] = [[] for _ in program.orders]
        edges: dict[Pass, list[Edge]] = defaultdict(list)
        for edge in program.flow:
            edges[edge.source].append(edge)
        for worker, order in enumerate(program.computations):
            self.due[worker] += [(index, COMPUTE, compute) for index, compute in enumerate(order)]
            self.add_transfers(worker, order, edges)
            self.add_reductions(worker)

    def orders(self) -> Iterator[tuple[Instruction, ...]]:
        for due in self.due:
            due.sort(key=itemgetter(0, 1))
            yield tuple(instruction for _, _, instruction in due)

    def add_transfers(self, worker: int, order: Iterable[Compute], edges: Mapping[Pass, Iterable[Edge]]) -> None:
        """Send, receive and free what this worker makes."""
        channels: dict[int, list[tuple[Receive, int]]] = defaultdict(list)
        first = worker - worker % self.program.placement.workers  # the first worker of its replica
        for index, compute in enumerate(order):
            done, chunk = produced_by(compute), compute.microbatch
            for edge in edges.get(done, ()) if done else ():
                last = index
                for local, targets in self.targets[edge.value]:
                    to = first + local
                    uses = [self.places[target, chunk][1] for target in targets]
                    if to == worker:
                        last = max(uses)
                        continue
                    self.due[worker].append((index, SEND, Send(edge.value, chunk, to)))
                    first_use = min(self.receiving[target, chunk][1] for target in targets)
                    channels[to].append((Receive(edge.value, chunk, worker), first_use))
                    self.due[to].append((max(uses), FREE, Free(edge.value, chunk)))
                self.due[worker].append((last, FREE, Free(edge.value, chunk)))
        for to, channel in channels.items():
            self.add_receives(to, channel)

    def add_receives(self, worker: int, channel: Sequence[tuple[Receive, int]]) -> None:
        """Receive in the order of sending: each value before its first use, and before those that are sent after it."""
        latest = accumulate((first_use for _, first_use in reversed(channel)), min)
        for (receive, _), index in zip(channel, reversed(list(latest))):
            self.due[worker].append((index, RECEIVE, receive))

    def add_reductions(self, worker: int) -> None:
        last = last_backward(self.program.computations[worker])
        for copies in self.program.replicated:
            held = [last[stage] for stage in copies.stages if stage in last]
            if held:
                self.due[worker].append((max(held), REDUCE, Reduce(copies.parameter)))
        if self.program.replicas > 1:
            self.due[worker] += [(index, REDUCE, ReduceStage(stage)) for stage, index in last.items()]


def places_of_recomputes(program: Program) -> dict[tuple[Pass, int], Location]:
    """Where a forward is computed again, by the backward that it is for."""
    return {
        (Pass("B", compute.stage), compute.microbatch): (worker, index)
        for worker, order in enumerate(program.computations)
        for index, compute in enumerate(order)
        if compute.op == Op.RECOMPUTE
    }


def targets_by_worker(program: Program, edge: Edge) -> list[tuple[int, list[Pass]]]:
    """The workers of the first replica that need the value, each with the passes that need it there."""
    found: dict[int, list[Pass]] = defaultdict(list)
    for target in edge.targets:
        found[program.placement.worker_of[target.stage]].append(target)
    return sorted(found.items())
