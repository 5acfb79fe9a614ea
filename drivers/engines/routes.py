"""How values go between each two workers of a cluster."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace


def on_devices(devices: Sequence[str]) -> list[int]:
    """The workers that compute beside the CPU, of those with these devices.

    >>> on_devices(["cpu", "cuda:0", "cuda:1"])
    [1, 2]
    """
    return [worker for worker, device in enumerate(devices) if not device.startswith("cpu")]


@dataclass(frozen=True)
class Routes:
    """The workers, in groups of which each shares memory; between two groups values go by TCP.

    ``hosts`` has the name of each worker's host, and ``machines`` a text for each worker that is equal for those of one host,
    where names may not tell them apart. ``only_rpc`` says that between two groups all values go by RPC. ``on_devices`` has from
    which worker to which values stay on GPUs, as far as that was tried; and where they do not, the reason.

    >>> routes = Routes(("a", "b", "c"), ("node1", "node1", "node2"), ((0, 1), (2,)))
    >>> routes.between(0, 1), routes.between(1, 2), routes.between(2, 2)
    ('shared memory', 'TCP', 'the same process')
    >>> print(routes)
    a, b on node1: shared memory
    c on node2
    between these lines: TCP
    >>> print(Routes.of_host("ab", "node1", ("cuda:0", "cuda:1")).tried({(0, 1): "", (1, 0): "no peer access"}))
    a, b on node1: shared memory
    from a to b: memory of a's GPU, which b maps
    from b to a: shared memory of the host, not of a GPU: no peer access
    """

    names: tuple[str, ...]
    hosts: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    only_rpc: bool = False
    devices: tuple[str, ...] = ()
    on_devices: Mapping[tuple[int, int], str] = field(default_factory=dict)
    machines: tuple[str, ...] = ()

    @staticmethod
    def of_host(names: Sequence[str], host: str, devices: tuple[str, ...] = ()) -> "Routes":
        """Those of workers of one host, all of which share memory."""
        return Routes(tuple(names), (host,) * len(names), (tuple(range(len(names))),), devices=devices)

    @property
    def has_devices(self) -> bool:
        """Whether some workers compute on devices of one host."""
        return len(on_devices(self.devices)) > 1

    def tried(self, on_devices: Mapping[tuple[int, int], str]) -> "Routes":
        """These routes, and what became of those between devices."""
        return replace(self, on_devices=on_devices)

    def without(self, workers: Collection[int]) -> "Routes":
        """These routes without those from and to some workers.

        >>> print(Routes.of_host("abc", "node1").without([1]))
        a, c on node1: shared memory
        """
        groups = (tuple(each for each in group if each not in workers) for group in self.groups)
        return replace(self, groups=tuple(filter(None, groups)))

    def hosts_of(self, workers: Sequence[int]) -> tuple[int, ...] | None:
        """The host of each of these workers, as numbers; None if all are on one.

        >>> routes = Routes(tuple("abcd"), ("node1", "node2", "node1", "node3"), ((0, 2), (1,), (3,)))
        >>> routes.hosts_of([3, 0, 2]), routes.hosts_of([2, 0])
        ((0, 1, 1), None)
        """
        where = [(self.machines or self.hosts)[worker] for worker in workers]
        numbers = {host: number for number, host in enumerate(dict.fromkeys(where))}
        return tuple(numbers[host] for host in where) if len(numbers) > 1 else None

    def between(self, one: int, other: int) -> str:
        """How a value goes from one worker to another: in "the same process", by "shared memory", "GPU memory" or `far`."""
        if one == other:
            return "the same process"
        if self.on_devices.get((one, other)) == "":
            return "GPU memory"
        return "shared memory" if any(one in group and other in group for group in self.groups) else self.far

    @property
    def far(self) -> str:
        """How values go between two groups.

        >>> Routes(("a", "b"), ("node1", "node1"), ((0,), (1,)), only_rpc=True).far
        'RPC'
        """
        return "RPC" if self.only_rpc else "TCP"

    def __str__(self) -> str:
        lines = [self._line(group) for group in self.groups]
        lines += [f"between these lines: {self.far}"] if len(lines) > 1 else []
        return "\n".join([*lines, *(self._pair(*pair) for pair in sorted(self.on_devices))])

    def _pair(self, one: int, other: int) -> str:
        sender, receiver, why = self.names[one], self.names[other], self.on_devices[one, other]
        memory = (
            f"shared memory of the host, not of a GPU: {why}"
            if why
            else f"memory of {sender}'s GPU, which {receiver} maps"
        )
        return f"from {sender} to {receiver}: {memory}"

    def _line(self, group: Sequence[int]) -> str:
        who = f"{', '.join(self.names[worker] for worker in group)} on {self.hosts[group[0]]}"
        return f"{who}: shared memory" if len(group) > 1 else who
