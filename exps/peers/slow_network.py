"""A network on which each packet takes its time: a process that holds what each host sends, then hands it to another.

    python slow_network.py SECONDS END END ...

Each END is the file descriptor of a TUN device; the first is that of host 1, whose address ends in .1.
"""

import os
import select
import sys
import time
from collections import deque
from contextlib import suppress

_HEADER = 10  # bytes before each packet, that say how the kernel is to cut and sum it; they are handed on
_LAST_BYTE = _HEADER + 19  # of the address that an IPv4 packet is for
LARGEST = 1 << 17


def carry(delay: float, ends: list[int]) -> None:
    """Carry packets until this process is killed."""
    waiting: deque[tuple[float, int, bytes]] = deque()  # all wait equally long, so the first is due first
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, end, packet = waiting.popleft()
            with suppress(OSError):  # its host is cut off
                os.write(end, packet)
        for end in select.select(ends, [], [], max(0.0, waiting[0][0] - time.monotonic()) if waiting else None)[0]:
            with suppress(OSError):
                packet = os.read(end, LARGEST)
                if packet[_HEADER] >> 4 == 4 and 0 < packet[_LAST_BYTE] <= len(ends):
                    waiting.append((time.monotonic() + delay, ends[packet[_LAST_BYTE] - 1], packet))


if __name__ == "__main__":
    carry(float(sys.argv[1]), [int(end) for end in sys.argv[2:]])
