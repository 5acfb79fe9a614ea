"""The layout from left to right.

              ┌╌╌╌╌╌╌╌╌(4)╌╌╌╌╌╌┐                    (1) model inputs, stacked in the first column
    (1)   ┌───┴───┐         ┌───┴───┐                (2) a value for the next column goes straight there
    ( x )─▶       ├───(2)───▶       ├─▶ ...          (3) one for a later column takes a lane below the boxes
          └─────┬─┘         └───────┘    ▲           (4) copies of a parameter are joined above them
                └──(3)───────────────────┘

Lines leave a box on its right and reach it on its left, and labels stand between the columns, at the start of their line:
so no line runs through a text. A deeper lane leaves a box further left and reaches it further right, which saves crossings.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from pippy.ir.show.flow import Replicas, Value
from pippy.ir.show.lanes import stacked
from pippy.ir.show.picture import Picture, tag
from pippy.ir.show.svg_elements import LETTER, LINE, Point, arrow, group, line, rectangle, words
from pippy.ir.show.units import shortened

_BOX, _PILL, _PORT, _STEP = 150.0, 26.0, 38.0, 12.0
_MARGIN, _PADDING, _NARROWEST = 16.0, 10.0, 40.0
_LABEL, _NAME = 30, 20


def draw_row(content: Element, picture: Picture) -> Point:
    """Draw into ``content``; returns the width and the height."""
    return _Row(content, picture).draw()


@dataclass(frozen=True)
class _Column:
    left: float
    right: float
    labels: float  # where the labels of what leaves it begin


class _Row:
    def __init__(self, content: Element, picture: Picture) -> None:
        self.content, self.picture, self.flow = content, picture, picture.flow
        self.at = _columns_of(picture)
        values = self.flow.values
        self.straight = [value for value in values if any(self._is_next(value, user) for user in value.users)]
        far = [value for value in values if not all(self._is_next(value, user) for user in value.users)]
        self.below = stacked([(value, self.at[value.source], self.at[value.users[-1]]) for value in far])
        copies = self.flow.replicas
        self.above = stacked([(each, self.at[each.boxes[0]], self.at[each.boxes[-1]]) for each in copies])
        self.columns = self._place_columns()
        self.height = max([64.0, *(_PORT * len(self._leaving(column)) + 12 for column in range(len(self.columns)))])
        self.top = _MARGIN + 30 * (max(self.above.values(), default=-1) + 1)
        self.ports = self._place_ports()
        lowest = max(self.ports.values(), default=0.0) + _PILL / 2
        self.bottom = max(self.top + self.height, lowest) + 28

    def draw(self) -> Point:
        for value in self.straight:
            self._draw_straight(value)
        for value in self.below:
            self._draw_far(value)
        for copies in self.above:
            self._draw_copies(copies)
        for index in range(len(self.flow.boxes)):
            self._draw_box(index)
        lanes = max(self.below.values(), default=-1) + 1
        return self.columns[-1].right + _MARGIN, self.bottom + _PORT * lanes + (0 if lanes else -8)

    def _is_next(self, value: Value, user: int) -> bool:
        return self.at[user] == self.at[value.source] + 1

    def _leaving(self, column: int) -> list[Value]:
        return [value for value in self.straight if self.at[value.source] == column]

    def _place_columns(self) -> list[_Column]:
        columns, left = [], _MARGIN
        for column in range(max(self.at) + 1):
            names = [box.name for index, box in enumerate(self.flow.boxes) if self.at[index] == column]
            is_stage = any(self.flow.boxes[i].kind in ("stage", "loss") for i, at in enumerate(self.at) if at == column)
            width = _BOX if is_stage else max((min(len(name), _NAME) * LETTER + 28 for name in names), default=0)
            bends = 0 if is_stage else _STEP * sum(self.at[value.source] == column for value in self.below)
            labels = left + width + bends + _PADDING
            columns.append(_Column(left, left + width, labels))
            left = labels + max(_NARROWEST, self._widest_label(column) * LETTER + 2 * _PADDING)
        return columns

    def _widest_label(self, column: int) -> int:
        values = [value for value in self.flow.values if self.at[value.source] == column]
        texts = [text for value in values for text in self._label(value)]
        texts += [_copies_label(each) for each in self.above if self.at[each.boxes[0]] == column]
        return max(map(len, texts), default=0)

    def _place_ports(self) -> dict[int | Value, float]:
        """The height of every straight value, and of every input."""
        middle, ports = self.top + self.height / 2, dict[int | Value, float]()
        for column in range(len(self.columns)):
            leaving = self._leaving(column)
            for index, value in enumerate(leaving):
                ports[value] = middle + (index - (len(leaving) - 1) / 2) * _PORT
        sources: dict[int | Value, float] = {value.source: ports[value] for value in self._leaving(0)}
        others = [i for i, box in enumerate(self.flow.boxes) if box.kind == "input" and i not in sources]
        first = max(sources.values(), default=middle - _PORT) + _PORT
        ports.update(sources)
        ports.update({box: first + index * _PORT for index, box in enumerate(others)})
        return ports

    def _label(self, value: Value) -> list[str]:
        """The lines of a label: what the value is called, unless its source says so, and its size."""
        name = "" if self.flow.boxes[value.source].kind == "input" else value.name
        special = "" if value.kind == "target" else tag(value)
        return [shortened(f"{name} ({special})" if special else name, _LABEL), self.picture.size_text(value, _LABEL)]

    def _titled(self, value: Value) -> Element:
        users = ", ".join(self.flow.boxes[user].name for user in value.users)
        way = f"{self.flow.boxes[value.source].name} → {users}"
        return group(
            self.content, "\n".join(filter(None, [value.name, tag(value), self.picture.size_text(value), way]))
        )

    def _draw_straight(self, value: Value) -> None:
        source, y = self.at[value.source], self.ports[value]
        start, labels, end = self.columns[source].right, self.columns[source].labels, self.columns[source + 1].left
        inside = self._titled(value)
        arrow(inside, [(start, y), (end, y)], _style(value))
        self._write(inside, (labels, y), self._label(value))

    def _write(self, inside: Element, at: Point, label: Sequence[str]) -> None:
        for text, offset in zip(label, (-5, LINE - 2)):
            words(inside, (at[0], at[1] + offset), text)

    def _draw_far(self, value: Value) -> None:
        source, y = self.columns[self.at[value.source]], self.bottom + _PORT * self.below[value]
        inside = self._titled(value)
        for user in value.users:
            if not self._is_next(value, user):
                end = self._port(user, value, self._arriving_below(user), self.columns[self.at[user]].left, 1)
                floor = self._floor(user)
                arrow(inside, [*self._descent(value, y), (end, y), (end, floor)], _style(value))
        self._write(inside, (source.labels, y), self._label(value))

    def _descent(self, value: Value, y: float) -> list[Point]:
        """From a value's source down to its lane."""
        column = self.columns[self.at[value.source]]
        if self.flow.boxes[value.source].kind == "input":
            lanes = [other for other in self.below if self.at[other.source] == 0]
            bend = column.right + _STEP * (1 + sum(self.below[other] > self.below[value] for other in lanes))
            return [(column.right, self.ports[value.source]), (bend, self.ports[value.source]), (bend, y)]
        siblings = [other for other in self.below if other.source == value.source]
        x = self._port(value.source, value, siblings, column.right, -1)
        return [(x, self.top + self.height), (x, y)]

    def _arriving_below(self, box: int) -> list[Value]:
        return [value for value in self.below if box in value.users and not self._is_next(value, box)]

    def _port(self, box: int, value: Value, together: list[Value], edge: float, side: int) -> float:
        """Where one of several lanes meets the lower edge of a box, counted from its left (1) or right (-1) edge."""
        column = self.columns[self.at[box]]
        step = min(_STEP, (column.right - column.left) / 2 / (len(together) + 1))
        return edge + side * step * (1 + sorted(together, key=self.below.__getitem__).index(value))

    def _floor(self, box: int) -> float:
        return self.top + (self.height + self._box_height(box)) / 2

    def _box_height(self, box: int) -> float:
        """Stages are as high as the row; an output is as high as it must be for what reaches it straight."""
        if self.flow.boxes[box].kind != "output":
            return self.height
        return max(_PILL, _PORT * len(self._leaving(self.at[box] - 1)))

    def _draw_copies(self, copies: Replicas) -> None:
        y, inside = self.top - 18 - 30 * self.above[copies], group(self.content, "\n".join(copies.names))
        first = self.columns[self.at[copies.boxes[0]]]
        inset = min(_STEP * (1 + self.above[copies]), _BOX / 2)
        start = first.right - inset
        for box in copies.boxes[1:]:
            end = self.columns[self.at[box]].left + inset
            line(inside, [(start, self.top), (start, y), (end, y), (end, self.top)], "replicas")
        words(inside, (first.labels, y - 4), _copies_label(copies))

    def _draw_box(self, index: int) -> None:
        box, column = self.flow.boxes[index], self.columns[self.at[index]]
        figures = self.picture.figures(box)
        row = self.picture.rows.get(box.name)
        inside = group(self.content, "\n".join([box.name, *figures, *(row.holds if row else ())]))
        middle = self.ports.get(index, self.top + self.height / 2)
        height = _PILL if box.kind == "input" else self._box_height(index)
        rectangle(inside, (column.left, middle - height / 2), (column.right - column.left, height), box.kind)
        lines = [shortened(text, _NAME) for text in [box.name, *figures]]
        for number, text in enumerate(lines):
            y = middle + 4 + (number - (len(lines) - 1) / 2) * (LINE + 1)
            words(inside, ((column.left + column.right) / 2, y), text, "middle", bold=number == 0)


def _columns_of(picture: Picture) -> list[int]:
    """The column of every box: all inputs share the first."""
    columns: list[int] = []
    for box in picture.flow.boxes:
        columns.append(0 if box.kind == "input" else max([0, *columns]) + 1)
    return columns


def _copies_label(copies: Replicas) -> str:
    return shortened(", ".join(copies.names), _LABEL)


def _style(value: Value) -> str:
    return "parameter" if value.origin else "value"
