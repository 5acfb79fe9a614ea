"""Where in a ring of shared memory the next bytes go, and what of it is free again. Only the sender keeps this."""

MINIMUM = 1 << 20


class Ring:
    """Places in ``size`` bytes, allocated in order and freed in order.

    Positions only grow; a position modulo the size is an offset. A place never goes around the end; what is left there is
    skipped.

    >>> ring = Ring(100)
    >>> ring.allocate(60), ring.allocate(60)
    (0, None)
    >>> ring.free(60)
    >>> ring.allocate(60), ring.head
    (0, 160)
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.head = self.tail = self.asked = 0

    def allocate(self, size: int) -> int | None:
        """The offset of free space; None if there is not enough now. The place ends at ``head``, as a position."""
        head = self.head
        offset = head % self.size
        if offset + size > self.size:
            head, offset = head + self.size - offset, 0
        if self.tail == self.head:
            self.tail = head  # nothing is in use, so what is skipped at the end is free as well
        if head + size - self.tail > self.size:
            return None
        self.head = head + size
        return offset

    def free(self, until: int) -> None:
        """All places that end at this position or before are free."""
        self.tail = max(self.tail, until)

    def should_ask(self) -> bool:
        """Whether to ask the receiver how far it is: once in a quarter of the ring, so that answers are rare."""
        return self.head - self.asked >= self.size // 4


def ring_size(value: int, before: int, limit: int) -> int:
    """How large a new ring should be, for a value that did not fit into one of ``before`` bytes.

    >>> ring_size(100, 0, 1 << 24) == MINIMUM, ring_size(3 << 20, MINIMUM, 1 << 24) >> 20, ring_size(9, 1 << 24, 1 << 24) >> 20
    (True, 4, 16)
    """
    wanted = max(MINIMUM, 1 << (value - 1).bit_length(), min(2 * before, limit))
    return max(value, min(wanted, limit))
