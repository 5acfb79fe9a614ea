"""Values, numbers, bytes, times, long texts, names and tables as people read them.

Nothing here needs torch, so every layer can use it. In notebooks, tables take the colours of the page.
"""

import reprlib
from collections.abc import Collection, Iterable, Iterator, Sequence, Sized
from difflib import get_close_matches
from html import escape
from typing import Any


def bytes_text(count: int) -> str:
    """Bytes in the largest binary unit that leaves at least one.

    >>> bytes_text(512), bytes_text(1536), bytes_text(3 * 2**30)
    ('512 B', '1.5 KiB', '3.0 GiB')
    """
    return f"{count} B" if count < 1024 else _in_units(count, 1024, ("KiB", "MiB", "GiB", "TiB", "PiB"))


def count_text(count: int) -> str:
    """A count in the largest decimal unit that leaves at least one.

    >>> count_text(512), count_text(2_048), count_text(6_700_000)
    ('512', '2.0 k', '6.7 M')
    """
    return str(count) if count < 1000 else _in_units(count, 1000, ("k", "M", "G", "T", "P"))


def _in_units(count: int, base: int, units: Sequence[str]) -> str:
    power = next((power for power in range(1, len(units)) if count < base ** (power + 1)), len(units))
    return f"{count / base**power:.1f} {units[power - 1]}"


def duration(seconds: float) -> str:
    """A time with the unit that suits it.

    >>> duration(0.0000034), duration(0.00123), duration(2.5), duration(0)
    ('3.4 µs', '1.23 ms', '2.5 s', '0 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size or not seconds:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds * 1e6)} µs"


def percent(share: float) -> str:
    """A share of a whole, in percent.

    >>> percent(0.124), percent(0.0004)
    ('12 %', '0.04 %')
    """
    return f"{100 * share:.0f} %" if share >= 0.01 or not share else f"{100 * share:.1g} %"


def _three(number: float) -> str:
    """A number with three digits and no exponent."""
    return f"{number:.0f}" if number >= 999.5 else f"{number:.3g}"


def count_with_noun(number: int, noun: str) -> str:
    """
    >>> count_with_noun(1, "micro-batch"), count_with_noun(4, "micro-batch"), count_with_noun(2, "step")
    ('1 micro-batch', '4 micro-batches', '2 steps')
    """
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


def listed(texts: Sequence[str], word: str = "and") -> str:
    """
    >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"], "or")
    ('a', 'a and b', 'a, b or c')
    """
    return ", ".join(texts[:-1]) + f" {word} " * (len(texts) > 1) + texts[-1]


def first_listed(texts: Iterable[str], most: int) -> str:
    """The first ``most`` of some texts, and the number of the others.

    >>> first_listed(["a", "b", "c", "d"], 2), first_listed(["a", "b"], 2)
    ('a, b and 2 more', 'a, b')
    """
    every = list(texts)
    return ", ".join(every) if len(every) <= most else listed([*every[:most], f"{len(every) - most} more"])


def shortened(text: str, length: int) -> str:
    """A text of at most ``length`` characters.

    >>> shortened("a_rather_long_name", 10)
    'a_rather_…'
    """
    return text if len(text) <= length else text[: length - 1] + "…"


_MOST = 200  # characters

_cut = reprlib.Repr()
_cut.maxstring = _cut.maxother = _MOST // 2


def some(texts: Iterable[Any], most: int = 10) -> list[str]:
    """The first ``most`` of some texts, shortened, and the number of the others.

    >>> some("abcde", most=2), some("ab", most=2)
    (['a', 'b', 'and 3 more'], ['a', 'b'])
    """
    every = [str(text) for text in texts]
    more = [f"and {len(every) - most:,} more"] if len(every) > most else []
    return [text if len(text) <= _MOST else f"{text[: _MOST - 3]}..." for text in every[:most]] + more


def brief(value: Any) -> str:
    """The ``repr`` of a value, in one line of at most 200 characters.

    >>> brief("one")
    "'one'"
    >>> brief(list(range(100_000)))
    '[0, 1, 2, 3, 4, 5, ...]'
    >>> brief("a" * 1000)
    "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'"
    """
    try:
        text = _cut.repr(value) if isinstance(value, Sized) and len(value) > _MOST // 2 else repr(value)
    except Exception:  # a number of more than 4300 digits has none, and a class of the user's may have a fault
        return object.__repr__(value)[:_MOST]
    if "\n" in text:
        text = " ".join(text.split())
    if len(text) <= _MOST:
        return text
    text = " ".join(_cut.repr(value).split())
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."


def near_names(name: object, known: Iterable[str], *, most: int = 3, cutoff: float = 0.4) -> list[str]:
    """The known names that are like ``name``, the nearest first. ``cutoff`` is the least likeness; 1 is that of equal names.

    >>> near_names("lin.wieght", ["lin.weight", "lin.bias", "norm"])
    ['lin.weight', 'lin.bias']
    """
    return get_close_matches(str(name), list(known), n=most, cutoff=cutoff)


def did_you_mean(name: object, known: Iterable[str], *, most: int = 3, cutoff: float = 0.4) -> str:
    """A question for the end of an error text; empty where no known name is like ``name``.

    >>> did_you_mean("Modle", ["Model", "Net"])
    "did you mean 'Model'?"
    >>> did_you_mean("xyz", ["Model", "Net"])
    ''
    """
    near = near_names(name, known, most=most, cutoff=cutoff)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


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
