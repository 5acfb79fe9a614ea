"""Who is who in a cluster: the host and process of each worker, and the stages that the open drivers have placed on it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pippy.ir.base.readable import html_table, text_table


@dataclass(frozen=True)
class WorkerPlace:
    """A worker: its name, host and process, and what each driver has placed there, in words, by the driver's number.

    A worker that was lost, and whose place is empty, has no process: its pid is None.

    >>> WorkerPlace("worker0", "node1", 4711).pid
    4711
    """

    name: str
    host: str
    pid: int | None
    holds: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DriverPlaces:
    """A driver as its cluster knows it: its name, and what it has placed on each worker, in words.

    >>> DriverPlaces("PipelineDriver1F1B", {0: "stage 0"}).name
    'PipelineDriver1F1B'
    """

    name: str
    holds: Mapping[int, str]

    @staticmethod
    def of(name: str, replicas: Sequence[Sequence[int]]) -> "DriverPlaces":
        """Those of a driver, of which ``replicas`` has the worker of each stage, for each replica.

        >>> DriverPlaces.of("driver", [[0, 1, 0]]).holds, DriverPlaces.of("driver", [[3], [4]]).holds
        ({0: 'stages 0, 2', 1: 'stage 1'}, {3: 'replica 0, stage 0', 4: 'replica 1, stage 0'})
        """
        holds = {}
        for replica, ranks in enumerate(replicas):
            which = f"replica {replica}, " * (len(replicas) > 1)
            for rank in dict.fromkeys(ranks):
                stages = [str(stage) for stage, worker in enumerate(ranks) if worker == rank]
                holds[rank] = f"{which}stage{'s' * (len(stages) > 1)} {', '.join(stages)}"
        return DriverPlaces(name, holds)


@dataclass(frozen=True)
class ClusterTopology:
    """The workers of a cluster: print it, or ask for one by its number. ``drivers`` are the open drivers, in words, by number.

    >>> places = WorkerPlace("a", "node1", 10, {0: "stage 0"}), WorkerPlace("b", "node1", 11)
    >>> topology = ClusterTopology(places, {0: "1f1b"})
    >>> print(topology)
    worker   name   host    pid   1f1b
    ─────────────────────────────────────
    0        a      node1    10   stage 0
    1        b      node1    11
    >>> topology[1].name, len(topology)
    ('b', 2)
    """

    workers: tuple[WorkerPlace, ...]
    drivers: Mapping[int, str] = field(default_factory=dict)

    def __getitem__(self, worker: int) -> WorkerPlace:
        return self.workers[worker]

    def __len__(self) -> int:
        return len(self.workers)

    def _table(self) -> list[Sequence[str]]:
        rows = [
            [
                str(at),
                each.name,
                each.host,
                str(each.pid or ""),
                *(each.holds.get(number, "") for number in self.drivers),
            ]
            for at, each in enumerate(self.workers)
        ]
        return [["worker", "name", "host", "pid", *self.drivers.values()], *rows]

    def _words(self) -> tuple[int, ...]:
        return (0, 1, 2, *range(4, 4 + len(self.drivers)))

    def __str__(self) -> str:
        head, *rows = self._table()
        return text_table(head, rows, words=self._words())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(self._table(), words=self._words())
