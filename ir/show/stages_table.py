"""The stages of a Pipe as a table of their figures: its cells, and the cells as text."""

from collections.abc import Sequence

from pippy.ir.show.picture import Picture, StageRow, amount_text, notes
from pippy.ir.show.shapes import Amount
from pippy.ir.show.units import bytes_text, count_text, shortened
from pippy.ir.text_table import text_table

_ALWAYS = ("stage", "parameters", "bytes", "buffers")
_WITH_SHAPES = ("receives", "sends", "FLOPs")
_HOLDS = 48


def stages_table(picture: Picture) -> str:
    """The table as text, with its notes below."""
    head, *rows, total = table_cells(picture)
    return "\n".join([text_table(head, rows, total=total, words=(0, len(head) - 1)), *notes(picture)])


def table_cells(picture: Picture) -> list[list[str]]:
    """A head, a row for each stage, and the totals. The first and the last column are words, the others numbers."""
    heads = [*_ALWAYS, *(_WITH_SHAPES if picture.shapes else ()), "holds"]
    rows = list(picture.rows.values())
    return [heads, *(_cells(row, _held(row)) for row in rows), _cells(_total(rows), "")]


def _cells(row: StageRow, holds: str) -> list[str]:
    cells = [row.name, f"{row.parameters:,}", bytes_text(row.parameter_bytes), bytes_text(row.buffer_bytes)]
    if row.flops is not None:
        cells += [amount_text(row.receives, bytes_text), amount_text(row.sends, bytes_text)]
        cells.append(amount_text(row.flops, count_text))
    return [*cells, holds]


def _held(row: StageRow) -> str:
    """
    >>> _held(StageRow("submod_0", ("embed", "norm"), 0, 0, 0))
    'embed, norm'
    """
    return shortened(", ".join(row.holds), _HOLDS)


def _total(rows: Sequence[StageRow]) -> StageRow:
    figures = [sum(getattr(row, name) for row in rows) for name in ("parameters", "parameter_bytes", "buffer_bytes")]
    if not rows or rows[0].flops is None:
        return StageRow("total", (), *figures)
    amounts = [_sum([getattr(row, name) for row in rows]) for name in ("receives", "sends", "flops")]
    return StageRow("total", (), *figures, *amounts)


def _sum(amounts: Sequence[Amount]) -> Amount:
    return Amount(sum(amount.count for amount in amounts), all(amount.complete for amount in amounts))
