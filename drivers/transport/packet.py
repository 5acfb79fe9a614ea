"""The packets that the two ends of a connection send to each other, and the header of a packet.

    bytes  field     VALUE: a value      LAYOUT: of later      RING: new shared     FREED: what is     ASK: send
                                         values                memory               free again         FREED
    -----  --------  ------------------  --------------------  -------------------  -----------------  ---------
    0      kind      0                   1                     2                    3                  4
    1      asks      1: send FREED       1: send FREED         -                    -                  1
    2      layout    its layout          the number it gets    -                    -                  -
    4      rest      bytes that are      bytes that are        -                    -                  -
                     no tensor's         pickled
    8      step      \
    16     value      > its key          -                     -                    -                  -
    24     microbatch/
    32     size      all of its bytes    all of its bytes      bytes of the ring    -                  -
    40     end       where they end      where they end        -                    up to here         up to here
                     in the ring         in the ring
    48     ring      -                   -                     its number           of which ring      -

A field that a kind does not use is 0. Positions in a ring only grow (see ring.py). The bytes of a value or a layout follow
the header in the packet itself, at ``START``, if they are at most ``INLINE``; ``end`` is 0 then. The file descriptor of a
new ring travels beside its packet.
"""

from struct import Struct

VALUE, LAYOUT, RING, FREED, ASK = range(5)
HEADER = Struct("<BBHIqqqqqq")
NO_KEY = (0, 0, 0)
START = 64  # the header is shorter, and tensors are aligned
INLINE = 4096  # up to this size, a packet with the bytes inside is faster than a place in the ring


def write_header(
    packet: memoryview,
    kind: int,
    asks: int = 0,
    layout: int = 0,
    rest: int = 0,
    key: tuple[int, int, int] = NO_KEY,
    size: int = 0,
    end: int = 0,
    ring: int = 0,
) -> None:
    """Write the header of a packet.

    >>> packet = memoryview(bytearray(START))
    >>> write_header(packet, VALUE, layout=7, key=(1, 2, 3), size=8)
    >>> HEADER.unpack_from(packet)
    (0, 0, 7, 0, 1, 2, 3, 8, 0, 0)
    """
    HEADER.pack_into(packet, 0, kind, asks, layout, rest, *key, size, end, ring)
