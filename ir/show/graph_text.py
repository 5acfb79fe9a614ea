"""A Pipe as a drawing in text: boxes and values from top to bottom, and beside them the lanes that the values take."""

from pippy.ir.show.flow import Box, Value
from pippy.ir.show.lanes import assign_lanes, last_use
from pippy.ir.show.picture import Picture, notes, tag
from pippy.ir.show.units import shortened

_START = {"parameter": "◆", "buffer": "◆"}
_WIDEST_NAME, _WIDEST_SIZE = 32, 48


def graph_text(picture: Picture) -> str:
    """The drawing, with its notes below. A ● begins a value, a ◆ a tensor of the model that travels, a ▼ is a use."""
    return "\n".join([*_TextGraph(picture).lines(), *notes(picture)])


class _TextGraph:
    def __init__(self, picture: Picture) -> None:
        self.picture, self.flow = picture, picture.flow
        self.lanes = assign_lanes(self.flow.values)
        self.width = 1 + max(self.lanes.values(), default=-1)
        self.names = {value: shortened(value.name, _WIDEST_NAME) for value in self.flow.values}
        self.name_width = max(map(len, self.names.values()), default=0)
        self.sizes = {value: picture.size_text(value, _WIDEST_SIZE) for value in self.flow.values}
        self.size_width = max(map(len, self.sizes.values()), default=0)
        self.made: set[Value] = set()

    def lines(self) -> list[str]:
        lines = []
        for index, box in enumerate(self.flow.boxes):
            if box.kind != "input":
                lines.append(f"{self._passing(index)} {self._box(box)}")
            for value in (value for value in self.flow.values if value.source == index):
                lines.append(f"{self._starting(value)} {self._value(value)}".rstrip())
        return lines

    def _passing(self, box: int) -> str:
        """The lanes at a box: what it uses, and what passes by."""
        marks = [" "] * self.width
        for value in self.made:
            if box in value.users:
                marks[self.lanes[value]] = "▼"
            elif last_use(value) > box:
                marks[self.lanes[value]] = "│"
        return " ".join(marks)

    def _starting(self, value: Value) -> str:
        """The lanes where a value is made."""
        marks = [" "] * self.width
        for other in self.made:
            if last_use(other) > value.source:
                marks[self.lanes[other]] = "│"
        marks[self.lanes[value]] = _START.get(value.kind, "●")
        self.made.add(value)
        return " ".join(marks)

    def _box(self, box: Box) -> str:
        return "   ".join([f"[{box.name}]", *self.picture.figures(box)])

    def _value(self, value: Value) -> str:
        users = ", ".join(self.flow.boxes[user].name for user in value.users)
        size = f"  {self.sizes[value].ljust(self.size_width)}" if self.size_width else ""
        special = f"  ({tag(value)})" if tag(value) else ""
        return f"  {self.names[value].ljust(self.name_width)}{size}  {'─▶ ' + users if users else 'unused'}{special}"
