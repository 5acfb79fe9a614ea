"""Numbers, bytes, times, long texts and lists of names as people read them."""

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
