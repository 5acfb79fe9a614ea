"""What the controller raises for a command that failed, took too long, or was given up."""

from typing import Any

from pippy.drivers.base.errors import ClusterError, StepError
from pippy.drivers.protocol.commands import Failure
from pippy.drivers.protocol.state import OptimizerStep
from pippy.drivers.protocol.steps import RunTrial, Step


def step_error(name: str, worker: int, number: int, body: Any, failure: Failure) -> StepError:
    """The error for a failure on a worker, at this body of the command with this number."""
    lines = []
    if failure.instruction:
        of = "" if failure.stage is None else _of_stage(failure, body)
        lines.append(f"worker {worker} ({name}) failed at {failure.instruction}{of}, {failure.where} of step {number}")
    else:
        lines.append(f"worker {worker} ({name}) failed at {failure.where}")
    lines.append(failure.message)
    if isinstance(body, OptimizerStep):
        lines.append(
            "parameters may have been updated on some workers and not on others; load a state dict before going on"
        )
    if failure.traceback:
        lines += ["", "The worker's traceback:", failure.traceback]
    error = StepError("\n".join(lines).rstrip())
    error.failure, error.worker = failure, worker
    return error


def _of_stage(failure: Failure, body: Any) -> str:
    step = body.step if isinstance(body, RunTrial) else body
    rows = step.rows_shown(failure.microbatch) if isinstance(step, Step) and failure.microbatch is not None else ""
    return f" (stage {failure.stage}, micro-batch {failure.microbatch}{f', {rows}' if rows else ''})"


def given_up_error(number: int, first: int, error: BaseException) -> Exception:
    """The error of a command that was given up, when the first of those that were has this error.

    >>> given_up_error(7, 7, StepError("why"))
    StepError('why')
    >>> given_up_error(8, 7, StepError("why"))
    StepError('step 8 was given up because step 7 failed:\\nwhy')
    >>> given_up_error(7, 7, KeyboardInterrupt())
    StepError('step 7 was given up because of a KeyboardInterrupt')
    """
    if isinstance(error, ClusterError) or (number == first and isinstance(error, Exception)):
        return error
    why = f"step {first} failed:\n{error}" if isinstance(error, Exception) else f"of a {type(error).__name__}"
    return StepError(f"step {number} was given up because {why}")


def late_text(number: int, limit: float | None, dump: str) -> str:
    """What is said of a step that takes too long, with what the workers do."""
    return f"step {number} took longer than {limit or 0.0:g} s (step_timeout) and was given up; at that time\n{dump}"


def stuck_text(doing: str, seconds: float) -> str:
    """How a worker is lost whose instruction does not end."""
    return (
        f"{seconds:g} s after it was told to give up what it did, it had not (cluster(timeout=) says how long it may take); it "
        f"says: {doing}"
    )
