"""An iterator over data that has no end, for loops that take one item after the other."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pippy.ir.base.public_calls import placing_words
from pippy.training.reader import Reader


@placing_words()
class RepeatingLoader(Iterator[Any]):
    """An iterator over data that begins anew at its end, as DeepSpeed's. Its position can be saved.

    ``driver.save(folder, data=loader, ...)`` saves how far it was read, and ``driver.load(folder, data=loader, ...)`` has
    another one of the same data go on from there. See docs/loop.md for which data that works.

    >>> loader = RepeatingLoader([1, 2, 3])
    >>> [next(loader) for _ in range(5)], loader.epoch
    ([1, 2, 3, 1, 2], 1)
    >>> other = RepeatingLoader([1, 2, 3])
    >>> other.load_state_dict(loader.state_dict())
    >>> next(other)
    3
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self._reader = Reader(data)

    @property
    def epoch(self) -> int:
        """How often the data was begun again."""
        return self._reader.epoch

    def __next__(self) -> Any:
        """The next item. It ends only if the data is an iterator, which cannot be read again."""
        while not self._reader.ended:
            for item in self._reader.take(1):
                return item
        raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        """Its position, as plain values."""
        return self._reader.position()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of another loader. Random numbers do not change."""
        self._reader.go_to(state)
