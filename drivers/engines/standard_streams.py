"""Standard input, output and error of a process that was started without them, as by ``>&-`` or a daemon."""

import os


def open_standard_streams() -> None:
    """Open the null device where one of these is closed: a socket would get its number, and what a library prints.

    >>> open_standard_streams()
    """
    while True:
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor > 2:
            os.close(descriptor)
            return
        os.set_inheritable(descriptor, True)
