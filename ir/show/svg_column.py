"""The layout from top to bottom, for many stages.

( x )──(1)             (1) under its box, a value leaves for its lane, with its label beside it
┌─┘                    (2) lanes run on the left, short ways nearest; a value takes one from its box to the last that uses it
│   ┌──────────┐
└──▶│ submod_0 ├╌╌┐    (3) copies of a parameter are joined on the right
    └┬─────────┘  ╎
┌────┴─ relu      ╎
(2) ┌──────────┐ (3)
└──▶│ submod_1 ├╌╌┘
"""

from itertools import pairwise
from xml.etree.ElementTree import Element

from pippy.ir.show.flow import Box, Replicas, Value
from pippy.ir.show.lanes import last_use, stacked
from pippy.ir.show.picture import Picture, tag
from pippy.ir.show.svg_elements import LETTER, LINE, Point, arrow, group, line, rectangle, words
from pippy.ir.show.units import shortened

_MARGIN, _LANE, _STEM = 16.0, 16.0, 14.0
_BOX, _BOX_HEIGHT, _VALUE_HEIGHT, _PORT = 330.0, 30.0, 22.0, 12.0
_NAME, _LABEL = 24, 60


def draw_column(content: Element, picture: Picture) -> Point:
    """Draw into ``content``; returns the width and the height."""
    return _Column(content, picture).draw()


class _Column:
    def __init__(self, content: Element, picture: Picture) -> None:
        self.content, self.picture, self.flow = content, picture, picture.flow
        self.lanes = stacked((value, value.source, last_use(value)) for value in self.flow.values)
        self.left = _MARGIN + _LANE * (max(self.lanes.values(), default=0) + 1)
        self.tops: list[float] = []
        self.heights: list[float] = []
        self.rows: dict[Value, float] = {}
        self.bottom = self._place_rows()
        widest = max((len(self._label(value)) for value in self.flow.values), default=0)
        self.right = self.left + max(_BOX, _STEM + 12 + widest * LETTER)

    def draw(self) -> Point:
        for value in self.flow.values:
            self._draw_value(value)
        below = 0.0
        for lane, copies in enumerate(sorted(self.flow.replicas, key=lambda each: each.boxes)):
            below = LINE + self._draw_copies(copies, self.right + 14 + _LANE * lane, below)
        for index, box in enumerate(self.flow.boxes):
            self._draw_box(index, box)
        names = max((len(_copies_label(each)) for each in self.flow.replicas), default=0)
        beside = 14 + _LANE * len(self.flow.replicas) + names * LETTER if names else 0
        return self.right + beside + _MARGIN, self.bottom

    def _place_rows(self) -> float:
        """The rows from top to bottom: each box, and under it the values that it makes."""
        y = _MARGIN
        for index in range(len(self.flow.boxes)):
            self.tops.append(y)
            self.heights.append(max(_BOX_HEIGHT, _PORT * (len(self._arriving(index)) + 1)))
            y += self.heights[-1]
            leaving = [value for value in self.flow.values if value.source == index]
            for value in sorted(leaving, key=self.lanes.__getitem__, reverse=True):
                self.rows[value] = y + _VALUE_HEIGHT / 2 + 2
                y += _VALUE_HEIGHT
            y += 8
        return y

    def _arriving(self, box: int) -> list[Value]:
        """What a box uses, the innermost lane first: so no line into the box crosses another one into it."""
        return sorted((value for value in self.flow.values if box in value.users), key=self.lanes.__getitem__)

    def _label(self, value: Value) -> str:
        name = "" if self.flow.boxes[value.source].kind == "input" else shortened(value.name, _LABEL // 2)
        special = "" if value.kind == "target" or not tag(value) else f"({tag(value)})"
        room = _LABEL - len(name) - len(special) - 4
        return shortened("  ".join(filter(None, [name, special, self.picture.size_text(value, room)])), _LABEL)

    def _draw_value(self, value: Value) -> None:
        names = ", ".join(self.flow.boxes[user].name for user in value.users)
        way = f"{self.flow.boxes[value.source].name} → {names}"
        inside = group(
            self.content, "\n".join(filter(None, [value.name, tag(value), self.picture.size_text(value), way]))
        )
        stem, y, lane = self.left + _STEM, self.rows[value], self.left - 16 - _LANE * self.lanes[value]
        below = self.tops[value.source] + self.heights[value.source]
        for user in value.users:
            port = self.tops[user] + self.heights[user] / 2
            arriving = self._arriving(user)
            port += (arriving.index(value) - (len(arriving) - 1) / 2) * _PORT
            points = [(stem, below), (stem, y), (lane, y), (lane, port), (self.left, port)]
            arrow(inside, points, "parameter" if value.origin else "value")
        words(inside, (stem + 12, y + 4), self._label(value))

    def _draw_copies(self, copies: Replicas, x: float, below: float) -> float:
        """Join copies by a line at ``x``; the label stands at ``below`` or lower. Returns where."""
        inside = group(self.content, "\n".join(copies.names))
        heights = [self.tops[box] + self.heights[box] / 2 for box in copies.boxes]
        for start, end in pairwise(heights):
            edge = self.left + _BOX
            line(inside, [(edge, start), (x, start), (x, end), (edge, end)], "replicas")
        after = self.right + 14 + _LANE * len(self.flow.replicas)
        at = max(heights[0] + 4, below)
        words(inside, (after, at), _copies_label(copies))
        return at

    def _draw_box(self, index: int, box: Box) -> None:
        figures = self.picture.figures(box)
        row = self.picture.rows.get(box.name)
        inside = group(self.content, "\n".join([box.name, *figures, *(row.holds if row else ())]))
        name = shortened(box.name, _NAME)
        width = _BOX if box.kind in ("stage", "loss") else len(name) * LETTER + 32
        rectangle(inside, (self.left, self.tops[index]), (width, self.heights[index]), box.kind)
        base = self.tops[index] + self.heights[index] / 2 + 4
        words(inside, (self.left + _STEM, base), name, bold=True)
        words(inside, (self.left + _BOX - _STEM, base), ", ".join(figures), "end")


def _copies_label(copies: Replicas) -> str:
    return shortened(", ".join(copies.names), 30)
