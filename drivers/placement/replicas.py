"""Replicas of a pipeline: which worker holds which stage of which replica, and which models cannot have replicas.

stage        0         1
replica 0    worker0   worker1      micro-batches 0 to 3
replica 1    worker2   worker3      micro-batches 4 to 7
                └─────────┴─ the gradients of a stage are added up over the replicas
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn.modules.batchnorm import _NormBase

from pippy.drivers.base.errors import DriverError
from pippy.ir.base import source
from pippy.ir.base.readable import aligned_lines
from pippy.ir.record.compiled import Compiled
from pippy.ir.run.batch_norm import DeferredBatchNorm


@dataclass(frozen=True)
class Topology:
    """Which worker holds which stage of which replica of the pipeline. `topology[replica, stage]` is the number of a worker.

    ``ranks`` has the worker of each stage, for each replica. ``names`` are those of all workers of the cluster.

    >>> topology = Topology(((0, 1), (2, 3)), ["a", "b", "c", "d"])
    >>> print(topology)
    stage      0  1
    replica 0  a  b
    replica 1  c  d
    >>> topology[1, 0], topology.names[topology[1, 0]]
    (2, 'c')
    """

    ranks: tuple[tuple[int, ...], ...]
    names: Sequence[str]

    def __getitem__(self, replica_and_stage: tuple[int, int]) -> int:
        replica, stage = replica_and_stage
        return self.ranks[replica][stage]

    def __str__(self) -> str:
        rows = [["stage", *map(str, range(len(self.ranks[0])))]]
        rows += [[f"replica {at}", *(self.names[rank] for rank in own)] for at, own in enumerate(self.ranks)]
        return "\n".join(aligned_lines(rows, words=range(len(rows[0])), between="  "))


class RunningStatistics:
    """The norms of a Pipe that may have running statistics. Micro-batches and replicas see other rows than the mini-batch has,
    so their statistics are others."""

    def __init__(self, compiled: Compiled, replicas: int) -> None:
        self.replicas, self.warned = replicas, False
        self.norms: Mapping[str, Any] = {
            compiled.remap_qualname(f"{call}.{path}"): module
            for call, stage in compiled.stages()
            for path, module in stage.named_modules()
            if isinstance(module, _NormBase) and not isinstance(module, DeferredBatchNorm)
        }

    def check(self) -> None:
        """Raise if a norm of replicas would change its running statistics in a step."""
        if self.replicas > 1 and (changing := self._changing()):
            raise DriverError(
                f"{changing} would change running statistics in training, and each replica of the pipeline sees a part of the "
                "mini-batch only, so that their copies would drift apart; convert_deferred_batch_norm(model) counts all of it, "
                "for batch norms. Or put them into eval(), to keep their statistics as they are, take norms without any "
                "(track_running_stats=False, GroupNorm, LayerNorm), or leave replicas= out"
            )

    def warn(self, chunks: int) -> None:
        """Warn once before a norm changes its running statistics by micro-batches."""
        if not self.warned and (told := self.told(chunks)):
            self.warned = True
            source.warn(told)

    def told(self, chunks: int) -> str:
        """What a step in so many micro-batches makes of running statistics, and what to do; nothing if it changes none."""
        changing = self._changing() if chunks > 1 else ""
        return changing and (
            f"{changing} changes its running statistics by each of {chunks} micro-batches, and not by the mini-batch as "
            "in the plain model, so that evaluation differs from that of plain training: "
            "pippy.convert_deferred_batch_norm(model) makes them those of the whole mini-batch. To keep them as they are, "
            "put the norm into eval()"
        )

    def _changing(self) -> str:
        """The names of the norms that would change their statistics; nothing if none would."""
        names = [
            repr(name)
            for name, norm in self.norms.items()
            if norm.training and norm.track_running_stats and norm.running_mean is not None
        ]
        return f"{', '.join(names[:6])}{' and others' * (len(names) > 6)}"
