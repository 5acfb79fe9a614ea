"""Adds to a program of computations what it implies: sends, receives, frees, reductions and notes.

This is a pass over data. It takes a program of computations and returns a lowered program, with the same computations in the
same order:

    worker 0: F0.0  send a.0 to 1  free a.0                     worker 1: receive a.0 from 0  F1.0  free a.0

Gradients of one value that several stages of a worker make are added there, each as soon as it and those before it in the
program's order are made. Once all are added, the sum is sent. So the worker holds one of them, not all.

A value is sent as soon as it is made, once to each worker that needs it. Where workers are on several hosts, some get it from
another worker that needs it, which hands it on right before its first use; the end says who. A value is received right
before its first use, or before that of a value that is sent after it, because channels deliver in order. It is freed right
after its last use. A stage itself keeps what it needs of its inputs for its backward. What is for the next run waits in a
channel of its own.

Gradients that another worker adds up leave right after the last backward that brings some, so that they are under way while the
pipeline drains. After its own computations, a worker adds up what it owns, one sum after another, and then takes the sums of
others. So all gradients are sent before any are waited for.

Notes of batch norms leave right after the last forward that brings some, and are received behind all computations.

Who sends a value to whom, where workers are on several hosts: it goes once to each host, and is handed on there.

          host 0                  host 1                   host 2
    maker ──▶ a reader      first reader ──▶ others   first reader ──▶ others
      │                        ▲      │                  ▲
      └────────────────────────┘      └────── or ────────┤
      └──────────────────────────────────────────────────┘

The first reader of a host is the one that needs the value first; it sends the value on right before it uses it. It gets the
value from the maker, or from the first reader of a host that has it earlier: of these hosts the one that has the fewest bytes
to send to others, if this leaves the busiest host with fewer bytes than if each first reader got all values from their makers.
Where the bytes of some values are not known, each value counts as one.

Why no worker waits forever: let each computation take one unit of time, and begin as soon as its inputs are made. A worker
hands a value on right before a computation that begins no later than the one that the receiver needs it for; where both begin
at once, the worker with the lower number hands it on. So whatever a worker waits for comes earlier in the order of these times.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import itemgetter

from pippy.drivers.plan.language.edges import Edge, Pass, produced_by
from pippy.drivers.plan.language.errors import require
from pippy.drivers.plan.language.exchanges import ExchangeProgram, notes_work, stages_with_gradients, sum_work
from pippy.drivers.plan.language.instructions import (
    Add,
    Compute,
    Free,
    Instruction,
    MicrobatchValue,
    Op,
    Payload,
    Receive,
    ReceiveExchanged,
    Send,
    SendExchanged,
)
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.proofs.computations import check_computations
from pippy.drivers.plan.proofs.faults import Faults
from pippy.drivers.plan.proofs.validate import validate_exchange
from pippy.drivers.plan.proofs.values import last_backward, last_forward
from pippy.drivers.plan.proofs.waits import DryRun, Location, Places, implied_waits, production

Senders = dict[int, int]  # who sends a value to each worker that needs it
Sizes = Mapping[str, float]  # the bytes of values


def senders(program: Program, made: Places, needed: Places, sizes: Sizes) -> dict[MicrobatchValue, Senders]:
    """Who sends each value of each micro-batch to whom, of those that go to several workers of other hosts.

    ``made`` and ``needed`` are the places in the program, which is not lowered, where values are made and waited for.

    >>> from dataclasses import replace
    >>> from pippy.drivers.plan import make_schedule
    >>> from pippy.drivers.plan.language.edges import scan_edge
    >>> from pippy.drivers.plan.language.scanner import Scanner
    >>> from pippy.drivers.plan.proofs.waits import production
    >>> program = make_schedule("forward_only", workers=4, chunks=1)
    >>> program = replace(program, edges=(scan_edge(Scanner("x F0 -> F1 F2 F3")),), hosts=(0, 0, 1, 1))
    >>> senders(program, production(program), production(program), {})
    {('x', 0): {1: 0, 2: 0, 3: 2}}
    """
    travel = [edge for edge in program.flow if not (edge.goes_on or edge.value in program.sum_of)]
    leaves_often = {edge.value: _leaves_often(program, edge) for edge in travel}
    edges, once = ([edge for edge in travel if leaves_often[edge.value] == often] for often in (True, False))
    begins = _begins(program, made, needed) if edges else {}
    if not begins:
        return {}
    if not all(edge.value in sizes for edge in travel):
        sizes = {}
    found: dict[MicrobatchValue, Senders] = {}
    for first, share in zip(range(0, program.workers, program.placement.workers), program.shares):
        others = _load_of_others(program, once, first, sizes)
        for chunk in share:
            moves = list(_moves(program, edges, chunk, made, needed, begins, sizes))
            found.update(((move.value, chunk), its) for move, its in zip(moves, _chosen(moves, others)))
    return found


@dataclass(frozen=True)
class _Move:
    """A value of a micro-batch, its maker, and the workers that need it, by their hosts: who needs it first comes first."""

    value: str
    maker: int
    home: int  # the maker's host
    readers: Mapping[int, Sequence[int]]
    size: float

    @property
    def first_readers(self) -> list[tuple[int, int]]:
        """The other hosts, each with its first reader, in the order in which these need the value."""
        return [(host, readers[0]) for host, readers in self.readers.items() if host != self.home]


def _leaves_often(program: Program, edge: Edge) -> bool:
    """Whether a value is needed by several workers of other hosts, in some replica."""
    for maker in program.workers_of(edge.source.stage):
        readers = {program.beside(maker, target.stage) for target in edge.targets}
        if sum(program.are_apart(maker, reader) for reader in readers) > 1:
            return True
    return False


def _begins(program: Program, made: Places, needed: Places) -> dict[Location, int]:
    """When each computation begins if each takes one unit of time; nothing if some never do."""
    waits = implied_waits(program, made, needed)
    run = DryRun(program, waits)
    if run.stuck():
        return {}
    found: dict[Location, int] = {}
    for worker, first, end in run.stretches:
        for index in range(first, end):
            before = [(worker, index - 1)] if index else []
            ended = [found[location] + 1 for location in (*before, *waits.get((worker, index), ()))]
            found[worker, index] = max(ended, default=0)
    return found


def _moves(
    program: Program,
    edges: Sequence[Edge],
    chunk: int,
    made: Places,
    needed: Places,
    begins: Mapping[Location, int],
    sizes: Sizes,
) -> Iterator[_Move]:
    assert program.hosts is not None
    for edge in edges:
        maker = made[edge.source, chunk][0]
        first: dict[int, int] = {}  # when each worker needs the value
        for target in edge.targets:
            worker, _ = location = needed[target, chunk]
            first[worker] = min(first.get(worker, begins[location]), begins[location])
        first.pop(maker, None)
        readers: dict[int, list[int]] = defaultdict(list)
        for worker in sorted(first, key=lambda worker: (first[worker], worker)):
            readers[program.hosts[worker]].append(worker)
        yield _Move(edge.value, maker, program.hosts[maker], readers, sizes.get(edge.value, 1))


def _load_of_others(program: Program, edges: Sequence[Edge], first: int, sizes: Sizes) -> dict[int, float]:
    """What each host sends of the values that one worker elsewhere needs, in the replica whose first worker this is."""
    assert program.hosts is not None
    load: dict[int, float] = defaultdict(float)
    for edge in edges:
        maker, *readers = (program.beside(first, end.stage) for end in edge.ends)
        if any(program.are_apart(maker, reader) for reader in readers):
            load[program.hosts[maker]] += sizes.get(edge.value, 1)
    return load


def _chosen(moves: Sequence[_Move], others: Mapping[int, float]) -> list[Senders]:
    """Who sends each of these values to whom. ``others`` is what hosts have to send beside them."""
    from_makers = [dict.fromkeys((first for _, first in move.first_readers), move.maker) for move in moves]
    spread = _spread(moves, others)
    between = min(from_makers, spread, key=lambda firsts: _busiest(moves, firsts, others))
    return [
        {
            reader: firsts.get(reader, move.maker if host == move.home else readers[0])
            for host, readers in move.readers.items()
            for reader in readers
        }
        for move, firsts in zip(moves, between)
    ]


def _spread(moves: Sequence[_Move], others: Mapping[int, float]) -> list[Senders]:
    """Who sends the values to the first readers, so that hosts have about as much to send to others.

    The first of these gets a value from its maker, as nobody else has it then.
    """
    load = defaultdict(float, others)
    for move in moves:
        load[move.home] += move.size if move.first_readers else 0
    found = []
    for move in moves:
        having, chosen = [(move.home, move.maker)], Senders()
        for host, first in move.first_readers:
            from_host, sender = min(having, key=lambda each: load[each[0]]) if chosen else having[0]
            load[from_host] += move.size if chosen else 0
            chosen[first] = sender
            having.append((host, first))
        found.append(chosen)
    return found


def _busiest(moves: Sequence[_Move], firsts: Sequence[Senders], others: Mapping[int, float]) -> float:
    """The most that a host sends to others."""
    load = defaultdict(float, others)
    for move, chosen in zip(moves, firsts):
        hosts = {move.maker: move.home, **{first: host for host, first in move.first_readers}}
        for sender in chosen.values():
            load[hosts[sender]] += move.size
    return max(load.values(), default=0.0)


def add_communication(program: Program, early_recompute: bool = True, sizes: Sizes | None = None) -> Program:
    """Lower a valid program for its edges and replicated parameters. A lowered program is lowered again.

    ``sizes`` are the bytes of values, by name: those of a program on several hosts are sent by workers whose hosts have less to
    send. Without it, each value counts as one.

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
    communication = Communication(computations, early_recompute, sizes or {})
    return replace(program, orders=tuple(communication.orders()), lowered=True)


