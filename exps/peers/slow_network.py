"""A network on which each packet takes its time: a process that holds what each host sends, then hands it to another.

    python slow_network.py PIDFD SECONDS PORTS END END ...

It ends with the process of PIDFD. PORTS, as 29500,40000-40999, are those to which a host may connect: a firewall drops what
would open another connection. Each END is the file descriptor of a TUN device; the first is that of host 1, whose address
ends in .1.
"""

import os
import select
import sys
import time
from collections import deque
from contextlib import suppress

_HEADER = 10  # bytes before each packet, that say how the kernel is to cut and sum it; they are handed on
_PROTOCOL, _TO = _HEADER + 9, _HEADER + 19  # of an IPv4 packet; TO is the last byte of the address that it is for
_TCP, _SYN, _SYN_OR_ACK = 6, 0x02, 0x12
LARGEST = 1 << 17


def carry(pidfd: int, delay: float, ports: list[range], ends: list[int]) -> None:
    """Carry packets until this process is killed, or that of ``pidfd`` ends."""
    waiting: deque[tuple[float, int, bytes]] = deque()  # all wait equally long, so the first is due first
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, end, packet = waiting.popleft()
            with suppress(OSError):  # its host is cut off
                os.write(end, packet)
        until = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select([pidfd, *ends], [], [], until)[0]:
            if end == pidfd:
                return
            with suppress(OSError):
                packet = os.read(end, LARGEST)
                if packet[_HEADER] >> 4 == 4 and 0 < packet[_TO] <= len(ends) and passes(packet, ports):
                    waiting.append((time.monotonic() + delay, ends[packet[_TO] - 1], packet))


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
    carry(int(sys.argv[1]), float(sys.argv[2]), ranges(sys.argv[3]), [int(end) for end in sys.argv[4:]])
