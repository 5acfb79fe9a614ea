"""A Pipe as a diagram for other tools to lay out: Mermaid, for Markdown pages, and DOT, for Graphviz."""

from collections.abc import Iterator

from pippy.ir.show.flow import Box, Value
from pippy.ir.show.picture import Picture, tag
from pippy.ir.show.units import shortened

_LONGEST = 48
_MERMAID_SHAPES = {"input": ("([", "])"), "output": ("([", "])"), "stage": ("[", "]"), "loss": ("{{", "}}")}
_DOT_SHAPES = {"input": "ellipse", "output": "ellipse", "stage": "box", "loss": "hexagon"}
_ENTITIES = {ord(character): f"#{ord(character)};" for character in '#"<>&`;\\'}


def mermaid(picture: Picture) -> str:
    """A Mermaid flowchart. A thick arrow is a parameter that travels, a dotted line joins copies of a parameter."""
    lines = ["flowchart LR"]
    for index, box in enumerate(picture.flow.boxes):
        opening, closing = _MERMAID_SHAPES[box.kind]
        lines.append(f'    n{index}{opening}"{_mermaid_text(_box_lines(picture, box))}"{closing}')
    for value, user in _edges(picture):
        arrow = "==>" if value.origin else "-->"
        lines.append(f'    n{value.source} {arrow}|"{_mermaid_text(_value_lines(picture, value))}"| n{user}')
    for one, other, names in _copies(picture):
        lines.append(f'    n{one} -. "{_mermaid_text([names, "replicated"])}" .- n{other}')
    return "\n".join(lines) + "\n"


def _mermaid_text(lines: list[str]) -> str:
    """
    >>> _mermaid_text(['a "b"', "c"])
    'a #34;b#34;<br/>c'
    """
    return "<br/>".join(line.translate(_ENTITIES) for line in lines)


def dot(picture: Picture) -> str:
    """A Graphviz digraph. A bold arrow is a parameter that travels, a dashed line joins copies of a parameter."""
    lines = [
        "digraph pipe {",
        "    rankdir=LR;",
        '    node [fontname="sans-serif"];',
        '    edge [fontname="sans-serif"];',
    ]
    for index, box in enumerate(picture.flow.boxes):
        label = _dot_text(_box_lines(picture, box))
        lines.append(f'    n{index} [shape={_DOT_SHAPES[box.kind]}, label="{label}"];')
    for value, user in _edges(picture):
        style = ", style=bold" if value.origin else ""
        lines.append(f'    n{value.source} -> n{user} [label="{_dot_text(_value_lines(picture, value))}"{style}];')
    for one, other, names in _copies(picture):
        label = _dot_text([names, "replicated"])
        lines.append(f'    n{one} -> n{other} [label="{label}", style=dashed, dir=none, constraint=false];')
    return "\n".join([*lines, "}"]) + "\n"


def _dot_text(lines: list[str]) -> str:
    r"""
    >>> print(_dot_text(['a "b"', r"c\d"]))
    a \"b\"\nc\\d
    """
    return "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)


def _edges(picture: Picture) -> Iterator[tuple[Value, int]]:
    return ((value, user) for value in picture.flow.values for user in value.users)


def _copies(picture: Picture) -> Iterator[tuple[int, int, str]]:
    """A line between each box with a copy and the next, and the names of what is copied."""
    for group in picture.flow.replicas:
        for one, other in zip(group.boxes, group.boxes[1:]):
            yield one, other, shortened(", ".join(group.names), _LONGEST)


def _box_lines(picture: Picture, box: Box) -> list[str]:
    return [shortened(box.name, _LONGEST), *picture.figures(box)]


def _value_lines(picture: Picture, value: Value) -> list[str]:
    texts = [value.name, tag(value), picture.size_text(value, _LONGEST)]
    return [shortened(text, _LONGEST) for text in texts if text]
