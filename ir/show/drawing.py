"""The class `Drawing`, which `pipe.draw()` returns: a drawing of a Pipe in several formats, among them Mermaid and HTML.

In text and as SVG, boxes and values go from top to bottom, and beside them is a column for each value:

  ┌── x                    (1) a row for each box and, below it, for each value that it makes
  │ ┌ target               (2) a value has a column on the left, from its row to the last box that uses it
  └─┼▶┌──────────┐
    │ │ submod_0 ├╌╌┐      (3) an arrow leads from the column to each box that uses the value, each at a height of its own
    │ └──────────┘  ╎
  ┌─┼─ relu         ╎      (4) copies of a parameter are joined on the right
  └─┼▶┌──────────┐  ╎
    │ │ submod_1 ├╌╌┘
    ▼

Lines may cross, but do not overlap.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from pippy.ir.base.readable import html_table, shortened
from pippy.ir.show.content import Box, Content, DrawnValue, ParameterCopies, Structure, notes, stages_table, table_cells

_LONGEST = 48
_SHAPES = {"input": ("([", "])"), "output": ("([", "])"), "stage": ("[", "]"), "loss": ("{{", "}}")}
_ENTITIES = {ord(character): f"#{ord(character)};" for character in '#"<>&`;\\'}


class Drawing:
    """A drawing of a Pipe: print it, or let a notebook show it. Its methods give other formats, as strings.

    >>> from torch import nn
    >>> from pippy import Pipe
    >>> drawing = Pipe.from_sequential(nn.Sequential(nn.Linear(2, 5), nn.ReLU())).draw()
    >>> print(drawing)
    ●   input_1  ─▶ submod_0
    ▼ [submod_0]   15 parameters
    ●   _0       ─▶ submod_1
    ▼ [submod_1]   0 parameters
    ●   _1       ─▶ output
    ▼ [output]
    backward: none, as the Pipe has no loss
    """

    def __init__(self, content: Content) -> None:
        self._content = content

    def __str__(self) -> str:
        return text_drawing(self._content)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """What a notebook shows: the SVG and the table."""
        return html(self._content)

    def table(self) -> str:
        """The size of every stage; with the arguments of a call, what it receives, sends and computes in one forward.

        >>> from torch import nn
        >>> from pippy import Pipe
        >>> print(Pipe.from_sequential(nn.Sequential(nn.Linear(2, 5), nn.ReLU())).draw().table())
        stage      parameters   bytes   buffers   holds
        ───────────────────────────────────────────────
        submod_0           15    60 B       0 B   0
        submod_1            0     0 B       0 B   1
        ───────────────────────────────────────────────
        total              15    60 B       0 B
        backward: none, as the Pipe has no loss
        """
        return stages_table(self._content)

    def mermaid(self) -> str:
        """A Mermaid flowchart, for Markdown pages.

        >>> from torch import nn
        >>> from pippy import Pipe
        >>> print(Pipe.from_sequential(nn.Sequential(nn.Linear(2, 5), nn.ReLU())).draw().mermaid())
        flowchart LR
            n0(["input_1"])
            n1["submod_0<br/>15 parameters"]
            n2["submod_1<br/>0 parameters"]
            n3(["output"])
            n0 -->|"input_1"| n1
            n1 -->|"_0"| n2
            n2 -->|"_1"| n3
        <BLANKLINE>
        """
        return mermaid(self._content)

    def svg(self) -> str:
        """A picture for a browser or a document.

        >>> from torch import nn
        >>> from pippy import Pipe
        >>> drawing = Pipe.from_sequential(nn.Sequential(nn.Linear(2, 5), nn.ReLU())).draw()
        >>> drawing.svg()[:39]
        '<svg xmlns="http://www.w3.org/2000/svg"'
        """
        return pipe_svg(self._content)


def html(content: Content) -> str:
    """The HTML. A drawing or table that is wider than the page has a scroll bar of its own."""
    return f'<div style="overflow-x: auto">{pipe_svg(content)}{html_table(table_cells(content), total=True)}</div>'


def mermaid(content: Content) -> str:
    """A Mermaid flowchart. A thick arrow is a transmitted parameter, a dotted line joins copies of a parameter."""
    lines = ["flowchart LR"]
    for index, box in enumerate(content.structure.boxes):
        opening, closing = _SHAPES[box.kind]
        lines.append(f'    n{index}{opening}"{_text(_box_lines(content, box))}"{closing}')
    for value in content.structure.values:
        arrow, text = "==>" if value.origin else "-->", _text(_value_lines(content, value))
        lines += [f'    n{value.source} {arrow}|"{text}"| n{user}' for user in value.users]
    for group in content.structure.copies:
        text = _text([shortened(", ".join(group.names), _LONGEST), "replicated"])
        lines += [f'    n{one} -. "{text}" .- n{other}' for one, other in pairwise(group.boxes)]
    return "\n".join(lines) + "\n"


def _text(lines: list[str]) -> str:
    """
    >>> _text(['a "b"', "c"])
    'a #34;b#34;<br/>c'
    """
    return "<br/>".join(line.translate(_ENTITIES) for line in lines)


def _box_lines(content: Content, box: Box) -> list[str]:
    return [shortened(box.name, _LONGEST), *content.stage_texts(box)]


def _value_lines(content: Content, value: DrawnValue) -> list[str]:
    texts = [value.name, value.special, content.size_text(value, _LONGEST)]
    return [shortened(text, _LONGEST) for text in texts if text]


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


Point = tuple[float, float]

LETTER, LINE = 6.7, 14  # the size of a letter of the labels, in pixels
_HEAD = 7.0
_INK = "#1f2328"
_FILLS = {"stage": "#e8f1ff", "loss": "#ffecec", "output": "#f3f4f6"}
_RIMS = {"stage": "#3b6fb6", "loss": "#b65050", "output": "#6b7280"}
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
    "rect.output": "fill: #22272e; stroke: #9198a1",
    "path.value": "stroke: #9da7b3",
    "polygon.value": "fill: #9da7b3",
    "path.parameter": "stroke: #e3954a",
    "polygon.parameter": "fill: #e3954a",
    "path.copies": "stroke: #b794f6",
    "polygon.copies": "fill: #b794f6",
}
_MARGIN, _COLUMN, _GAP = 16.0, 16.0, 12.0
_BOX, _BOX_HEIGHT, _VALUE_HEIGHT, _PORT = 330.0, 30.0, 22.0, 12.0
_INSET = 14.0  # from a box's left edge to its name
_NAME, _LABEL, _COPIES, _NOTE = 24, 60, 30, 120  # the longest texts, in letters


def pipe_svg(content: Content) -> str:
    """The text of the SVG. A thick arrow is a transmitted parameter, a dashed line joins copies of a parameter."""
    inside = Element("g")
    width, height = _Picture(inside, content).draw()
    lines = notes(content)
    for index, text in enumerate(lines):
        words(group(inside, text), (_MARGIN, height + LINE * (index + 1)), shortened(text, _NOTE))
    widest = max(min(len(text), _NOTE) for text in lines) * LETTER + 2 * _MARGIN
    stages = sum(box.kind == "stage" for box in content.structure.boxes)
    return svg_document(inside, (max(width, widest), height + LINE * (len(lines) + 1)), f"a Pipe of {stages} stages")


class _Picture:
    """Places all rows from top to bottom, and then draws them."""

    def __init__(self, inside: Element, content: Content) -> None:
        self.inside, self.content, self.structure = inside, content, content.structure
        self.columns = columns_in_order(self.structure.values)
        self.left = _MARGIN + _COLUMN * (max(self.columns.values(), default=-1) + 1)
        self.tops: dict[Box | DrawnValue, float] = {}
        self.heights: dict[Box, float] = {}
        self.bottom = _MARGIN
        for row in rows_of(self.structure):
            self.tops[row] = self.bottom
            if isinstance(row, Box):
                ports = max(len(self._arriving(row)), len(self._copies_at(row)))
                self.heights[row] = max(_BOX_HEIGHT, _PORT * (ports + 1))
            self.bottom += self.heights[row] + _GAP / 2 if isinstance(row, Box) else _VALUE_HEIGHT
        labels = max((len(self._label(value)) for value in self.structure.values), default=0)
        self.right = self.left + max(_BOX, _INSET + labels * LETTER)

    def draw(self) -> Point:
        """Draw all parts, and return the width and the height."""
        for value in self.structure.values:
            self._draw_value(value)
        width = self._draw_all_copies()
        for box in self.structure.boxes:
            self._draw_box(box)
        return width, self.bottom

    def _arriving(self, box: Box) -> list[DrawnValue]:
        return [value for value in self.columns if any(self.structure.boxes[user] is box for user in value.users)]

    def _copies_at(self, box: Box) -> list[ParameterCopies]:
        return [each for each in self.structure.copies if any(self.structure.boxes[at] is box for at in each.boxes)]

    def _port(self, box: Box, index: int, count: int) -> float:
        """The height at which the line with this number meets the side of a box."""
        return self.tops[box] + self.heights[box] / 2 + (index - (count - 1) / 2) * _PORT

    def _label(self, value: DrawnValue) -> str:
        special = "" if value.kind == "target" or not value.special else f"({value.special})"
        name = shortened(value.name, _LABEL // 2)
        room = _LABEL - len(name) - len(special) - 4
        return shortened("  ".join(filter(None, [name, special, self.content.size_text(value, room)])), _LABEL)

    def _draw_value(self, value: DrawnValue) -> None:
        """A label, and a line from it along the column of the value to each box that uses the value."""
        users = [self.structure.boxes[user] for user in value.users]
        way = f"{self.structure.boxes[value.source].name} → {', '.join(user.name for user in users)}"
        texts = [value.name, value.special, self.content.size_text(value), way]
        inside, style = group(self.inside, "\n".join(filter(None, texts))), "parameter" if value.origin else "value"
        column, y = _MARGIN + _COLUMN * self.columns[value], self.tops[value] + _VALUE_HEIGHT / 2
        start = [(self.left + _INSET - 4, y), (column, y)]
        for user in users:
            arriving = self._arriving(user)
            port = self._port(user, arriving.index(value), len(arriving))
            arrow(inside, [*start, (column, port), (self.left, port)], style)
            start = [(column, port)]
        words(inside, (self.left + _INSET, y + 4), self._label(value))

    def _draw_all_copies(self) -> float:
        """Join all copies, write their names at the right, and return the width of the drawing."""
        names, below, copies = self.right + _GAP + _COLUMN * len(self.structure.copies), 0.0, self.structure.copies
        for number, each in enumerate(sorted(copies, key=self._heights_of)):
            inside, heights = group(self.inside, "\n".join(each.names)), self._heights_of(each)
            edge, x = self.left + _BOX, self.right + _COLUMN * (1 + number)
            for start, end in pairwise(heights):
                line(inside, [(edge, start), (x, start), (x, end), (edge, end)], "copies")
            below = max(heights[0] + 4, below + LINE)
            words(inside, (names, below), _copies_label(each))
        widest = max((len(_copies_label(each)) for each in copies), default=0)
        return max(self.right, names + widest * LETTER if copies else 0) + _MARGIN

    def _heights_of(self, copies: ParameterCopies) -> list[float]:
        """The height at which each box holds its copy."""
        held = [(box, self._copies_at(box)) for box in map(self.structure.boxes.__getitem__, copies.boxes)]
        return [self._port(box, at.index(copies), len(at)) for box, at in held]

    def _draw_box(self, box: Box) -> None:
        if box.kind == "input":  # its row is that of its value
            return
        texts = self.content.stage_texts(box)
        held = self.content.stages[box.name].holds if box.computes else ()
        inside = group(self.inside, "\n".join([box.name, *texts, *held]))
        name = shortened(box.name, _NAME)
        width = _BOX if box.computes else len(name) * LETTER + 2 * _INSET
        rectangle(inside, (self.left, self.tops[box]), (width, self.heights[box]), box.kind)
        base = self.tops[box] + self.heights[box] / 2 + 4
        words(inside, (self.left + _INSET, base), name, bold=True)
        words(inside, (self.left + _BOX - _INSET, base), ", ".join(texts), "end")


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
    """A box of a drawing; the output has round ends."""
    radius = min(size[1] / 2, 13) if kind == "output" else 6
    numbers = {"x": corner[0], "y": corner[1], "width": size[0], "height": size[1], "rx": radius}
    colours = {"class": kind, "fill": _FILLS[kind], "stroke": _RIMS[kind], "stroke-width": "1.5"}
    ElementTree.SubElement(parent, "rect", {key: _number(number) for key, number in numbers.items()} | colours)


def words(parent: ElementTree.Element, at: Point, text: str, anchor: str = "start", bold: bool = False) -> None:
    """A line of text; ``at`` is on its base line."""
    attributes = {"x": _number(at[0]), "y": _number(at[1]), "text-anchor": anchor}
    ElementTree.SubElement(parent, "text", attributes | ({"font-weight": "bold"} if bold else {})).text = text


def line(parent: ElementTree.Element, points: Sequence[Point], kind: str) -> None:
    """A line through ``points``."""
    path = {"class": kind, "d": f"M{'L'.join(map(_pair, points))}", "fill": "none", "stroke-linejoin": "round"}
    ElementTree.SubElement(parent, "path", path | _LINES[kind])


def arrow(parent: ElementTree.Element, points: Sequence[Point], kind: str) -> None:
    """A line that ends in an arrowhead, which points to the right."""
    x, y = points[-1]
    line(parent, [*points[:-1], (x - _HEAD, y)], kind)
    head = [(x, y), (x - _HEAD, y - _HEAD / 2), (x - _HEAD, y + _HEAD / 2)]
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
    rules = (f".{_CLASS} {part} {{ {colours} }}" for part, colours in _DARK.items())
    return f"@media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}"


def _pair(point: Point) -> str:
    return f"{_number(point[0])},{_number(point[1])}"


def _number(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
