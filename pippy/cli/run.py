"""Commands that run a script, or work for one.

`pippy run` runs a script as Python does, with a cluster that starts when the script asks for it. `pippy check` compares its
first step with the plain model's. `pippy worker` joins the cluster of a script from elsewhere.
"""

import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pippy.cli.problems import INTERRUPTED, hint_at, own_trace, put_first_in_path, with_options
from pippy.ir.base.errors import PippyError, in_brief

if TYPE_CHECKING:
    from pippy.drivers.driver.check.report import CheckReport


_UNDER_TORCHRUN = (
    "this process was started by torchrun (RANK and WORLD_SIZE are set), which starts the workers itself; give torchrun the "
    "script: torchrun --nproc-per-node 2 {script}. If it was not, unset RANK and WORLD_SIZE"
)


class ScriptCommand(click.Command):
    """A command that runs a script. If it gets an option of the script, it says where such options go."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, with a better error for an unknown option."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise click.UsageError(
                f"{ctx.command_path} has no option {error.option_name!r}; an option of the script goes behind --, as in: "
                f"{ctx.command_path} train.py -n 2 -- {error.option_name}",
                ctx,
            ) from None


_NOT_ASKED = (
    "Note: the {workers} workers of -n were not started: {script} opened a cluster of its own by local_cluster(n); in the "
    "script, cluster() gives those of -n"
)


def script_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The arguments of a command that runs a script."""
    threads = "How many threads each computes with.  [the cores, divided]"
    return with_options(
        function,
        click.argument("script"),
        click.argument("args", nargs=-1, type=click.UNPROCESSED),
        click.option(
            "-n",
            "--workers",
            type=click.IntRange(1),
            envvar="PIPPY_WORKERS",
            required=True,
            show_envvar=True,
            help="How many workers.",
        ),
        click.option("--threads", type=click.IntRange(1), help=threads),
        click.option("--pin", is_flag=True, help="Give each worker one core to itself."),
        click.option("--device", help="The device of all workers.  [cpu]"),
        click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as for python -m."),
    )


@click.command(cls=ScriptCommand, no_args_is_help=True, short_help="Run a script with workers on this host.")
@script_options
def run(**given: Any) -> None:
    """Run SCRIPT with a cluster of workers on this host.

    In the script, cluster() gives this cluster, and a driver uses it if it is given no cluster. It starts when the script
    first asks for it, and ends with the script. If the script names another number, as in cluster(2), that is an error;
    local_cluster(2) opens a cluster of the script's own, and leaves -n unused.

    ARGS go to the script; write its options after --.

    The exit status is the script's: 1 if it raises, what it gives to sys.exit, 130 after Ctrl-C.

    \b
    Examples:
      pippy run train.py -n 4
      pippy run train.py -n 2 --threads 1 --pin -- --epochs 3 --lr 0.1
      PIPPY_WORKERS=4 pippy run -m project.train
    """
    raise click.exceptions.Exit(run_script(**given))


def run_script(script: str, args: Sequence[str], workers: int, module: bool, **options: Any) -> int:
    """Run a script with a cluster that stands by, with these options. Gives the exit status of the script."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise click.ClickException(_UNDER_TORCHRUN.format(script=script))
    with as_python(script, args, module):
        _check_exists(script, module)
        return _run(script, module, workers, options)


def _check_exists(script: str, module: bool) -> None:
    if not module and not Path(script).exists():
        near = [each.name for each in Path(script).resolve().parent.glob("*.py")]
        raise click.ClickException(f"there is no script {script!r}; {hint_at(Path(script).name, near)}")
    if module:
        with suppress(ModuleNotFoundError, ValueError):
            if importlib.util.find_spec(script) is not None:
                return
        raise click.ClickException(f"there is no module {script!r}; -m takes a name as in import: package.module")


def _run(script: str, module: bool, workers: int, options: dict[str, Any]) -> int:
    from pippy.drivers.engines.cluster import lazy_cluster
    from pippy.drivers.engines.local.local_cluster import local_cluster

    with lazy_cluster(workers, local_cluster, **options) as lazy:
        try:
            if module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(Path(script).absolute()), run_name="__main__")
        except SystemExit as end:
            return _status(end.code)
        except BaseException as error:
            show_raised(error)
            return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        if lazy.started is None and lazy.is_passed_over:
            click.echo(_NOT_ASKED.format(workers=workers, script=script), err=True)
    return 0


@contextmanager
def as_python(script: str, args: Sequence[str], module: bool) -> Iterator[None]:
    """Inside, ``sys.argv`` and ``sys.path`` are as Python sets them for a script."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [script, *args]
    if not sys.flags.safe_path:
        sys.path[:1] = []  # the folder of `pippy` itself
    put_first_in_path(str(Path.cwd() if module else Path(script).resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _status(code: Any) -> int:
    """The exit status, as Python computes it from what `sys.exit` was given."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    click.echo(code, err=True)
    return 1


def show_raised(error: BaseException) -> None:
    """Print a traceback as Python does, from the script's first frame on; of a pippy error, in brief."""
    error.__traceback__ = own_trace(error.__traceback__, whole=True)
    sys.stdout.flush()
    with in_brief(error) if isinstance(error, PippyError) else nullcontext():
        sys.excepthook(type(error), error, error.__traceback__)


# `pippy check`: runs a training script up to its first step, and compares that step with the plain model's.


@click.command(cls=ScriptCommand, no_args_is_help=True, short_help="Compare a script's first step with plain PyTorch.")
@script_options
def check(**given: Any) -> None:
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
        status = run_script(**given)
    if not reports and not status:
        raise click.ClickException(f"{given['script']} ran no step that trains, so there is nothing to compare")
    raise click.exceptions.Exit(status)


@contextmanager
def _checking_first_step() -> Iterator[list["CheckReport"]]:
    """Inside, the first training step of any driver is checked, and ends the script. Gives what was found."""
    from pippy.drivers.driver.driver_base import PipelineDriverBase
    from pippy.drivers.driver.steps.results import asked_outputs

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


# `pippy worker`: a worker that joins the cluster of a script.


@click.command(no_args_is_help=True, short_help="Join the cluster of a script as a worker.")
@click.option("--join", required=True, metavar="HOST:PORT", help="Where the cluster listens: its script prints that.")
@click.option("--secret-file", default="~/.pippy/secret", show_default=True, help="The file with the cluster's secret.")
@click.option("--device", default="cpu", show_default=True, help="The device that the worker computes on.")
@click.option("--threads", type=click.IntRange(1), help="How many threads it computes with.  [the cores, divided]")
@click.option(
    "--within", type=float, default=60.0, show_default=True, help="How many seconds it tries to reach the cluster."
)
def worker(join: str, secret_file: str, device: str, threads: int | None, within: float) -> None:
    """Join the cluster of a script as a worker, from any shell of any host.

    A script with cluster(4, join=True) prints the line to type, and waits until four workers have joined. Those that join
    later wait, and take the places of workers that are lost. Start it in the folder of the script, which is where it finds
    the script's modules. What stages print appears here.

    The exit status is 0 when the cluster was closed, 1 if this worker was refused or lost the cluster, 130 after Ctrl-C.

    \b
    Examples:
      pippy worker --join 10.0.0.1:29400
      pippy worker --join node1:29400 --secret-file ~/job/secret --device cuda:1
    """
    put_first_in_path(str(Path.cwd()))
    from pippy.drivers.engines.joined.joined_worker import join_cluster

    join_cluster(join, secret_file, device, threads, within)
