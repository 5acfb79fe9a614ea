"""Tables in text, and in HTML for notebooks, where they take the colours of the page."""

from collections.abc import Collection, Iterator, Sequence
from html import escape

_RULE = "1px solid rgba(128, 128, 128, 0.5)"


def text_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, total: Sequence[str] = (), words: Collection[int] = (0,)
) -> str:
    """A table with a line below its head, and one above its last row if there is a ``total``.

    ``words`` are the columns that are aligned on the left; the others hold numbers.

    >>> print(text_table(["name", "size"], [["a", "10"], ["bcdef", "9"]], total=["both", "19"]))
    name    size
    ────────────
    a         10
    bcdef      9
    ────────────
    both      19
    """
    cells = [head, *rows, *([total] if total else [])]
    lines = list(aligned_lines(cells, words))
    rule = "─" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1 : 1 + len(rows)], *([rule, lines[-1]] if total else [])])


def aligned_lines(rows: Sequence[Sequence[str]], words: Collection[int] = (0,), between: str = "   ") -> Iterator[str]:
    """The rows of a table, each in a line. The columns of ``words`` are aligned on the left, the others on the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = enumerate(zip(row, widths))
        yield between.join(
            cell.ljust(width) if column in words else cell.rjust(width) for column, (cell, width) in cells
        ).rstrip()


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
