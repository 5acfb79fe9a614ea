"""The stages that a worker will run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pippy.drivers.protocol.gradients import GradientBucket
from pippy.drivers.protocol.peers import NeedsPeers
from pippy.drivers.wire.pickling import Pickled


@dataclass(frozen=True)
class Load(NeedsPeers):
    """The stages that a worker will run.

    ``modules`` holds the stages by their names in the graph. ``constant`` names the tensors of each stage that other stages
    read too. ``buckets`` have all parameters with copies. ``replicas`` says whether other workers hold the same stages, for
    other replicas of the pipeline. ``compile`` says how the stages are compiled; it is None if they are not.
    """

    modules: Pickled
    constant: Mapping[str, Sequence[str]]
    buckets: tuple[GradientBucket, ...]
    seed: int
    compile: Pickled | None = None
    replicas: bool = False

    def peers(self, worker: int) -> set[int]:
        """The workers that it adds up gradients with: the owner of a bucket with all others."""
        found: set[int] = set()
        for bucket in self.buckets:
            others = {*bucket.workers} - {bucket.owner}
            found |= others if worker == bucket.owner else {bucket.owner} if worker in others else set()
        return found


@dataclass(frozen=True)
class AskCompiled:
    """Ask how the stages run, by their names."""


@dataclass(frozen=True)
class Unload:
    """Drop everything that belongs to the driver."""


@dataclass(frozen=True)
class ForgetPeers:
    """Drop the connections with these workers: other processes have taken their places."""

    peers: tuple[int, ...]
