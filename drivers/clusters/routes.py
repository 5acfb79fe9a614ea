"""How values go between each two workers of a cluster."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Routes:
    """The workers, in groups of which each shares memory; between two groups values go by RPC.

    ``hosts`` has the name of each worker's host. ``reasons`` says why a worker shares no memory with others of its host.

    >>> routes = Routes(("a", "b", "c"), ("node1", "node1", "node2"), ((0, 1), (2,)))
    >>> routes.between(0, 1), routes.between(1, 2), routes.between(2, 2)
    ('shared memory', 'RPC', 'the same process')
    >>> print(routes)
    a, b on node1: shared memory
    c on node2
    between these lines: RPC
    """

    names: tuple[str, ...]
    hosts: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    reasons: Mapping[int, str] = field(default_factory=dict)

    @staticmethod
    def of_host(names: Sequence[str], host: str, shares_memory: bool) -> "Routes":
        """Those of workers of one host, all of which share memory, or none."""
        workers = range(len(names))
        groups = [tuple(workers)] if shares_memory else [(worker,) for worker in workers]
        return Routes(tuple(names), (host,) * len(names), tuple(groups))

    def between(self, one: int, other: int) -> str:
        """How a value goes from one worker to another: in "the same process", through "shared memory", or by "RPC"."""
        if one == other:
            return "the same process"
        return "shared memory" if any(one in group and other in group for group in self.groups) else "RPC"

    def __str__(self) -> str:
        lines = [self._line(group) for group in self.groups]
        return "\n".join([*lines, "between these lines: RPC"] if len(lines) > 1 else lines)

    def _line(self, group: Sequence[int]) -> str:
        who = f"{', '.join(self.names[worker] for worker in group)} on {self.hosts[group[0]]}"
        if len(group) > 1:
            return f"{who}: shared memory"
        why = self.reasons.get(group[0])
        return f"{who}, which shares no memory with others there: {why}" if why else who
