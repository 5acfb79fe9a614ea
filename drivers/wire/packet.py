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
    48     ring      0, or ALONE         0, or ALONE           its number           of which ring      -

A field that a kind does not use is 0. Positions in a ring only grow (see ring.py). The bytes of a value or a layout are

- in the packet itself, behind the header, at ``START``: at most ``INLINE`` bytes; ``end`` is 0 then;
- in the ring;
- ``ALONE``, in memory of their own, whose file descriptor travels beside the packet.

The file descriptor of a new ring travels beside its packet, too. A ring of 0 bytes has none: the last one is to be given
up. A process that has no free descriptor for what came answers REFUSED (5), with the number of the ring that it was sent
last: the sender is to make another ring, and to send its layouts again. END (6) has one end of a socket beside it, whose
other end the process with the number ``layout`` gets.
"""

from struct import Struct

VALUE, LAYOUT, RING, FREED, ASK, REFUSED, END = range(7)
HEADER = Struct("<BBHIqqqqqq")
NO_KEY = (0, 0, 0)
START = 64  # the header is shorter, and tensors are aligned
ALONE = -1
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
