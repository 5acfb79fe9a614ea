"""The stages of a Pipe as a table of their figures: its cells, and the cells as text."""

from collections.abc import Sequence

from pippy.ir.base.readable import bytes_text, count_text, shortened
from pippy.ir.show.content import Content, ForwardFigures, StageFigures, notes
from pippy.ir.show.shapes import add_amounts
from pippy.ir.show.tables import text_table

_ALWAYS = ("stage", "parameters", "bytes", "buffers")
_WITH_SHAPES = ("receives", "sends", "FLOPs")
_HOLDS = 48


def stages_table(content: Content) -> str:
    """The table as text, with its notes below."""
    head, *rows, total = table_cells(content)
    once = ["the total counts replicated parameters once"] if any(content.repeated) else []
    return "\n".join([text_table(head, rows, total=total, words=(0, len(head) - 1)), *once, *notes(content)])


def table_cells(content: Content) -> list[list[str]]:
    """A head, a row for each stage, and the totals. The first and the last column are words, the others numbers."""
    heads = [*_ALWAYS, *(_WITH_SHAPES if content.shapes else ()), "holds"]
    rows = list(content.stages.values())
    return [heads, *map(_cells, rows), _cells(_total(rows, *content.repeated))]


def _cells(row: StageFigures) -> list[str]:
    """
    >>> _cells(StageFigures("submod_0", ("embed", "norm"), 15, 60, 0))
    ['submod_0', '15', '60 B', '0 B', 'embed, norm']
    """
    cells = [row.name, f"{row.parameters:,}", bytes_text(row.parameter_bytes), bytes_text(row.buffer_bytes)]
    if row.forward is not None:
        cells += [row.forward.receives.text(bytes_text), row.forward.sends.text(bytes_text)]
        cells.append(row.forward.flops.text(count_text))
    return [*cells, shortened(", ".join(row.holds), _HOLDS)]


def _total(rows: Sequence[StageFigures], repeated: int, repeated_bytes: int) -> StageFigures:
    parameters, parameter_bytes = sum(row.parameters for row in rows), sum(row.parameter_bytes for row in rows)
    sizes = parameters - repeated, parameter_bytes - repeated_bytes, sum(row.buffer_bytes for row in rows)
    forwards = [row.forward for row in rows if row.forward is not None]
    if not forwards:
        return StageFigures("total", (), *sizes)
    amounts = (add_amounts(getattr(each, name) for each in forwards) for name in ("receives", "sends", "flops"))
    return StageFigures("total", (), *sizes, ForwardFigures(*amounts))
