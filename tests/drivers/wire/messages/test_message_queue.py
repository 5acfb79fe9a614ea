"""Messages are taken in the order of their numbers, and the file descriptor says truly whether one waits."""

import os
import select
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pippy.drivers.wire.messages.worker_messages import MessageQueue


@pytest.fixture
def messages():
    messages = MessageQueue()
    yield messages
    messages.close()


def readable(messages):
    return bool(select.select([messages], [], [], 0)[0])


@given(st.permutations(range(8)), st.sets(st.integers(0, 7)))
def test_any_order_of_arrival_is_put_right(order, skipped):
    messages, expected = MessageQueue(), iter([number for number in range(8) if number not in skipped])
    arrived, taken = set(), 0
    for number in order:
        messages.skip(number) if number in skipped else messages.put(number, number, print)
        arrived.add(number)
        while readable(messages):
            assert messages.get().message == next(expected)
            taken += 1
        assert len(messages) == 0
        through = next(n for n in range(9) if n not in arrived)
        assert taken == len(set(range(through)) - skipped)
    assert next(expected, None) is None
    messages.close()


def test_it_stays_readable_until_the_last_is_taken(messages):
    for number in range(3):
        messages.put(number, number, print)
    for _ in range(3):
        assert readable(messages)
        messages.get()
    assert not readable(messages)


def test_get_waits_for_another_thread(messages):
    taken = []
    thread = threading.Thread(target=lambda: taken.append(messages.get().message))
    thread.start()
    messages.put(0, "came", print)
    thread.join(10)
    assert taken == ["came"]


def test_many_threads_fill_it(messages):
    def fill(start):
        for number in range(start, 1000, 4):
            messages.put(number, number, print)

    threads = [threading.Thread(target=fill, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    assert [messages.get().message for _ in range(1000)] == list(range(1000))
    for thread in threads:
        thread.join()
    assert not readable(messages)


def test_closing_gives_the_descriptor_back():
    messages = MessageQueue()
    fd = messages.fileno()
    messages.close()
    with pytest.raises(OSError):
        os.fstat(fd)
