"""`pippy check`: runs a training script up to its first step, and compares that step with the plain model's."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from pippy.cli.run import ScriptCommand, run_script, script_options

if TYPE_CHECKING:
    from pippy.drivers.driver.check.report import CheckReport


@click.command(cls=ScriptCommand, no_args_is_help=True, short_help="Compare a script's first step with plain PyTorch.")
@script_options
def check(
    script: str, args: tuple[str, ...], workers: int, threads: int | None, pin: bool, device: str | None, module: bool
) -> None:
    """Run SCRIPT up to its first training step, and compare this step with the plain model's: driver.check.

    The script runs as by `pippy run`. In place of its first driver.run that trains, the step is done on the workers and by
    the plain model in this process: loss, outputs, gradients, buffers, and parameters after an update. What differs is
    printed, and where it begins; then the script ends as by sys.exit.

    The exit status is 0 if the numbers are the same, and 1 if they are not, or if there was no such step.

    \b
    Examples:
      pippy check train.py -n 2
      pippy check train.py -n 4 -- --batch-size 16
    """
    with _checking_first_step() as reports:
        status = run_script(script, args, workers, threads, pin, device, module)
    if not reports and not status:
        raise click.ClickException(f"{script} ran no step that trains, so there is nothing to compare")
    raise click.exceptions.Exit(status)


@contextmanager
def _checking_first_step() -> Iterator[list["CheckReport"]]:
    """Inside, the first training step of any driver is checked, and ends the script. Gives what was found."""
    from pippy.drivers.driver.driver_base import PipelineDriverBase
    from pippy.drivers.driver.steps.asked_outputs import asked_outputs

    run_async, reports = PipelineDriverBase.run_async, []

    def checked(self: PipelineDriverBase, chunks: int | None, *args: Any, outputs: Any = None, **kwargs: Any) -> Any:
        if not self.trains:
            return run_async(self, chunks, *args, outputs=outputs, **kwargs)
        _, kwargs = asked_outputs(self.compiled_pipe, outputs, args, kwargs)
        reports.append(self.check(*(() if chunks is None else (chunks,)), *args, **kwargs))
        click.echo(str(reports[0]))
        raise SystemExit(0 if reports[0] else 1)

    PipelineDriverBase.run_async = checked  # type: ignore[method-assign]
    try:
        yield reports
    finally:
        PipelineDriverBase.run_async = run_async  # type: ignore[method-assign]
