"""A Pipe as a drawing in text: boxes and values from top to bottom, and beside them a column for each value."""

from pippy.ir.base.readable import shortened
from pippy.ir.show.columns import columns_in_order, last_use
from pippy.ir.show.content import Content
from pippy.ir.show.notes import notes
from pippy.ir.show.structure import Box, DrawnValue

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
        for index, box in enumerate(self.structure.boxes):
            if box.kind != "input":
                lines.append(f"{self._passing(index)} {self._box(box)}")
            for value in (value for value in self.structure.values if value.source == index):
                lines.append(f"{self._starting(value)} {self._value(value)}".rstrip())
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
