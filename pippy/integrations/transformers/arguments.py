"""How the pipeline of a Trainer is made, as a dataclass that `transformers.HfArgumentParser` reads from a command line."""

from dataclasses import dataclass, field
from typing import Any

from pippy.drivers.base.errors import DriverError
from pippy.drivers.driver.steps.driver_arguments import check_chunks, checked_checkpoint
from pippy.drivers.plan.orders.registry import REGISTRY
from pippy.ir.base.trees import describe


@dataclass
class PipelineArguments:
    """How a `PipelineTrainer` cuts its model, and what its workers do when.

    >>> from transformers import HfArgumentParser
    >>> (arguments,) = HfArgumentParser(PipelineArguments).parse_args_into_dataclasses(["--stages", "4", "--schedule", "zb_h1"])
    >>> arguments.stages, arguments.schedule, arguments.replicas
    (4, 'zb_h1', 1)
    """

    stages: int | None = field(
        default=None, metadata={"help": "Into how many stages the model is cut. By default one for each open worker."}
    )
    schedule: str = field(default="1f1b", metadata={"help": "In which order the workers compute."})
    chunks: int | None = field(
        default=None,
        metadata={
            "help": "Into how many micro-batches each batch of the data loader is cut. By default so many that an update "
            "has two for each stage, of at least two rows."
        },
    )
    memory: str | None = field(
        default=None, metadata={"help": "What a worker may hold, as in 12GiB: the schedule is chosen to fit."}
    )
    checkpoint: str = field(
        default="never", metadata={"help": "Which forwards are computed again: never, always, except_last."}
    )
    replicas: int = field(default=1, metadata={"help": "How many pipelines run side by side."})
    compile: bool = field(default=False, metadata={"help": "Whether the workers compile their stages."})
    split: str = field(default="auto", metadata={"help": "What the stages are to be alike in: time, size, parameters."})

    def checked(self, workers: int | None) -> "PipelineArguments":
        """These, if a pipeline can be made of them on so many workers; None if there are no workers yet."""
        for name in ("stages", "replicas"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise DriverError(f"{name}={describe(value)}: give a number of 1 or more")
        if self.chunks is not None:
            check_chunks(self.chunks, None)
        if self.stages is None and workers is None:
            raise DriverError(
                "PipelineTrainer does not know into how many stages to cut the model; say stages=4, or open a cluster before: "
                "with cluster(4): ..."
            )
        self._check_schedule()
        checked_checkpoint(self.checkpoint, self.stages_on(workers or 1))
        return self

    def _check_schedule(self) -> None:
        chooses = self.schedule == "auto" or self.memory is not None
        if self.schedule not in (*REGISTRY, "auto"):
            raise DriverError(f"schedule={describe(self.schedule)}: take one of auto, {', '.join(REGISTRY)}")
        if self.memory is not None and self.schedule not in ("1f1b", "auto", "list"):
            raise DriverError(
                f"memory={self.memory!r} has the schedule chosen that fits, and schedule={self.schedule!r} is given, too; "
                "leave one of them out"
            )
        if self.replicas > 1 and chooses:
            raise DriverError(
                f"replicas={self.replicas} and a schedule that is chosen (schedule='auto', or memory=) cannot be combined; "
                "have it chosen for one pipeline, print trainer.driver.choice, and give that schedule"
            )

    def stages_on(self, workers: int) -> int:
        """Into how many stages the model is cut."""
        return self.stages or max(1, workers // self.replicas)

    def chunks_of(self, rows: int, accumulated: int, stages: int) -> int:
        """Into how many micro-batches a batch of so many rows is cut, if so many batches are run at once.

        >>> PipelineArguments().chunks_of(rows=8, accumulated=1, stages=4), PipelineArguments().chunks_of(8, 4, 4)
        (4, 2)
        """
        wanted = -(-2 * stages // accumulated) if self.chunks is None else self.chunks
        return max(1, min(wanted, rows // 2 if self.chunks is None else rows))

    def driver_options(self) -> dict[str, Any]:
        """The arguments of the driver."""
        schedule = "auto" if self.memory is not None and self.schedule == "1f1b" else self.schedule
        options: dict[str, Any] = {"schedule": schedule, "replicas": self.replicas, "checkpoint": self.checkpoint}
        if self.memory is not None:
            options["memory"] = self.memory
        if self.compile:
            options["compile"] = True
        return options
