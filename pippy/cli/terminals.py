"""Terminals whose encoding has no lines and arrows, as latin-1: they show the nearest letters that they have."""

import codecs
from io import TextIOWrapper
from typing import TextIO

_NEAREST = str.maketrans(
    dict(zip("─│┌┐└┘├┬╌╎▶▼◆●", "-|++++++-|>v*o", strict=True)) | {"…": "...", "→": "->", "≥": ">="}
)


def nearest(error: UnicodeError) -> tuple[str, int]:
    """What to write in place of characters that cannot be written: an error handler of `codecs`.

    >>> "0 ─▶ 1 …".encode("latin-1", "pippy.nearest")
    b'0 -> 1 ...'
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_NEAREST)
    return "".join(each if each.isascii() else "?" for each in text), error.end


codecs.register_error("pippy.nearest", nearest)


def write_nearest(*streams: TextIO) -> None:
    """Have streams write the nearest letters where they would raise a UnicodeEncodeError."""
    for stream in streams:
        if isinstance(stream, TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="pippy.nearest")
