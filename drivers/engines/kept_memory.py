"""Has this process keep the memory that it frees: for processes that pippy did not start, whose environment is not its own."""

import ctypes

# glibc's numbers for mallopt, and what local workers get in their environment. No memory of its own for any large block.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_SETTINGS = {_ARENA_MAX: 1, _TRIM_THRESHOLD: (1 << 31) - 1, _TOP_PAD: 64 << 20, _MMAP_MAX: 0}


def keep_freed_memory() -> None:
    """Take memory from the system in large pieces, and give none back. Does nothing where the C library is another one.

    Fresh memory takes a page fault for every 4 KiB, and a training step frees and takes gigabytes.

    >>> keep_freed_memory()
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for setting, value in _SETTINGS.items():
            mallopt(setting, value)
