"""Whether a stream shows bars and lines that change, by the conventions of tqdm."""

import os
from typing import TextIO


def is_muted() -> bool:
    """Whether the user wants no progress at all: TQDM_DISABLE is set."""
    return bool(os.environ.get("TQDM_DISABLE"))


def redraws(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal that can write a line anew.

    >>> redraws(None)
    False
    """
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
