"""Standard input, output and error: opened in a process that was started without them, and written out at its end."""

import os
import sys
from typing import NoReturn


def open_standard_streams() -> None:
    """Open the null device where one of these is closed, as by ``>&-`` or by a daemon.

    A socket would get its number, and what a library prints.

    >>> open_standard_streams()
    """
    while True:
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor > 2:
            os.close(descriptor)
            return
        os.set_inheritable(descriptor, True)


def exit_at_once(status: int) -> NoReturn:
    """End this process without taking Python and torch apart, which takes most of a second. What was printed is written."""
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    finally:  # also where nobody reads it
        os._exit(status)
