"""Who sends a value to whom, where workers are on several hosts: it goes once to each host, and is handed on there.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pippy.drivers.plan.language.edges import Edge, Pass
from pippy.drivers.plan.language.instructions import MicrobatchValue
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.proofs.waits import DryRun, Location, Waits

Places = Mapping[tuple[Pass, int], Location]  # where a pass of a micro-batch is computed, or waits for what it takes
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
    waits: dict[Location, list[Location]] = defaultdict(list)
    for edge in program.flow:
        for target in () if edge.goes_on else edge.targets:
            for chunk in range(program.chunks):
                waits[needed[target, chunk]].append(made[edge.source, chunk])
    all_waits: Waits = {location: tuple(sources) for location, sources in waits.items()}
    run = DryRun(program, all_waits)
    if run.stuck():
        return {}
    found: dict[Location, int] = {}
    for worker, first, end in run.stretches:
        for index in range(first, end):
            before = [(worker, index - 1)] if index else []
            ended = [found[location] + 1 for location in (*before, *all_waits.get((worker, index), ()))]
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
