"""A value as Python writes it, in one line, for messages that say what was given."""

import reprlib
from typing import Any

_MOST = 200  # characters

_cut = reprlib.Repr()
_cut.maxstring = _cut.maxother = _MOST // 2


def brief(value: Any) -> str:
    """The ``repr`` of a value, in one line of at most 200 characters.

    >>> brief("one")
    "'one'"
    >>> brief(list(range(100_000)))
    '[0, 1, 2, 3, 4, 5, ...]'
    >>> brief("a" * 1000)
    "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'"
    """
    text = repr(value)
    if "\n" in text:
        text = " ".join(text.split())
    if len(text) <= _MOST:
        return text
    text = " ".join(_cut.repr(value).split())
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."
