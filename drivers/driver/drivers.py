"""The drivers, one for each schedule that has a name of its own, and one for all others."""

from collections.abc import Mapping, Sequence
from typing import Any

from pippy.drivers.base.errors import DriverError
from pippy.drivers.choice.auto import Auto
from pippy.drivers.driver.driver_base import PipelineDriverBase
from pippy.drivers.driver.steps.driver_arguments import refuse_together
from pippy.drivers.engines.cluster import Cluster
from pippy.drivers.plan import Program
from pippy.drivers.plan.choice.choice import Choice
from pippy.drivers.plan.passes.rewrites import Checkpoint
from pippy.ir.base.public_calls import placing_words
from pippy.ir.base.readable import brief
from pippy.ir.pipe import Pipe


@placing_words('PipelineDriver(pipe, schedule="auto")', more=["memory"], owner="driver")
class PipelineDriver(PipelineDriverBase):
    """Runs a Pipe by any schedule: by name, as a program, or by the best one for the times of the first steps.

    With ``schedule="auto"``, ``memory`` are the bytes that each worker may hold, ``memory_limit`` those of its activations
    alone, and ``max_live`` is how many stage-micro-batches it may hold. See docs/schedules.md.

    All drivers are made and used alike:

    >>> import torch
    >>> from torch import nn
    >>> from pippy import cluster
    >>> torch.manual_seed(0)
    <torch._C.Generator object at ...>
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    >>> x, target = torch.randn(6, 4), torch.randn(6, 1)
    >>> expected = nn.functional.mse_loss(model(x), target)
    >>> pipe = Pipe.from_sequential(model, nn.MSELoss())
    >>> with cluster(2) as workers:
    ...     for kind in (PipelineDriver1F1B, PipelineDriverFillDrain, PipelineDriverInterleaved1F1B):
    ...         print(kind.schedule, torch.allclose(kind(pipe).run(4, x, target), expected))
    ...     driver = PipelineDriver(pipe, schedule="zb_h1")
    ...     optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1)
    ...     before = driver.run(4, x, target)
    ...     optimizer.step()
    ...     print(workers, bool(driver.run(4, x, target) < before))
    1f1b True
    fill_drain True
    interleaved_1f1b True
    <Cluster of 2 workers, open: worker0, worker1> True
    """

    def __init__(
        self,
        pipe: Pipe,
        cluster: Cluster | None = None,
        *,
        schedule: str | Program = "1f1b",
        memory_limit: int | str | Sequence[int | str] | Mapping[int, int | str] | None = None,
        max_live: int | Sequence[int] | None = None,
        checkpoint: Checkpoint | None = None,
        **rest: Any,
    ) -> None:
        self.schedule = schedule
        if schedule == "auto":
            memory = rest.pop("memory", None)
            if memory is not None and memory_limit is not None:
                raise DriverError(
                    f"memory={brief(memory)} and memory_limit={brief(memory_limit)} are both given, but memory= "
                    "already includes the activations that memory_limit= limits; leave memory_limit out"
                )
            name, limit = ("memory", memory) if memory_limit is None else ("memory_limit", memory_limit)
            if limit is not None:
                refuse_together(name, limit, rest)
            self._auto = Auto(memory, memory_limit, max_live, checkpoint)
        elif memory_limit is not None or max_live is not None:
            name, limit = ("memory_limit", memory_limit) if max_live is None else ("max_live", max_live)
            raise DriverError(
                f"{name}={brief(limit)} limits the choice of schedule='auto', but another schedule is given; leave "
                "one of them out (schedule='list' takes memory=)"
            )
        elif schedule != "list" and "memory" in rest:
            raise DriverError(
                f"memory={brief(rest['memory'])} limits the choice of schedule='auto', but another schedule is "
                "given; leave one of them out"
            )
        super().__init__(pipe, cluster, checkpoint="never" if checkpoint is None else checkpoint, **rest)

    @property
    def choice(self) -> Choice | None:
        """What ``schedule="auto"`` chose for the latest step's number of micro-batches, and why: print it.

        None while the first steps are still measured, and with any other schedule.
        """
        return None if self._auto is None else self._auto.choice


class PipelineDriverFillDrain(PipelineDriverBase):
    """All forwards, then all backwards: GPipe's schedule, and the one that can have a single loss.

    >>> from pippy.drivers.plan import make_schedule, render_text
    >>> print(render_text(make_schedule(PipelineDriverFillDrain.schedule, workers=2, chunks=3)))
    0 | F0 F1 F2 .  .  .  B0 -- B1 -- B2 --
    1 | .  F0 F1 F2 B0 -- B1 -- B2 -- .  .
    """

    schedule = "fill_drain"


class PipelineDriver1F1B(PipelineDriverBase):
    """One forward, one backward in turn: as fast as fill-drain, and no more activations than stages ahead.

    >>> from pippy.drivers.plan import make_schedule, render_text
    >>> print(render_text(make_schedule(PipelineDriver1F1B.schedule, workers=2, chunks=3)))
    0 | F0 F1 .  .  B0 -- F2 B1 -- .  B2 --
    1 | .  F0 B0 -- F1 B1 -- F2 B2 -- .  .
    """

    schedule = "1f1b"


class PipelineDriverInterleaved1F1B(PipelineDriverBase):
    """1F1B with several stages on each worker: less idle time, for more messages.

    >>> from pippy.drivers.plan import make_schedule, render_text
    >>> program = make_schedule(PipelineDriverInterleaved1F1B.schedule, workers=2, chunks=2, stages_per_worker=2)
    >>> print(render_text(program))
    0 | F0.0 F0.1 F2.0 F2.1 .    .    B2.0 --   .    B2.1 --   B0.0 --   B0.1 --
    1 | .    F1.0 F1.1 F3.0 B3.0 --   F3.1 B3.1 --   B1.0 --   B1.1 --   .    .
    """

    schedule = "interleaved_1f1b"
