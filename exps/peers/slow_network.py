"""A network on which each packet takes its time: a process that holds what each host sends, then hands it to another.

    python slow_network.py PIDFD SECONDS RATE PORTS END END ...

A link from one host to another carries RATE bits in a second, or any number for 0. The network ends with the process of PIDFD.
PORTS, as 29500,40000-40999, are those to which a host may connect: a firewall drops what would open another connection. Each
END is the file descriptor of a TUN device; the first is that of host 1, whose address ends in .1.
"""

import heapq
import itertools
import os
import select
import sys
import time
from contextlib import suppress

_HEADER = 10  # bytes before each packet, that say how the kernel is to cut and sum it; they are handed on
_PROTOCOL, _TO = _HEADER + 9, _HEADER + 19  # of an IPv4 packet; TO is the last byte of the address that it is for
_TCP, _SYN, _SYN_OR_ACK = 6, 0x02, 0x12
LARGEST = 1 << 17


def carry(pidfd: int, delay: float, rate: float, ports: list[range], ends: list[int]) -> None:
    """Carry packets until this process is killed, or that of ``pidfd`` ends."""
    waiting: list[
        tuple[float, int, int, bytes]
    ] = []  # when each is due, and its number: those of a link keep their order
    free_at: dict[tuple[int, int], float] = {}  # of each link
    numbers = itertools.count()
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, end, packet = heapq.heappop(waiting)
            with suppress(OSError):  # its host is cut off
                os.write(end, packet)
        until = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select([pidfd, *ends], [], [], until)[0]:
            if end == pidfd:
                return
            with suppress(OSError):
                packet = os.read(end, LARGEST)
                if packet[_HEADER] >> 4 == 4 and 0 < packet[_TO] <= len(ends) and passes(packet, ports):
                    link = end, ends[packet[_TO] - 1]
                    takes = 8 * (len(packet) - _HEADER) / rate if rate else 0.0
                    free_at[link] = max(time.monotonic(), free_at.get(link, 0.0)) + takes
                    heapq.heappush(waiting, (free_at[link] + delay, next(numbers), link[1], packet))


def passes(packet: bytes, ports: list[range]) -> bool:
    """Whether the firewall lets a packet through: one that opens no connection, or one to a port that is open."""
    tcp = _HEADER + 4 * (packet[_HEADER] & 15)
    if packet[_PROTOCOL] != _TCP or packet[tcp + 13] & _SYN_OR_ACK != _SYN:
        return True
    port = int.from_bytes(packet[tcp + 2 : tcp + 4], "big")
    return any(port in each for each in ports)


def ranges(text: str) -> list[range]:
    """The ports of a text.

    >>> ranges("29500,40000-40999")
    [range(29500, 29501), range(40000, 41000)]
    """
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.append(range(int(first), int(last or first) + 1))
    return found


if __name__ == "__main__":
    numbers = float(sys.argv[2]), float(sys.argv[3])
    carry(int(sys.argv[1]), *numbers, ranges(sys.argv[4]), [int(end) for end in sys.argv[5:]])
