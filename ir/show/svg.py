"""A Pipe as an SVG, from top to bottom, with the notes below.

     ( target )             (1) inputs come first; the input that is used first is the last of them, next to its stage
  ┌────┘
  │  ( x )
  │    ▼ float32[4, 8]      (2) a value for the next box goes straight down, with its label beside it
  │  ┌──────────┐
  │  │ submod_0 ├╌╌┐        (3) copies of a parameter are joined on the right
  │  └─┬─┬──────┘  ╎
  │ ┌──┘ ▼ relu    ╎
  │ │┌──────────┐  ╎        (4) a value for a later box has a column on the left, up to the last box that uses it;
  │ ││ submod_1 ├╌╌┘            the shortest columns are the nearest to the boxes

Each value leaves its box on a line of its own and arrives at a height of its own, so lines may cross, but do not overlap.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from pippy.ir.base.readable import shortened
from pippy.ir.show.content import Content, notes
from pippy.ir.show.structure import DrawnValue, ParameterCopies, Structure
from pippy.ir.show.text_drawing import columns_by_length

Point = tuple[float, float]

LETTER, LINE = 6.7, 14  # the size of a letter of the labels, in pixels
RADIUS, _HEAD = 7.0, 7.0
_INK = "#1f2328"
_FILLS = {"stage": "#e8f1ff", "loss": "#ffecec", "input": "#f3f4f6", "output": "#f3f4f6"}
_RIMS = {"stage": "#3b6fb6", "loss": "#b65050", "input": "#6b7280", "output": "#6b7280"}
_LINES = {
    "value": {"stroke": "#4b5563", "stroke-width": "1.5"},
    "parameter": {"stroke": "#b45309", "stroke-width": "3"},
    "copies": {"stroke": "#7c3aed", "stroke-width": "1.5", "stroke-dasharray": "5 4"},
}
_CLASS = "pippy-pipe"
_DARK = {
    ".ground": "fill: #0d1117",
    "text": "fill: #e6edf3",
    "rect.stage": "fill: #16263d; stroke: #6ea2e6",
    "rect.loss": "fill: #3b1d20; stroke: #e08585",
    "rect.input, rect.output": "fill: #22272e; stroke: #9198a1",
    "path.value": "stroke: #9da7b3",
    "polygon.value": "fill: #9da7b3",
    "path.parameter": "stroke: #e3954a",
    "polygon.parameter": "fill: #e3954a",
    "path.copies": "stroke: #b794f6",
    "polygon.copies": "fill: #b794f6",
}
_MARGIN, _COLUMN, _GAP = 16.0, 16.0, 12.0
_BOX, _BOX_HEIGHT, _VALUE_HEIGHT, _PORT = 330.0, 30.0, 22.0, 12.0
_INSET, _STEMS = 14.0, 80.0  # from a box's left edge to its first line down, and the most that all of them take
_NAME, _LABEL, _COPIES, _NOTE = 24, 60, 30, 120  # the longest texts, in letters


def pipe_svg(content: Content) -> str:
    """The text of the SVG. A thick arrow is a transmitted parameter, a dashed line joins copies of a parameter."""
    inside = Element("g")
    width, height = _Layout(inside, content).draw()
    lines = notes(content)
    for index, text in enumerate(lines):
        words(group(inside, text), (_MARGIN, height + LINE * (index + 1)), shortened(text, _NOTE))
    widest = max(min(len(text), _NOTE) for text in lines) * LETTER + 2 * _MARGIN
    stages = sum(box.kind == "stage" for box in content.structure.boxes)
    return svg_document(inside, (max(width, widest), height + LINE * (len(lines) + 1)), f"a Pipe of {stages} stages")


class _Layout:
    """Places all boxes, lines and labels, and then draws them."""

    def __init__(self, inside: Element, content: Content) -> None:
        self.inside, self.content, self.structure = inside, content, content.structure
        order = _drawn_order(self.structure)
        self.row = {box: row for row, box in enumerate(order)}
        self.straight = dict(self._straight())
        self.columns = columns_by_length(
            (value, self.row[value.source], max(self.row[user] for user in users))
            for value in self.structure.values
            if (users := self._later_users(value))
        )
        copies = self.structure.copies
        # Each ends a row later, because two that meet at the same box need two columns.
        self.copies_columns = columns_by_length(
            (each, self.row[each.boxes[0]], self.row[each.boxes[-1]] + 1) for each in copies
        )
        self.left = _MARGIN + _COLUMN * (max(self.columns.values(), default=-1) + 1)
        self.tops: dict[int, float] = {}
        self.heights: dict[int, float] = {}
        self.stems: dict[DrawnValue, float] = {}
        self.label_at: dict[DrawnValue, Point] = {}
        self.bottom = _MARGIN
        for box in order:
            self._place(box)
        ends = [self.label_at[value][0] + len(self._label(value)) * LETTER for value in self.structure.values]
        self.right = max([self.left + _BOX, *ends])

    def draw(self) -> Point:
        """Draw all parts, and return the width and the height."""
        for value in self.structure.values:
            self._draw_value(value)
        width = self._draw_all_copies()
        for box in range(len(self.structure.boxes)):
            self._draw_box(box)
        return width, self.bottom

    def _straight(self) -> Iterator[tuple[DrawnValue, int]]:
        """For each box, the value that goes straight to the next box; of several values, the one with the shortest way."""
        for box, following in pairwise(self.row):
            candidates = [value for value in self._made_by(box) if following in value.users]
            if candidates:
                yield min(candidates, key=lambda value: (value.users[-1], value.origin != "")), following

    def _made_by(self, box: int) -> list[DrawnValue]:
        return [value for value in self.structure.values if value.source == box]

    def _later_users(self, value: DrawnValue) -> list[int]:
        """The boxes that a value reaches by a column."""
        return [user for user in value.users if user != self.straight.get(value)]

    def _place(self, box: int) -> None:
        """A box, and under it a row for each value that it makes."""
        ports = max(len(self._arriving(box)), len(self._copies_at(box)))
        self.tops[box], self.heights[box] = self.bottom, max(_BOX_HEIGHT, _PORT * (ports + 1))
        # The line to the outermost column leaves first, and the straight line last, so that they do not cross.
        values = sorted(self._made_by(box), key=lambda value: (value in self.straight, -self.columns.get(value, -1)))
        apart = min(_PORT, _STEMS / max(1, len(values)))
        y = self.bottom + self.heights[box]
        for index, value in enumerate(values):
            y += _VALUE_HEIGHT
            self.stems[value] = self.left + _INSET + apart * index
            self.label_at[value] = (self.left + _INSET + apart * len(values), y - _VALUE_HEIGHT / 2 + 2)
        self.bottom = y + _GAP

    def _arriving(self, box: int) -> list[DrawnValue]:
        """The values that come to a box by a column, the innermost column first, so that their lines do not cross."""
        return sorted(
            (value for value in self.columns if box in self._later_users(value)), key=self.columns.__getitem__
        )

    def _copies_at(self, box: int) -> list[ParameterCopies]:
        """The copies that a box holds, in an order in which their lines do not cross beside it."""
        columns = self.copies_columns
        held = [each for each in columns if box in each.boxes]
        return sorted(held, key=lambda each: -columns[each] if each.boxes[0] == box else columns[each])

    def _port(self, box: int, index: int, count: int) -> float:
        """The height at which the line with this number meets the side of a box."""
        return self.tops[box] + self.heights[box] / 2 + (index - (count - 1) / 2) * _PORT

    def _label(self, value: DrawnValue) -> str:
        name = "" if self.structure.boxes[value.source].kind == "input" else shortened(value.name, _LABEL // 2)
        special = "" if value.kind == "target" or not value.special else f"({value.special})"
        room = _LABEL - len(name) - len(special) - 4
        return shortened("  ".join(filter(None, [name, special, self.content.size_text(value, room)])), _LABEL)

    def _draw_value(self, value: DrawnValue) -> None:
        source, (label, y) = self.structure.boxes[value.source], self.label_at[value]
        users = ", ".join(self.structure.boxes[user].name for user in value.users)
        texts = [value.name, value.special, self.content.size_text(value), f"{source.name} → {users}"]
        inside, style = group(self.inside, "\n".join(filter(None, texts))), "parameter" if value.origin else "value"
        stem, start = self.stems[value], self.tops[value.source] + self.heights[value.source]
        if value in self.straight:
            arrow(inside, [(stem, start), (stem, self.tops[self.straight[value]])], style)
            start = y - RADIUS  # where the line to a column branches off
        for points in self._ways(value, (stem, start)):
            arrow(inside, points, style)
        words(inside, (label, y + 4), self._label(value))

    def _ways(self, value: DrawnValue, start: Point) -> Iterator[list[Point]]:
        """Draw a line in a column to the last user of a value, and branches from it to the other users."""
        users, y = self._later_users(value), self.label_at[value][1]
        for user in users:
            arriving, column = self._arriving(user), self.left - _COLUMN * (1 + self.columns[value])
            port = self._port(user, arriving.index(value), len(arriving))
            begin = [start, (start[0], y), (column, y)] if user == users[-1] else [(column, port - RADIUS)]
            yield [*begin, (column, port), (self.left, port)]

    def _draw_all_copies(self) -> float:
        """Join all copies, write their names at the right, and return the width of the drawing."""
        columns, below = max(self.copies_columns.values(), default=-1) + 1, 0.0
        names = self.right + _GAP + _COLUMN * columns
        for copies in sorted(self.copies_columns, key=self._heights_of):
            inside, heights = group(self.inside, "\n".join(copies.names)), self._heights_of(copies)
            edge, x = self.left + _BOX, self.right + _COLUMN * (1 + self.copies_columns[copies])
            for start, end in pairwise(heights):
                line(inside, [(edge, start), (x, start), (x, end), (edge, end)], "copies")
            below = max(heights[0] + 4, below + LINE)
            words(inside, (names, below), _copies_label(copies))
        widest = max((len(_copies_label(copies)) for copies in self.copies_columns), default=0)
        return max(self.right, names + widest * LETTER if columns else 0) + _MARGIN

    def _heights_of(self, copies: ParameterCopies) -> list[float]:
        """The height at which each box holds its copy."""
        held = [(box, self._copies_at(box)) for box in copies.boxes]
        return [self._port(box, at.index(copies), len(at)) for box, at in held]

    def _draw_box(self, index: int) -> None:
        box, texts = self.structure.boxes[index], self.content.stage_texts(self.structure.boxes[index])
        held = self.content.stages[box.name].holds if box.computes else ()
        inside = group(self.inside, "\n".join([box.name, *texts, *held]))
        name = shortened(box.name, _NAME)
        width = _BOX if box.computes else len(name) * LETTER + 2 * _INSET
        rectangle(inside, (self.left, self.tops[index]), (width, self.heights[index]), box.kind)
        base = self.tops[index] + self.heights[index] / 2 + 4
        words(inside, (self.left + _INSET, base), name, bold=True)
        words(inside, (self.left + _BOX - _INSET, base), ", ".join(texts), "end")


def _drawn_order(structure: Structure) -> list[int]:
    """The boxes from top to bottom. Unused inputs come first; the input that is used first is the last of the inputs."""
    inputs = {value.source: value.users for value in structure.values if structure.boxes[value.source].kind == "input"}
    others = [index for index in range(len(structure.boxes)) if index not in inputs]
    return sorted(inputs, key=lambda box: inputs[box] or (len(structure.boxes),), reverse=True) + others


def _copies_label(copies: ParameterCopies) -> str:
    return shortened(", ".join(copies.names), _COPIES)


# The shapes in the SVGs of Pipes. All text goes through ElementTree, so it is escaped.
#
# Colours are attributes of the elements and the ground is drawn, so an SVG can be read in a page of any theme. Its style sheet
# has only the colours for readers who prefer dark pages, and names its own class, so it leaves the styles of a page alone.


def group(parent: ElementTree.Element, title: str) -> ElementTree.Element:
    """A group that shows ``title`` when the mouse is over it."""
    made = ElementTree.SubElement(parent, "g")
    ElementTree.SubElement(made, "title").text = title
    return made


def rectangle(parent: ElementTree.Element, corner: Point, size: Point, kind: str) -> None:
    """A box of a drawing; inputs and outputs have round ends."""
    radius = min(size[1] / 2, 13) if kind in ("input", "output") else 6
    numbers = {"x": corner[0], "y": corner[1], "width": size[0], "height": size[1], "rx": radius}
    colours = {"class": kind, "fill": _FILLS[kind], "stroke": _RIMS[kind], "stroke-width": "1.5"}
    ElementTree.SubElement(parent, "rect", {key: _number(number) for key, number in numbers.items()} | colours)


def words(parent: ElementTree.Element, at: Point, text: str, anchor: str = "start", bold: bool = False) -> None:
    """A line of text; ``at`` is on its base line."""
    attributes = {"x": _number(at[0]), "y": _number(at[1]), "text-anchor": anchor}
    ElementTree.SubElement(parent, "text", attributes | ({"font-weight": "bold"} if bold else {})).text = text


def line(parent: ElementTree.Element, points: Sequence[Point], kind: str) -> None:
    """A line through ``points`` with round corners."""
    path = [f"M{_pair(points[0])}"]
    for before, corner, after in zip(points, points[1:], points[2:]):
        path.append(f"L{_pair(_towards(corner, before))}Q{_pair(corner)} {_pair(_towards(corner, after))}")
    path.append(f"L{_pair(points[-1])}")
    ElementTree.SubElement(parent, "path", {"class": kind, "d": "".join(path), "fill": "none"} | _LINES[kind])


def arrow(parent: ElementTree.Element, points: Sequence[Point], kind: str) -> None:
    """A line with an arrowhead at its end."""
    (x, y), before = points[-1], points[-2]
    along = x - before[0], y - before[1]
    length = max(abs(along[0]), abs(along[1])) or 1.0
    dx, dy = along[0] / length * _HEAD, along[1] / length * _HEAD
    line(parent, [*points[:-1], (x - dx, y - dy)], kind)
    head = [(x, y), (x - dx - dy / 2, y - dy - dx / 2), (x - dx + dy / 2, y - dy + dx / 2)]
    shape = {"class": kind, "points": " ".join(map(_pair, head)), "fill": _LINES[kind]["stroke"]}
    ElementTree.SubElement(parent, "polygon", shape)


def svg_document(content: ElementTree.Element, size: Point, label: str) -> str:
    """The text of the SVG: the content on a ground, white or dark as the reader prefers."""
    width, height = (_number(length) for length in size)
    attributes = {
        "xmlns": "http://www.w3.org/2000/svg",
        "class": _CLASS,
        "width": width,
        "height": height,
        "role": "img",
    }
    root = ElementTree.Element("svg", attributes | {"viewBox": f"0 0 {width} {height}", "aria-label": label})
    ElementTree.SubElement(root, "style").text = _dark_style()
    ground = {"class": "ground", "width": width, "height": height, "rx": "8", "fill": "#ffffff"}
    ElementTree.SubElement(root, "rect", ground)
    content.attrib.update({"fill": _INK, "font-family": "ui-monospace, Menlo, Consolas, monospace", "font-size": "11"})
    root.append(content)
    return ElementTree.tostring(root, encoding="unicode")


def _dark_style() -> str:
    rules = (
        f"{', '.join(f'.{_CLASS} {part}' for part in each.split(', '))} {{ {colours} }}"
        for each, colours in _DARK.items()
    )
    return f"@media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}"


def _towards(corner: Point, other: Point) -> Point:
    """The point where a round corner starts."""
    along = other[0] - corner[0], other[1] - corner[1]
    length = (along[0] ** 2 + along[1] ** 2) ** 0.5 or 1.0
    step = min(RADIUS, length / 2) / length
    return corner[0] + along[0] * step, corner[1] + along[1] * step


def _pair(point: Point) -> str:
    return f"{_number(point[0])},{_number(point[1])}"


def _number(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
