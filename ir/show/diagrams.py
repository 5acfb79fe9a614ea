"""A Pipe as a diagram that other tools lay out: Mermaid, for Markdown pages, and DOT, for Graphviz."""

from collections.abc import Iterator

from pippy.ir.base.readable import shortened
from pippy.ir.show.content import Content
from pippy.ir.show.structure import Box, DrawnValue

_LONGEST = 48
_MERMAID_SHAPES = {"input": ("([", "])"), "output": ("([", "])"), "stage": ("[", "]"), "loss": ("{{", "}}")}
_DOT_SHAPES = {"input": "ellipse", "output": "ellipse", "stage": "box", "loss": "hexagon"}
_ENTITIES = {ord(character): f"#{ord(character)};" for character in '#"<>&`;\\'}


def mermaid(content: Content) -> str:
    """A Mermaid flowchart. A thick arrow is a transmitted parameter, a dotted line joins copies of a parameter."""
    lines = ["flowchart LR"]
    for index, box in enumerate(content.structure.boxes):
        opening, closing = _MERMAID_SHAPES[box.kind]
        lines.append(f'    n{index}{opening}"{_mermaid_text(_box_lines(content, box))}"{closing}')
    for value, user in _edges(content):
        arrow = "==>" if value.origin else "-->"
        lines.append(f'    n{value.source} {arrow}|"{_mermaid_text(_value_lines(content, value))}"| n{user}')
    for one, other, names in _copy_lines(content):
        lines.append(f'    n{one} -. "{_mermaid_text([names, "replicated"])}" .- n{other}')
    return "\n".join(lines) + "\n"


def _mermaid_text(lines: list[str]) -> str:
    """
    >>> _mermaid_text(['a "b"', "c"])
    'a #34;b#34;<br/>c'
    """
    return "<br/>".join(line.translate(_ENTITIES) for line in lines)


def dot(content: Content) -> str:
    """A Graphviz digraph. A bold arrow is a transmitted parameter, a dashed line joins copies of a parameter."""
    lines = [
        "digraph pipe {",
        "    rankdir=LR;",
        '    node [fontname="sans-serif"];',
        '    edge [fontname="sans-serif"];',
    ]
    for index, box in enumerate(content.structure.boxes):
        label = _dot_text(_box_lines(content, box))
        lines.append(f'    n{index} [shape={_DOT_SHAPES[box.kind]}, label="{label}"];')
    for value, user in _edges(content):
        style = ", style=bold" if value.origin else ""
        lines.append(f'    n{value.source} -> n{user} [label="{_dot_text(_value_lines(content, value))}"{style}];')
    for one, other, names in _copy_lines(content):
        label = _dot_text([names, "replicated"])
        lines.append(f'    n{one} -> n{other} [label="{label}", style=dashed, dir=none, constraint=false];')
    return "\n".join([*lines, "}"]) + "\n"


def _dot_text(lines: list[str]) -> str:
    r"""
    >>> print(_dot_text(['a "b"', r"c\d"]))
    a \"b\"\nc\\d
    """
    return "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)


def _edges(content: Content) -> Iterator[tuple[DrawnValue, int]]:
    return ((value, user) for value in content.structure.values for user in value.users)


def _copy_lines(content: Content) -> Iterator[tuple[int, int, str]]:
    """A line between each box with a copy and the next, with the names of the copied parameters."""
    for group in content.structure.copies:
        for one, other in zip(group.boxes, group.boxes[1:]):
            yield one, other, shortened(", ".join(group.names), _LONGEST)


def _box_lines(content: Content, box: Box) -> list[str]:
    return [shortened(box.name, _LONGEST), *content.stage_texts(box)]


def _value_lines(content: Content, value: DrawnValue) -> list[str]:
    texts = [value.name, value.special, content.size_text(value, _LONGEST)]
    return [shortened(text, _LONGEST) for text in texts if text]
