"""Tables in text."""

from collections.abc import Collection, Iterator, Sequence


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
