"""A Ray of two nodes on this machine, for the controllers of a campaign."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from exps.injected.left import MARK, marked
from tests.drivers.ray_nodes import Nodes, ray_folder

EACH = 2  # workers of a node
OPTIONS = {"engine": "ray", "resources": {"CPU": 0.1, "run": 1}}  # of a cluster on it


class RayPlace:
    """The nodes. The second one counts as another host."""

    def __init__(self, nodes: Nodes, mark: str) -> None:
        self.nodes = nodes
        self.mark = mark
        for host in ("", "b"):
            nodes.add(host, env={MARK: mark}, run=EACH)

    @property
    def environment(self) -> dict[str, str]:
        """What tells a controller where the head listens."""
        return {"RAY_ADDRESS": str(self.nodes.address)}

    def strike(self, kind: str) -> None:
        """Kill a node, or the process of the head that places workers."""
        if kind == "kill node":
            self.nodes.remove("b")
        else:
            self.nodes.cluster.head_node.kill_gcs_server(check_alive=False)

    def workers(self) -> list[int]:
        """The processes that are workers. Others wait for an actor, or are Ray's own."""
        found = []
        for pid in marked(self.mark):
            with suppress(OSError):
                title = Path(f"/proc/{pid}/cmdline").read_bytes()
                if title.startswith(b"ray::RayWorker"):
                    found.append(pid)
        return found


@contextmanager
def ray_place(mark: str) -> Iterator[RayPlace]:
    """Start the nodes. At the end all of Ray's processes are killed."""
    with ray_folder():
        nodes = Nodes()
        try:
            yield RayPlace(nodes, mark)
        finally:
            nodes.close()
