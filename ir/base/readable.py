"""Numbers, long texts and lists of names as people read them."""

from collections.abc import Iterable, Sequence


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
