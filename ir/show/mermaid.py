"""A Pipe as a diagram that other tools lay out: Mermaid, for Markdown pages."""

from itertools import pairwise

from pippy.ir.base.readable import shortened
from pippy.ir.show.content import Content
from pippy.ir.show.structure import Box, DrawnValue

_LONGEST = 48
_SHAPES = {"input": ("([", "])"), "output": ("([", "])"), "stage": ("[", "]"), "loss": ("{{", "}}")}
_ENTITIES = {ord(character): f"#{ord(character)};" for character in '#"<>&`;\\'}


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
