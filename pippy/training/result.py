"""The result of `pippy.train`, and the reports that callbacks get."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pippy.drivers.report.step_data import StepData


@dataclass
class StepReport:
    """What a callback is given after each step: `step` counts from 1, `loss` is that of the step's mini-batch.

    ``norm`` is that of the gradients before they were clipped, if they were. ``rates`` are the learning rates that the step was
    made with, of each group of each optimizer. ``rows`` and ``tokens`` are those of the mini-batch. ``evaluation`` has the
    values of an evaluation that followed this step. In steps that are given to loggers, ``memory`` has the most bytes that each
    worker held, by its name, and ``idle`` the share of the step in which it did not compute. Call `stop` to end the training
    after this step.

    >>> report = StepReport(10, 0, 0.25, None, (0.1,), 64, None, 0.5)
    >>> report.stop()
    >>> report.stopped
    True
    """

    step: int
    epoch: int
    loss: float
    norm: float | None
    rates: tuple[float, ...]
    rows: int | None
    tokens: int | None
    seconds: float
    evaluation: dict[str, float] | None = None
    stopped: bool = False
    memory: dict[str, int] | None = None
    idle: dict[str, float] | None = None

    def stop(self) -> None:
        """End the training after this step: what is to be saved is saved."""
        self.stopped = True

    def note(self, step: StepData) -> None:
        """Take what the workers noted in this step."""
        self.memory = {name: each.memory for name, each in zip(step.workers, step.noted)}
        self.idle = dict(zip(step.workers, step.idle))

    def values(self) -> dict[str, float]:
        """The numbers of the step, by the names that they have in logs. What is not known is left out.

        >>> StepReport(10, 0, 0.25, 1.5, (0.1,), 64, None, 0.5, memory={"worker0": 3 << 19}, idle={"worker0": 0.125}).values()
        {'epoch': 0, 'loss': 0.25, 'gradient_norm': 1.5, 'learning_rate': 0.1, 'samples_per_second': 128.0, \
'memory_mib/worker0': 1.5, 'idle/worker0': 0.125}
        """
        rates = {f"learning_rate/{at}": rate for at, rate in enumerate(self.rates)}
        counts = {"samples_per_second": self.rows, "tokens_per_second": self.tokens}
        return {
            "epoch": self.epoch,
            "loss": self.loss,
            **({} if self.norm is None else {"gradient_norm": self.norm}),
            **({"learning_rate": self.rates[0]} if len(self.rates) == 1 else rates),
            **{name: count / self.seconds for name, count in counts.items() if count is not None},
            **{f"memory_mib/{worker}": held / 2**20 for worker, held in (self.memory or {}).items()},
            **{f"idle/{worker}": share for worker, share in (self.idle or {}).items()},
        }


@dataclass
class TrainingResult:
    """What a training gave. ``losses`` has the loss of each step from the first on, also of those before it was resumed.

    ``steps`` and ``epochs`` are how far the run has come; ``evaluations`` has the values by step; ``checkpoint`` is the path of
    the last one. ``resumed_at`` is the step at which this call went on, ``seconds`` how long it took, and ``recoveries`` how
    often it went on after a worker was lost.

    >>> TrainingResult(losses=[0.5, 0.25], steps=2)
    <TrainingResult: 2 steps, last loss 0.25>
    """

    losses: list[float] = field(default_factory=list)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    steps: int = 0
    epochs: int = 0
    seconds: float = 0.0
    resumed_at: int = 0
    checkpoint: str | None = None
    recoveries: int = 0

    def __repr__(self) -> str:
        loss = f", last loss {self.losses[-1]:.4g}" if self.losses else ""
        evaluation = f", {list(self.evaluations.values())[-1]}" if self.evaluations else ""
        return f"<TrainingResult: {self.steps} steps{loss}{evaluation}>"

    def values(self) -> dict[str, Any]:
        """The part of the result that a checkpoint has, as plain values."""
        return {"losses": torch.tensor(self.losses, dtype=torch.float64), "evaluations": dict(self.evaluations)}

    def go_on(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        """Take the part of the result that a checkpoint has."""
        self.losses, self.evaluations = values["losses"].tolist(), dict(values["evaluations"])
        self.steps, self.epochs = step, epoch
