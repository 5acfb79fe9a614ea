"""A Pipe as HTML, for notebooks: the drawing and the table of stages.

The drawing has a light background of its own; the table takes the colours of the page. So both are readable in any theme.
"""

from collections.abc import Sequence
from html import escape

from pippy.ir.show.content import Content
from pippy.ir.show.stages_table import table_cells
from pippy.ir.show.svg import svg

_RULE = "1px solid rgba(128, 128, 128, 0.5)"


def html(content: Content) -> str:
    """The HTML. A drawing or table that is wider than the page has a scroll bar of its own."""
    head, *stages, total = table_cells(content)
    rows = [_row(head, "th", _RULE), *(_row(row, "td") for row in stages), _row(total, "td", top=_RULE)]
    table = f'<table style="border-collapse: collapse; margin-top: 8px">{"".join(rows)}</table>'
    return f'<div style="overflow-x: auto">{svg(content)}{table}</div>'


def _row(cells: Sequence[str], tag: str, bottom: str = "none", top: str = "none") -> str:
    """A row; its first and last cells are words, the others numbers."""
    made = [_cell(cell, tag, "left" if index in (0, len(cells) - 1) else "right") for index, cell in enumerate(cells)]
    return f'<tr style="border-bottom: {bottom}; border-top: {top}">{"".join(made)}</tr>'


def _cell(text: str, tag: str, align: str) -> str:
    """
    >>> _cell("a<b", "td", "left")
    '<td style="text-align: left; padding: 2px 10px">a&lt;b</td>'
    """
    return f'<{tag} style="text-align: {align}; padding: 2px 10px">{escape(text)}</{tag}>'
