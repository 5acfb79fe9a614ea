"""Advice for a name that does not exist: the known names that are like it. Every layer can use this, as it needs no torch."""

from collections.abc import Iterable
from difflib import get_close_matches


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
