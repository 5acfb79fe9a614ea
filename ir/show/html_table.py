"""Tables in HTML, for notebooks. They take the colours of the page."""

from collections.abc import Collection, Sequence
from html import escape

_RULE = "1px solid rgba(128, 128, 128, 0.5)"


def html_table(rows: Sequence[Sequence[str]], *, words: Collection[int] = (0, -1), total: bool = False) -> str:
    """A table whose first row is its head; with ``total``, the last row has a line above it.

    ``words`` are the columns that are aligned on the left, counted from the end if negative; the others hold numbers.

    >>> html_table([["name", "size", "at"], ["a", "1", "b"]]).count("<td")
    3
    """
    head, *middle = rows
    left = {column % len(head) for column in words}
    made = [_row(head, "th", left, bottom=_RULE)]
    made += [_row(row, "td", left, top=_RULE if total and row is rows[-1] else "none") for row in middle]
    return f'<table style="border-collapse: collapse; margin-top: 8px">{"".join(made)}</table>'


def _row(cells: Sequence[str], tag: str, left: Collection[int], bottom: str = "none", top: str = "none") -> str:
    made = [_cell(cell, tag, "left" if index in left else "right") for index, cell in enumerate(cells)]
    return f'<tr style="border-bottom: {bottom}; border-top: {top}">{"".join(made)}</tr>'


def _cell(text: str, tag: str, align: str) -> str:
    """
    >>> _cell("a<b", "td", "left")
    '<td style="text-align: left; padding: 2px 10px">a&lt;b</td>'
    """
    return f'<{tag} style="text-align: {align}; padding: 2px 10px">{escape(text)}</{tag}>'
