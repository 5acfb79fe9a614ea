"""What ``compile=`` makes of the stages of a model, for `pippy show --compile`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from pippy.ir.base.readable import bytes_text
from pippy.ir.show.text_table import text_table

if TYPE_CHECKING:
    from pippy.ir.pipe import Pipe

_HEAD = ("stage", "F", "B", "I", "W", "kept by F", "without cut", "handed to W", "without cut", "")


def stages_compiled(pipe: "Pipe", args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A table of the operations in the pieces of each stage, and of what is kept between them."""
    if not args and not kwargs:
        raise click.UsageError(
            "--compile records graphs for inputs of some size; give them, as in --input 'float32[32,16]'"
        )
    from pippy.drivers.count.compiled_stages import stage_pieces

    rows = []
    for each in stage_pieces(pipe, args, kwargs):
        if each.reason is not None:
            rows.append([each.name, *[""] * 8, f"runs eagerly: it {each.reason}"])
        else:
            rows.append([each.name, *map(str, each.operations), *map(bytes_text, (*each.kept, *each.handed)), ""])
    return text_table(_HEAD, rows, words=(0, 9))
