"""The shapes in the SVGs of Pipes. All text goes through ElementTree, so it is escaped.

Colours are attributes of the elements and the ground is drawn, so an SVG can be read in a page of any theme. Its style sheet
has only the colours for readers who prefer dark pages, and names its own class, so it leaves the styles of a page alone.
"""

from collections.abc import Sequence
from xml.etree import ElementTree

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
