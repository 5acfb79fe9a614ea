"""What a notebook draws. How is said by `drawings`, which imports what it draws."""

from collections.abc import Callable
from typing import Any, ClassVar


class Drawn:
    """A class whose objects a notebook shows as pictures. Without a picture it shows the ``repr``.

    >>> from pippy.drivers.plan import make_schedule
    >>> make_schedule("1f1b", workers=2, chunks=2)._repr_html_()[:4]
    '<svg'
    """

    picture: ClassVar[Callable[[Any], str | None]]

    def _repr_html_(self) -> str | None:
        return Drawn.picture(self)