# When it is sent, the rank of that, how it is received, and when it is needed.
Transfer = tuple[int, int, Instruction, int]

# The order of what belongs to the same computation.
RECEIVE, HAND_ON, COMPUTE, ADD, SEND, FREE, EXCHANGE = range(7)


class Communication:
    """The instructions of each worker, each with the index of the computation it belongs to, and its rank there."""

    def __init__(self, program: Program, early_recompute: bool, sizes: Sizes) -> None:
        self.program = program
        self.places = production(program)
        self.receiving = self.places if early_recompute else self.places | places_of_recomputes(program)
        self.senders = {} if program.hosts is None else senders(program, self.places, self.receiving, sizes)
        self.sources = {edge.value: edge.source for edge in program.flow}
        self.targets = {edge.value: targets_by_worker(program, edge) for edge in program.flow}
        self.due: list[list[tuple[int, int, Instruction]]] = [[] for _ in program.orders]
        self.channels: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        for worker, order in enumerate(program.computations):
            self.due[worker] += [(index, COMPUTE, compute) for index, compute in enumerate(order)]
            self.add_transfers(worker, order)

        self.add_sums()
        self.add_notes()
        for (_, to), channel in self.channels.items():
            self.add_receives(to, channel)

    def orders(self) -> Iterator[tuple[Instruction, ...]]:
        for due in self.due:
            due.sort(key=itemgetter(0, 1))
            yield tuple(instruction for _, _, instruction in due)

    def add_transfers(self, worker: int, order: Iterable[Compute]) -> None:
        """Send and free what this worker makes."""
        first = worker - worker % self.program.placement.workers  # the first worker of its replica
        for index, compute in enumerate(order):
            done, chunk = produced_by(compute), compute.microbatch
            for edge in self.program.gives.get(done, ()) if done else ():
                if edge.goes_on:
                    self.add_to_next_run(worker, index, edge, chunk)
                    continue
                if edge.value in self.program.sum_of:
                    continue
                last = whole = self.add_additions(worker, index, edge.value, chunk)
                readers = {first + local: targets for local, targets in self.targets[edge.value]}
                first_uses = {to: self.first_use(targets, chunk) for to, targets in readers.items()}
                sender_of = self.senders.get((edge.value, chunk), {})
                for to, targets in readers.items():
                    last_use = max(self.places[target, chunk][1] for target in targets)
                    if to == worker:
                        last = last_use
                        continue
                    sender = sender_of.get(to, worker)
                    sent = (whole, SEND) if sender == worker else (first_uses[sender], HAND_ON)
                    self.due[sender].append((*sent, Send(edge.value, chunk, to)))
                    self.channels[sender, to].append((*sent, Receive(edge.value, chunk, sender), first_uses[to]))
                    self.due[to].append((last_use, FREE, Free(edge.value, chunk)))
                self.due[worker].append((last, FREE, Free(edge.value, chunk)))

    def first_use(self, targets: Iterable[Pass], chunk: int) -> int:
        """When a worker must have a value for these passes."""
        return min(self.receiving[target, chunk][1] for target in targets)

    def add_additions(self, worker: int, index: int, value: str, chunk: int) -> int:
        """Add to a value what its worker adds to it, if anything. Returns when it is whole."""
        for summand in self.program.summands.get(value, ())[1:]:
            index = max(index, self.places[self.sources[summand], chunk][1])
            self.due[worker].append((index, ADD, Add(summand, chunk, value)))
        return index

    def add_to_next_run(self, worker: int, index: int, edge: Edge, chunk: int) -> None:
        """Send what is for the next run. If this run continues another, take what that has sent, right before its first use."""
        keeps = False
        for to, targets in self.targets[edge.value]:
            uses = [self.places[target, chunk][1] for target in targets]
            keeps = keeps or to == worker
            if to != worker:
                self.due[worker].append((index, SEND, Send(edge.value, chunk, to)))
                if self.program.continues:
                    self.due[to].append((min(uses), RECEIVE, Receive(edge.value, chunk, worker)))
            if self.program.continues:
                self.due[to].append((max(uses), FREE, Free(edge.value, chunk)))
        if not keeps:
            self.due[worker].append((index, FREE, Free(edge.value, chunk)))

    def add_receives(self, worker: int, channel: Sequence[Transfer]) -> None:
        """Receive in the order of sending: each value before its first use, and before those that are sent after it."""
        channel = sorted(channel, key=itemgetter(0, 1))
        latest = accumulate((first_use for *_, first_use in reversed(channel)), min)
        for (_, _, receive, _), index in zip(channel, reversed(list(latest))):
            self.due[worker].append((index, RECEIVE, receive))

    def add_sums(self) -> None:
        """Send gradients as soon as they are whole. Behind all computations, one sum after another is made and sent."""
        program = self.program
        ends = [self.ends_of_backwards(worker) for worker in range(program.workers)]
        behind = [len(order) for order in program.computations]
        owned = sorted(program.sums, key=lambda each: ends[each.owner].get(each.name, -1))
        turns = {each.name: sum(other.owner == each.owner for other in owned[:at]) for at, each in enumerate(owned)}
        for gradient_sum in owned:
            name, owner = gradient_sum.name, gradient_sum.owner
            turn, last = behind[owner] + turns[name], len(owned)
            for worker in program.holders(gradient_sum):
                for instruction in sum_work(program, gradient_sum, worker):
                    match instruction:
                        case SendExchanged(Payload.GRADIENTS):
                            self.due[worker].append((ends[worker][name], EXCHANGE, instruction))
                        case ReceiveExchanged(Payload.GRADIENTS, source):
                            transfer = ends[source][name], EXCHANGE, instruction, turn
                            self.channels[source, worker].append(transfer)
                        case ReceiveExchanged():
                            transfer = turn, EXCHANGE, instruction, behind[worker] + last
                            self.channels[owner, worker].append(transfer)
                        case _:
                            self.due[worker].append((turn, EXCHANGE, instruction))

    def add_notes(self) -> None:
        """Send notes as soon as they are whole. They are received behind all computations."""
        program = self.program
        for worker, order in enumerate(program.computations):
            last = last_forward(order, program.noting(worker))
            for instruction in notes_work(program, worker):
                if isinstance(instruction, SendExchanged):
                    to = instruction.to
                    self.due[worker].append((last, EXCHANGE, instruction))
                    received = (last, EXCHANGE, ReceiveExchanged(Payload.NOTES, worker), len(program.computations[to]))
                    self.channels[worker, to].append(received)

    def ends_of_backwards(self, worker: int) -> dict[str, int]:
        """When a worker's gradients of each sum are whole: the index of the last backward that brings some."""
        last, program = last_backward(self.program.computations[worker]), self.program
        own = {each.name: stages_with_gradients(program, each, worker) for each in program.sums}
        return {name: max(last[stage] for stage in stages) for name, stages in own.items() if stages}


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


def exchange(what: str, payload: Payload, moves: Iterable[tuple[str | int, int, int]]) -> ExchangeProgram:
    """The program that passes on a payload. A move has what it is of, who has it, and to whom it goes.

    Each worker sends all that it has to send, and then receives.

    >>> [list(map(str, order)) for order in exchange("states", Payload.STATE, [(0, 0, 1), (1, 1, 0)]).orders]
    [['send state of worker 0 to 1', 'receive state of worker 1 from 1'], ['send state of worker 1 to 0', 'receive state of ...
    """
    sends, receives = defaultdict(list), defaultdict(list)
    for of, source, to in moves:
        sends[source].append(SendExchanged(payload, to, of))
        receives[to].append(ReceiveExchanged(payload, source, of))
    workers = range(max([-1, *sends, *receives]) + 1)
    program = ExchangeProgram(what, tuple((*sends[worker], *receives[worker]) for worker in workers))
    validate_exchange(program)
    return program
