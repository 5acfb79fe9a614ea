"""What each instruction waits for on other workers, an order in which the program can run, and the check that it can.

Sends and receives pair up in the order of their channels, and no worker waits forever.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from itertools import product

from pippy.drivers.plan.language.edges import Pass
from pippy.drivers.plan.language.exchanges import ExchangeProgram
from pippy.drivers.plan.language.instructions import KINDS, Compute, Receive, Send
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.proofs.faults import Faults

Location = tuple[int, int]  # a worker and an index into its order
Waits = dict[Location, tuple[Location, ...]]
Places = Mapping[tuple[Pass, int], Location]  # where a pass of a micro-batch is computed, or waits for what it takes
Channel = tuple[int, int]  # from a worker to a worker
ChannelOrder = list[tuple[tuple[str, int], int]]  # values, their micro-batches, and where in the worker's order


def production(program: Program) -> dict[tuple[Pass, int], Location]:
    """Where each pass makes its values, by micro-batch: the worker, and the index in its order."""
    places: dict[tuple[Pass, int], Location] = {}
    passes = {
        (op, stage): Pass(kind.phase, stage)
        for (op, kind), stage in product(KINDS.items(), range(program.stages))
        if kind.phase
    }
    for worker, order in enumerate(program.orders):
        for index, compute in enumerate(order):
            if isinstance(compute, Compute) and (compute.op, compute.stage) in passes:
                places.setdefault((passes[compute.op, compute.stage], compute.microbatch), (worker, index))
    return places


def implied_waits(program: Program, made: Places | None = None, needed: Places | None = None) -> Waits:
    """The waits of a program that only orders computations: each waits for those that make its inputs.

    Without the places where values are ``made``, and waited for, these are those of the computations.
    """
    made = made or production(program)
    waits: dict[Location, tuple[Location, ...]] = {}
    for (done, chunk), location in (needed or made).items():
        sources = (edge.source for edge in program.takes.get(done, ()) if not edge.goes_on)
        found = tuple(made[source, chunk] for source in sources if (source, chunk) in made)
        if found:
            waits[location] = (*waits.get(location, ()), *found)
    return waits


class Transfers:
    """What a lowered program sends into each channel, and what it receives from it, in order.

    What is for the next run is not among it: that waits for nothing in this one.

    >>> from pippy.drivers.plan import add_communication, make_schedule
    >>> Transfers(add_communication(make_schedule("forward_only", workers=2, chunks=1))).sent[0, 1]
    [(('activation_0', 0), 1)]
    """

    def __init__(self, program: Program | ExchangeProgram) -> None:
        self.sent: dict[Channel, ChannelOrder] = defaultdict(list)
        self.received: dict[Channel, ChannelOrder] = defaultdict(list)
        going_on = program.going_on if isinstance(program, Program) else frozenset[str]()
        for worker, order in enumerate(program.orders):
            for index, instruction in enumerate(order):
                kind = instruction.kind
                if isinstance(instruction, Send | Receive) and instruction.value in going_on:
                    continue
                if kind.sends_to and kind.takes:
                    self.sent[worker, kind.sends_to(instruction)].append((kind.takes(instruction), index))
                elif kind.receives_from and kind.gives:
                    self.received[kind.receives_from(instruction), worker].append((kind.gives(instruction), index))

    def waits(self, buffer: int | None = None) -> Waits:
        """A receive waits for its send. A send waits for room in its channel, if channels hold only ``buffer`` values."""
        waits: Waits = {}
        for (source, to), received in self.received.items():
            sent = dict(reversed(self.sent.get((source, to), [])))
            waits.update({(to, index): ((source, sent[key]),) for key, index in received if key in sent})
        for (source, to), sent_in_order in self.sent.items() if buffer else ():
            received = self.received.get((source, to), [])
            for (_, index), (_, freed_by) in zip(sent_in_order[buffer:], received):
                waits[source, index] = ((to, freed_by),)
        return waits


class DryRun:
    """Runs a program without a clock and without computing: each worker goes on until it has to wait.

    ``stretches`` lists what workers do without a wait, as (worker, first, end), in an order that works. ``positions`` is
    where each worker ends.

    >>> from pippy.drivers.plan import make_schedule
    >>> program = make_schedule("1f1b", workers=2, chunks=1)
    >>> DryRun(program, implied_waits(program)).stretches
    [(0, 0, 1), (1, 0, 2), (0, 1, 2)]
    """

    def __init__(self, program: Program | ExchangeProgram, waits: Waits) -> None:
        self.waits = waits
        self.lengths = [len(order) for order in program.orders]
        self.positions = [0] * program.workers
        self.stretches: list[tuple[int, int, int]] = []
        self.stops: list[deque[int]] = [deque() for _ in program.orders]
        for worker, index in sorted(waits):
            self.stops[worker].append(index)
        self.parked: list[list[tuple[int, int]]] = [[] for _ in program.orders]
        ready = deque(range(program.workers))
        while ready:
            ready.extend(self.advance(ready.popleft()))

    def advance(self, worker: int) -> list[int]:
        """Run a worker until it has to wait; returns the workers that waited for what it did."""
        begin, stops = self.positions[worker], self.stops[worker]
        while stops:
            self.positions[worker] = stops[0]
            if awaited := self.awaited((worker, stops[0])):
                source, index = awaited
                self.parked[source].append((index, worker))
                break
            stops.popleft()
        else:
            self.positions[worker] = self.lengths[worker]
        if self.positions[worker] > begin:
            self.stretches.append((worker, begin, self.positions[worker]))
        parked = self.parked[worker]
        self.parked[worker] = [entry for entry in parked if entry[0] >= self.positions[worker]]
        return [waiting for index, waiting in parked if index < self.positions[worker]]

    def awaited(self, location: Location) -> Location | None:
        """The first of the instructions that this one waits for which is not done yet."""
        return next((source for source in self.waits.get(location, ()) if self.positions[source[0]] <= source[1]), None)

    def stuck(self) -> dict[int, Location]:
        """For each worker that never ends, what it waits for."""
        found = {}
        for worker, position in enumerate(self.positions):
            if position < self.lengths[worker] and (awaited := self.awaited((worker, position))):
                found[worker] = awaited
        return found


def check_waits(program: Program | ExchangeProgram, buffer: int | None, faults: Faults) -> None:
    """Note sends and receives without a partner or out of order, and every circle of workers that wait."""
    if isinstance(program, Program) and not program.lowered:
        waits = implied_waits(program)
    else:
        transfers = Transfers(program)
        check_channels(transfers, faults)
        waits = transfers.waits(buffer)
    run = DryRun(program, waits)
    stuck = run.stuck()
    for workers in circles({worker: awaited for worker, (awaited, _) in stuck.items()}):
        draw_circle(program, workers, run.positions, stuck, faults)


def circles(waits: Mapping[int, int]) -> Iterator[list[int]]:
    """The circles of workers, of which each waits for one other.

    >>> list(circles({0: 1, 1: 2, 2: 1, 3: 0, 4: 4, 5: 6}))
    [[1, 2], [4]]
    """
    seen = set[int]()
    for worker in waits:
        way: list[int] = []
        while worker in waits and worker not in seen:
            seen.add(worker)
            way.append(worker)
            worker = waits[worker]
        if worker in way:
            yield way[way.index(worker) :]


def draw_circle(
    program: Program | ExchangeProgram,
    workers: list[int],
    positions: list[int],
    stuck: dict[int, Location],
    faults: Faults,
) -> None:
    """Note a circle: one line for each worker, with the worker it waits for."""
    chain = []
    for worker in workers:
        here, (other, index) = program.orders[worker][positions[worker]], stuck[worker]
        awaited = program.orders[other][index]
        chain.append(f"\n    worker {worker} at {here} waits for worker {other} to do {awaited}")
        faults.mark(worker, positions[worker], f"waits for {awaited} on worker {other}")
    faults.overall(f"circular wait:{''.join(chain)}")


def check_channels(transfers: Transfers, faults: Faults) -> None:
    for channel in sorted(transfers.sent.keys() | transfers.received.keys()):
        sent, received = transfers.sent.get(channel, []), transfers.received.get(channel, [])
        if [key for key, _ in sent] != [key for key, _ in received]:
            check_pairs(channel, sent, received, faults)


def check_pairs(channel: Channel, sent: ChannelOrder, received: ChannelOrder, faults: Faults) -> None:
    """Note the sends without a receive, the receives without a send, and the first one that is out of order."""
    source, to = channel
    unmatched = note_unmatched(source, sent, received, f"is never received by worker {to}", faults)
    unmatched += note_unmatched(to, received, sent, f"is never sent by worker {source}", faults)
    if not unmatched:
        for (key, _), (other, index) in zip(sent, received):
            if key != other:
                faults.at(to, index, f"comes out of order: worker {source} sends {key[0]}.{key[1]} first")
                return


def note_unmatched(worker: int, these: ChannelOrder, those: ChannelOrder, message: str, faults: Faults) -> int:
    partners = Counter(key for key, _ in those)
    unmatched = 0
    for key, index in these:
        partners[key] -= 1
        if partners[key] < 0:
            faults.at(worker, index, message)
            unmatched += 1
    return unmatched
