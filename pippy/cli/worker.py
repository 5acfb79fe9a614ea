"""`pippy worker`: a worker that joins the cluster of a script."""

from pathlib import Path

import click

from pippy.cli.problems import put_first_in_path


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
