"""Values as Python writes them, in one line, for messages that say what was given."""

import reprlib
from collections.abc import Iterable, Sized
from typing import Any

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
