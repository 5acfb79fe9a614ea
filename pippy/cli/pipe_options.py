"""The options of commands that make a Pipe of a model: its arguments, its cuts, its loss."""

from collections.abc import Callable
from typing import Any

import click

_OPTIONS = (
    click.option("--arg", "arguments", multiple=True, metavar="NAME=VALUE", help="An argument of the class or function."),
    click.option(
        "--split", multiple=True, metavar="MODULE", help="Begin a stage at this module; or MODULE:end, behind it."
    ),
    click.option("--num-stages", type=click.IntRange(1), help="Cut into so many stages, of parameters alike."),
    click.option("--sequential", is_flag=True, help="Make each child of an nn.Sequential a stage."),
    click.option("--loss", metavar="MODULE:NAME", help="The loss: a function or module of (output, target)."),
    click.option(
        "--shared", type=click.Choice(["transmit", "replicate"]), help="Parameters that several stages use."
    ),
)  # fmt: skip


def pipe_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these options, in this order."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
