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
        self.head = self.tail = self.asked = self._looked = 0
        self.peak = 0  # the most bytes that were in use at a time since this was last set to 0

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

    def should_look(self) -> bool:
        """Whether to look what is free again: once in an eighth of the ring, while half of it seems to be in use."""
        if self.head - self._looked < self.size // 8:
            return False
        self._looked = self.head
        return True

    def free(self, until: int) -> None:
        """All places that end at this position or before are free."""
        self.tail = max(self.tail, until)

    def should_ask(self) -> bool:
        """Whether to ask the receiver how far it is: once in a quarter of the ring, so that answers are rare."""
        return self.head - self.asked >= self.size // 4


class RingReview:
    """Says when a ring is too large: if for ``patience`` steps no more than half of it was in use.

    A ring that grows again soon after it has shrunk is one that is needed now and then: it is left alone for longer.

    >>> review, ring = RingReview(patience=2), Ring(4 * MINIMUM)
    >>> [review.halves(step, ring) for step in (0, 0, 1, 2, 3)]
    [False, False, False, True, False]
    """

    def __init__(self, patience: int = 32) -> None:
        self.patience, self.step, self._steps, self._shrank = patience, -1, 0, False

    def halves(self, step: int, ring: Ring) -> bool:
        """Whether to replace the ring by one of half its size, before the first value of a new step."""
        if step == self.step:
            return False
        self.step = step
        self._steps += 1
        if self._steps <= self.patience:
            return False
        self._shrank = ring.size > MINIMUM and 2 * ring.peak <= ring.size
        self._steps = ring.peak = 0
        return self._shrank

    def grew(self) -> None:
        """The ring was replaced by a larger one."""
        if self._shrank:
            self.patience = min(2 * self.patience, 1 << 16)
        self._steps, self._shrank = 0, False


def ring_size(value: int, before: int, limit: int) -> int:
    """How large a new ring should be, for a value that did not fit into one of ``before`` bytes.

    >>> ring_size(100, 0, 1 << 24) == MINIMUM, ring_size(3 << 20, MINIMUM, 1 << 24) >> 20, ring_size(9, 1 << 24, 1 << 24) >> 20
    (True, 4, 16)
    """
    wanted = max(MINIMUM, 1 << (value - 1).bit_length(), min(2 * before, limit))
    return max(value, min(wanted, limit))
