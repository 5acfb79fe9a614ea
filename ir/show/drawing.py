"""The class `Drawing`, which `pipe.draw()` returns: a drawing of a Pipe in several formats, among them Mermaid and HTML."""

from itertools import pairwise

from pippy.ir.base.readable import shortened
from pippy.ir.show.content import Content, stages_table, table_cells
from pippy.ir.show.structure import Box, DrawnValue
from pippy.ir.show.svg import pipe_svg
from pippy.ir.show.tables import html_table
from pippy.ir.show.text_drawing import text_drawing

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
