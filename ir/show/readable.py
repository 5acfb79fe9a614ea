"""Numbers and long texts as people read them."""


def bytes_text(count: int) -> str:
    """Bytes in the largest binary unit that leaves at least one.

    >>> bytes_text(512), bytes_text(1536), bytes_text(3 * 2**30)
    ('512 B', '1.5 KiB', '3.0 GiB')
    """
    value, units = float(count), ["KiB", "MiB", "GiB", "TiB", "PiB"]
    if count < 1024:
        return f"{count} B"
    while value >= 1024 and units:
        value, unit = value / 1024, units.pop(0)
    return f"{value:.1f} {unit}"


def count_text(count: int) -> str:
    """A count in the largest decimal unit that leaves at least one.

    >>> count_text(512), count_text(2_048), count_text(6_700_000)
    ('512', '2.0 k', '6.7 M')
    """
    value, units = float(count), ["k", "M", "G", "T", "P"]
    if count < 1000:
        return str(count)
    while value >= 1000 and units:
        value, unit = value / 1000, units.pop(0)
    return f"{value:.1f} {unit}"


def shortened(text: str, length: int) -> str:
    """A text of at most ``length`` characters.

    >>> shortened("a_rather_long_name", 10)
    'a_rather_…'
    """
    return text if len(text) <= length else text[: length - 1] + "…"
