"""How the pipeline of a Trainer is made, as a dataclass that `transformers.HfArgumentParser` reads from a command line; and
which arguments of a Trainer are refused.

Errors of pippy advise those who have a Trainer in words of Trainers: no Pipe, no tracer, no call with ``chunks=``.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from transformers.utils import logging

from pippy.drivers.base.errors import DriverError
from pippy.drivers.driver.driver_base import PipelineDriverBase
from pippy.drivers.driver.drivers import PipelineDriver
from pippy.drivers.driver.steps.driver_arguments import check_chunks, checked_checkpoint
from pippy.drivers.plan.orders.registry import REGISTRY
from pippy.ir.base.errors import PippyError
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


# What a PipelineTrainer refuses before anything starts, each with what to do.
#
# The Trainer does these things to the model of its own process, where nothing is trained.


@dataclass(frozen=True)
class RefusedArgument:
    """An argument of TrainingArguments that has no effect on workers. ``given`` says of a value whether it is refused."""

    name: str
    why: str
    instead: str
    given: Callable[[Any], bool] = bool


_WHOLE_MODEL = "it divides the model among processes that each run the script, and here one script has workers"
_NO_CASTS = "it casts the model of this process, and the workers have parameters of their own"
_DIVIDED = "leave it out; stages= divides the model, replicas= the rows"

REFUSED_ARGUMENTS = (
    RefusedArgument("deepspeed", _WHOLE_MODEL, "leave it out; stages= divides the model"),
    RefusedArgument("fsdp", _WHOLE_MODEL, _DIVIDED),
    RefusedArgument("parallelism_config", _WHOLE_MODEL, _DIVIDED),
    RefusedArgument(
        "torch_compile",
        "it compiles the model of this process, which is not called",
        "leave it out, and have the workers compile their stages: PipelineArguments(compile=True)",
    ),
    RefusedArgument("use_liger_kernel", "its kernels are not made of operations that can be traced", "leave it out"),
    RefusedArgument(
        "auto_find_batch_size",
        "the workers run out of memory, and not this process",
        "leave it out, and say what a worker may hold: PipelineArguments(memory='12GiB')",
    ),
    RefusedArgument(
        "neftune_noise_alpha",
        "its hook is removed from the model of this process after the training, and would stay on the workers",
        "leave it out, and add the noise in the model's forward",
        lambda alpha: alpha is not None,
    ),
    RefusedArgument("fp16_full_eval", _NO_CASTS, "leave it out, or use fp16=True"),
    RefusedArgument("bf16_full_eval", _NO_CASTS, "leave it out, or use bf16=True"),
    RefusedArgument(
        "debug",
        "it looks into the model of this process, which is not called",
        "leave it out, and compare a step with the plain model by pippy check",
        lambda options: any("overflow" in str(getattr(each, "value", each)) for each in options or ()),
    ),
)


def check_training_arguments(args: Any) -> None:
    """Raise if a PipelineTrainer cannot do as these TrainingArguments say."""
    for each in REFUSED_ARGUMENTS:
        value = getattr(args, each.name, None)
        if each.given(value):
            raise DriverError(
                f"{each.name}={value!r}: PipelineTrainer cannot do that, because {each.why}; {each.instead}"
            )
    if args.device.type != "cpu":
        raise DriverError(
            f"TrainingArguments would put the model of this process on {args.device}, and the memory there is for the workers; "
            "give TrainingArguments(use_cpu=True), which is about this process alone: the workers take the GPUs"
        )
    if args.world_size > 1:
        raise DriverError(
            f"the script runs {args.world_size} times, as by accelerate launch, and one PipelineTrainer has all workers; start "
            "the script once, with python, and give stages= and replicas="
        )


logger = logging.get_logger("transformers.pippy")  # it says what a Trainer says, at the Trainer's level
_HERE = "In a PipelineTrainer: "
_TRACED = (
    "the line is followed once, without numbers, and from then on the workers do what was followed. What logs, prints or keeps "
    "a number in compute_loss belongs into a callback: on_log of a TrainerCallback is given the loss. Metrics belong into "
    "compute_metrics. In place of an `if` on numbers, take torch.where. A function that has to see numbers is called whole if "
    "it is defined outside of classes, and marked with @torch.fx.wrap"
)
# Words of an error, and what is meant by them in the script of a Trainer.
_MEANT = {
    "num_stages=": "num_stages= is stages=",
    "driver.": "the driver is trainer.driver",
    "torch.no_grad()": "trainer.evaluate() computes the loss alone",
    "known reduction": "if compute_loss gives a mean over something else than rows, divide its sum by num_items_in_batch",
}
_FIELDS = {each.name for each in fields(PipelineArguments)}
_OPTIONS = {
    name for kind in (PipelineDriver, PipelineDriverBase) for name in inspect.signature(kind).parameters
} - _FIELDS


@contextmanager
def in_words_of_trainers() -> Iterator[None]:
    """Inside, errors say what the user of a Trainer can do."""
    try:
        yield
    except PippyError as error:
        text = str(error)
        if _HERE not in "".join([text, *getattr(error, "__notes__", ())]) and (advice := advice_on(text)):
            if _is_of_tracing(text) and error.args == (text,):  # the advice there cannot be followed
                error.args = (text.partition("What to do: ")[0].rstrip(),)
            error.add_note(advice)
        raise


def _is_of_tracing(text: str) -> bool:
    return "is_leaf_module" in text or "which is called as a whole" in text


def advice_on(text: str) -> str:
    """What the advice of an error means in the script of a Trainer.

    >>> print(advice_on("the model mixes rows. Run one micro-batch, chunks=1, or give the driver check=False"))
    In a PipelineTrainer: chunks= is given by pipeline=PipelineArguments(chunks=...); check= by driver_options={"check": ...}
    """
    if _is_of_tracing(text):
        return _HERE + _TRACED
    named = dict.fromkeys(re.findall(r"\b(\w+)=(?!=)", text))
    said = [f"{name}= is given by pipeline=PipelineArguments({name}=...)" for name in named if name in _FIELDS]
    said += [f'{name}= by driver_options={{"{name}": ...}}' for name in named if name in _OPTIONS]
    said += [meaning for words, meaning in _MEANT.items() if words in text]
    return _HERE + "; ".join(said) if said else ""
