"""Programs in one line, for tests: workers are separated by bars, instructions by commas."""

from pippy.drivers.plan.language.edges import Checkpoints, Edge, Replicated, scan_edge
from pippy.drivers.plan.language.instructions import parse_instruction
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.language.scanner import Scanner


def edges(*texts: str) -> tuple[Edge, ...]:
    return tuple(scan_edge(Scanner(text)) for text in texts)


def build(
    orders: str,
    placement: tuple[int, ...],
    chunks: int = 1,
    backward: tuple[int, ...] | None = None,
    memory: tuple[int, ...] | None = None,
    edges: tuple[Edge, ...] | None = None,
    replicated: tuple[Replicated, ...] = (),
    checkpoints: tuple[Checkpoints, ...] = (),
    hosts: tuple[int, ...] | None = None,
) -> Program:
    """A program; it is lowered if anything in it is no computation."""
    parsed = tuple(
        tuple(parse_instruction(text.strip()) for text in order.split(",") if text.strip())
        for order in orders.split("|")
    )
    lowered = any(word in orders for word in ("send", "receive", "free", "reduce"))
    if backward is None:
        backward = tuple(range(len(placement)))
    known = memory, edges, replicated, lowered, checkpoints
    return Program("test", Placement(placement), chunks, parsed, backward, *known, hosts=hosts)
