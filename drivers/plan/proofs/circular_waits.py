"""Checks that sends and receives pair up in the order of their channels, and that no worker waits forever."""

from collections import Counter
from collections.abc import Iterator, Mapping

from pippy.drivers.plan.language.exchange_program import ExchangeProgram
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.proofs.faults import Faults
from pippy.drivers.plan.proofs.waits import Channel, ChannelOrder, DryRun, Location, Transfers, implied_waits


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


def note_unmatched(
    worker: int,
    these: ChannelOrder,
    those: ChannelOrder,
    message: str,
    faults: Faults,
) -> int:
    partners = Counter(key for key, _ in those)
    unmatched = 0
    for key, index in these:
        partners[key] -= 1
        if partners[key] < 0:
            faults.at(worker, index, message)
            unmatched += 1
    return unmatched
