"""What a user may have meant by a name that does not exist. Without torch, so that every layer can use it."""

from collections.abc import Iterable
from difflib import get_close_matches


def near_names(name: object, known: Iterable[str], *, most: int = 3, cutoff: float = 0.4) -> list[str]:
    """The known names that are like ``name``, the nearest first. ``cutoff`` says how like: 1 for the same name.

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
