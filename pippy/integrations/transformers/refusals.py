"""What a PipelineTrainer refuses before anything starts, each with what to do.

The Trainer does these things to the model of its own process, where nothing is trained.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pippy.drivers.base.errors import DriverError


@dataclass(frozen=True)
class RefusedArgument:
    """An argument of TrainingArguments that has no effect on workers. ``given`` says whether it is."""

    name: str
    given: Callable[[Any], Any]
    why: str
    instead: str


def _set(name: str) -> Callable[[Any], Any]:
    return lambda args: getattr(args, name, None)


_WHOLE_MODEL = "it divides the model among processes that each run the script, and here one script has workers"
_NO_CASTS = "it casts the model of this process, and the workers have parameters of their own"

REFUSED_ARGUMENTS = (
    RefusedArgument("deepspeed", _set("deepspeed"), _WHOLE_MODEL, "leave it out; stages= divides the model"),
    RefusedArgument("fsdp", _set("fsdp"), _WHOLE_MODEL, "leave it out; stages= divides the model, replicas= the rows"),
    RefusedArgument(
        "parallelism_config",
        _set("parallelism_config"),
        _WHOLE_MODEL,
        "leave it out; stages= divides the model, replicas= the rows",
    ),
    RefusedArgument(
        "torch_compile",
        _set("torch_compile"),
        "it compiles the model of this process, which is not called",
        "leave it out, and have the workers compile their stages: PipelineArguments(compile=True)",
    ),
    RefusedArgument(
        "use_liger_kernel",
        _set("use_liger_kernel"),
        "its kernels are not made of operations that can be traced",
        "leave it out",
    ),
    RefusedArgument(
        "auto_find_batch_size",
        _set("auto_find_batch_size"),
        "the workers run out of memory, and not this process",
        "leave it out, and say what a worker may hold: PipelineArguments(memory='12GiB')",
    ),
    RefusedArgument(
        "neftune_noise_alpha",
        lambda args: getattr(args, "neftune_noise_alpha", None) is not None,
        "its hook is removed from the model of this process after the training, and would stay on the workers",
        "leave it out, and add the noise in the model's forward",
    ),
    RefusedArgument("fp16_full_eval", _set("fp16_full_eval"), _NO_CASTS, "leave it out, or use fp16=True"),
    RefusedArgument("bf16_full_eval", _set("bf16_full_eval"), _NO_CASTS, "leave it out, or use bf16=True"),
    RefusedArgument(
        "debug",
        lambda args: any(
            "overflow" in str(getattr(each, "value", each)) for each in getattr(args, "debug", None) or ()
        ),
        "it looks into the model of this process, which is not called",
        "leave it out, and compare a step with the plain model by pippy check",
    ),
)


def check_training_arguments(args: Any) -> None:
    """Raise if a PipelineTrainer cannot do as these TrainingArguments say."""
    for each in REFUSED_ARGUMENTS:
        if each.given(args):
            raise DriverError(
                f"{each.name}={getattr(args, each.name)!r}: PipelineTrainer cannot do that, because {each.why}; {each.instead}"
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
