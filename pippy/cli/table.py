"""Tables in text: the first column to the left, numbers to the right."""

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """The lines of a table; the first ``words`` columns are words.

    >>> print(table(["name", "size"], [["a", "10"], ["bcdef", "9"]]))
    name    size
    ────────────
    a         10
    bcdef      9
    """
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [
        "   ".join(
            cell.ljust(width) if column < words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in (head, *rows)
    ]
    return "\n".join([lines[0], "─" * max(map(len, lines)), *lines[1:]])
