"""What the stages of a model hold (`pippy show --memory`, `pippy compare --memory`), and what ``compile=`` makes of them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from pippy.ir.base.readable import bytes_text
from pippy.ir.show.tables import text_table

if TYPE_CHECKING:
    from pippy.drivers.plan.cost.held_bytes import PipeBytes
    from pippy.ir.pipe import Pipe

_HEAD = ("stage", "F", "B", "I", "W", "kept by F", "without cut", "handed to W", "without cut", "")
COLUMNS = ("parameters", "gradients", "kept", "forward", "backward")


def count_for_call(pipe: "Pipe", chunks: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "PipeBytes":
    """The bytes of the stages of a Pipe, for a call in so many micro-batches."""
    import torch

    from pippy.drivers.batch.divide_call import divide_call
    from pippy.drivers.count.pipe_bytes import count_pipe
    from pippy.ir.pipe import compiled_of

    compiled = compiled_of(pipe)
    division = divide_call(compiled, chunks, args, kwargs)
    return count_pipe(pipe, division, torch.device("cpu"), compiled.loss is not None, halves=True)


def stages_memory(pipe: "Pipe", args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A table of what each stage holds for a micro-batch: ``kept`` by each of them until its backward."""
    if not args and not kwargs:
        raise click.UsageError("--memory counts for inputs of some size; give them, as in --input 'float32[32,16]'")
    sizes = count_for_call(pipe, 1, args, kwargs)
    rows = [
        [f"submod_{number}", *(bytes_text(getattr(stage, name)) for name in COLUMNS)]
        for number, stage in enumerate(sizes.stages)
    ]
    totals = [bytes_text(sum(getattr(stage, name) for stage in sizes.stages)) for name in COLUMNS[:3]]
    return text_table(["stage", *COLUMNS], rows, total=["total", *totals, "", ""])


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
