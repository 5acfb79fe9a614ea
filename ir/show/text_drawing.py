"""A Pipe as a drawing in text: boxes and values from top to bottom, and beside them a column for each value."""

from collections.abc import Iterator, Sequence

from pippy.ir.base.readable import shortened
from pippy.ir.show.content import Content, notes
from pippy.ir.show.structure import Box, DrawnValue, Structure

_START = {"parameter": "◆", "buffer": "◆"}
_WIDEST_NAME, _WIDEST_SIZE = 32, 48


def text_drawing(content: Content) -> str:
    """The drawing, with its notes below. A ● starts a value, a ◆ a tensor of the model that is sent, and a ▼ is a use."""
    return "\n".join([*_TextDrawing(content).lines(), *notes(content)])


class _TextDrawing:
    def __init__(self, content: Content) -> None:
        self.content, self.structure = content, content.structure
        self.columns = columns_in_order(self.structure.values)
        self.width = 1 + max(self.columns.values(), default=-1)
        self.names = {value: shortened(value.name, _WIDEST_NAME) for value in self.structure.values}
        self.name_width = max(map(len, self.names.values()), default=0)
        self.sizes = {value: content.size_text(value, _WIDEST_SIZE) for value in self.structure.values}
        self.size_width = max(map(len, self.sizes.values()), default=0)
        self.started: set[DrawnValue] = set()

    def lines(self) -> list[str]:
        lines = []
        for row in rows_of(self.structure):
            if isinstance(row, Box):
                lines.append(f"{self._passing(self.structure.boxes.index(row))} {self._box(row)}")
            else:
                lines.append(f"{self._starting(row)} {self._value(row)}".rstrip())
        return lines

    def _passing(self, box: int) -> str:
        """The columns at a box: the values that it uses, and those that pass it."""
        marks = [" "] * self.width
        for value in self.started:
            if box in value.users:
                marks[self.columns[value]] = "▼"
            elif last_use(value) > box:
                marks[self.columns[value]] = "│"
        return " ".join(marks)

    def _starting(self, value: DrawnValue) -> str:
        """The columns where a value is made."""
        marks = [" "] * self.width
        for other in self.started:
            if last_use(other) > value.source:
                marks[self.columns[other]] = "│"
        marks[self.columns[value]] = _START.get(value.kind, "●")
        self.started.add(value)
        return " ".join(marks)

    def _box(self, box: Box) -> str:
        return "   ".join([f"[{box.name}]", *self.content.stage_texts(box)])

    def _value(self, value: DrawnValue) -> str:
        users = ", ".join(self.structure.boxes[user].name for user in value.users)
        size = f"  {self.sizes[value].ljust(self.size_width)}" if self.size_width else ""
        special = f"  ({value.special})" if value.special else ""
        return f"  {self.names[value].ljust(self.name_width)}{size}  {'─▶ ' + users if users else 'unused'}{special}"


def rows_of(structure: Structure) -> Iterator[Box | DrawnValue]:
    """The rows of a drawing: each box, but for inputs, and below it the values that it makes."""
    for index, box in enumerate(structure.boxes):
        if box.kind != "input":
            yield box
        yield from (value for value in structure.values if value.source == index)


# The columns beside the boxes of a drawing. Each value has one, from the box that makes it to the last that uses it.
#
# ●       x is made: it takes the first free column
# │ ●     y is made: it takes the second
# ▼ │     a box uses x; y passes by
#   ▼     a box uses y


def columns_in_order(values: Sequence[DrawnValue]) -> dict[DrawnValue, int]:
    """The number of each value's column, in the order in which values are made. A column is free again where its value ends.

    >>> ways = {"a": (0, (1,)), "b": (0, (2,)), "c": (1, (2,))}
    >>> values = [DrawnValue(name, name, "value", *way) for name, way in ways.items()]
    >>> list(columns_in_order(values).values())
    [0, 1, 0]
    """
    until: list[int] = []
    columns: dict[DrawnValue, int] = {}
    for value in sorted(values, key=lambda value: value.source):
        free = (column for column, end in enumerate(until) if end <= value.source and end < last_use(value))
        column = next(free, len(until))
        until[column:] = [last_use(value), *until[column + 1 :]]
        columns[value] = column
    return columns


def last_use(value: DrawnValue) -> int:
    """The last box that uses a value; if none does, the box that makes it."""
    return max(value.users, default=value.source)
