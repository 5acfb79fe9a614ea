"""Times, sizes and shares as text, each with a unit that suits it."""


def duration(seconds: float) -> str:
    """A time with its unit.

    >>> duration(0.0000034), duration(0.00123), duration(2.5), duration(0)
    ('3.4 µs', '1.23 ms', '2.5 s', '0 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size or not seconds:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds * 1e6)} µs"


def size(number: float) -> str:
    """A number of bytes with its unit.

    >>> size(0), size(1000), size(1536), size(3 << 20)
    ('0 B', '1000 B', '1.5 KiB', '3 MiB')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = next((each for each in range(len(units)) if number < 1024 ** (each + 1)), len(units) - 1)
    return f"{_three(number / 1024**power)} {units[power]}"


def percent(share: float) -> str:
    """A share of a whole, in percent.

    >>> percent(0.124), percent(0.0004)
    ('12 %', '0.04 %')
    """
    return f"{100 * share:.0f} %" if share >= 0.01 or not share else f"{100 * share:.1g} %"


def _three(number: float) -> str:
    """A number with three digits and no exponent."""
    return f"{number:.0f}" if number >= 999.5 else f"{number:.3g}"
