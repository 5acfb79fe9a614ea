"""Where a reader is in its data, and how another one gets there."""

import random

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from pippy.drivers.base.errors import DriverError
from pippy.drivers.files.manifest import packed, unpacked
from pippy.training.reader import Reader


class Augmented(torch.utils.data.Dataset):
    """Draws from two generators for each item, as augmentations do."""

    def __len__(self):
        return 10

    def __getitem__(self, at):
        return at + torch.rand(()) + random.random()


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, at):
        return at


class Stream(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        yield from range(info.id if info else 0, 12, info.num_workers if info else 1)


class Shuffling:
    """Not torch's: shuffles anew each time."""

    def __iter__(self):
        items = list(range(7))
        random.shuffle(items)
        return iter(items)


def seeded():
    return torch.Generator().manual_seed(3)


DATA = {
    "a list": lambda: list(range(7)),
    "a DataLoader that shuffles": lambda: DataLoader(Numbers(), batch_size=3, shuffle=True),
    "with a generator of its own": lambda: DataLoader(Numbers(), batch_size=3, shuffle=True, generator=seeded()),
    "with a sampler that draws on the way": lambda: DataLoader(
        Numbers(), batch_size=3, sampler=RandomSampler(Numbers(), replacement=True, num_samples=40, generator=seeded())
    ),
    "augmented": lambda: DataLoader(Augmented(), batch_size=3, shuffle=True),
    "a stream": lambda: DataLoader(Stream(), batch_size=2),
    "a class of its own": Shuffling,
    "with two workers": lambda: DataLoader(Augmented(), batch_size=2, shuffle=True, num_workers=2),
    "with persistent workers": lambda: DataLoader(
        Numbers(), batch_size=2, shuffle=True, generator=seeded(), num_workers=1, persistent_workers=True
    ),
    "a stream with two workers": lambda: DataLoader(Stream(), batch_size=2, num_workers=2),
}


def texts(items):
    return [str(item) for item in items]


@pytest.mark.parametrize("kind", DATA)
def test_another_reader_goes_on_with_the_same_items(kind):
    """At every place of the first two epochs, or at two of them where processes start: what comes, and random numbers."""
    places = (1, 4) if "workers" in kind else range(9)
    torch.manual_seed(0)
    random.seed(0)
    reader, expected, states = Reader(DATA[kind]()), [], {}
    for at in range(12):
        if at in places:
            states[at] = unpacked(packed(reader.position())), torch.get_rng_state(), random.getstate()
        expected.append((texts(reader.take(1)), reader.epoch, reader.taken))
    after = torch.rand(()), random.random()
    for at, (position, torchs, pythons) in states.items():
        torch.manual_seed(99)
        torch.set_rng_state(torchs)
        random.setstate(pythons)
        other = Reader(DATA[kind]())
        other.go_to(position)
        assert torch.equal(torch.get_rng_state(), torchs) and random.getstate() == pythons
        assert [(texts(other.take(1)), other.epoch, other.taken) for _ in range(12 - at)] == expected[at:]
        assert (torch.rand(()), random.random()) == after


class Stateful:
    """Data that knows its position, as torchdata's StatefulDataLoader does."""

    def __init__(self):
        self.at, self.read = 0, 0

    def __iter__(self):
        while self.at < 5:
            self.at += 1
            self.read += 1
            yield self.at
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_data_that_knows_its_position_is_asked_for_it():
    reader = Reader(Stateful())
    reader.take(3)
    position = unpacked(packed(reader.position()))
    other = Reader(Stateful())
    other.go_to(position)
    assert other.data.read == 0
    assert [other.take(1) for _ in range(4)] == [reader.take(1) for _ in range(4)] == [[4], [5], [], [1]]
    with pytest.raises(DriverError, match="has none a state_dict"):
        Reader([1, 2, 3]).go_to(position)


def test_an_iterator_is_read_once():
    reader = Reader(iter([1, 2, 3]))
    assert (reader.take(2), reader.take(2), reader.ended) == ([1, 2], [3], False)
    assert (reader.take(2), reader.ended) == ([], True)
    other = Reader(iter([1, 2, 3]))
    other.go_to({**Reader([0]).position(), "taken": 2})
    assert other.take(2) == [3]


def test_an_epoch_is_told_to_samplers_that_want_to_know():
    class Sampler:
        epochs = []

        def __iter__(self):
            return iter([0])

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

    reader = Reader(DataLoader(range(1), sampler=Sampler()))
    for _ in range(4):
        reader.take(1)
    assert sorted(set(Sampler.epochs)) == [0, 1]


@pytest.mark.parametrize("data", [torch.ones(3, 2), {"x": 1}, 7, "abc", None])
def test_one_mini_batch_is_no_data(data):
    with pytest.raises(DriverError, match=r"one mini-batch alone is \[batch\]"):
        Reader(data)


def test_empty_data_and_data_that_became_shorter_are_refused():
    with pytest.raises(DriverError, match="gave no mini-batch"):
        Reader([]).take(1)
    reader = Reader(list(range(5)))
    reader.take(4)
    with pytest.raises(DriverError, match="ended before its item 4"):
        Reader([1, 2]).go_to(reader.position())
