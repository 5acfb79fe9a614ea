"""The class `Drawing`, which `pipe.draw()` returns: a drawing of a Pipe in several formats."""

from pippy.ir.show.content import Content
from pippy.ir.show.mermaid import mermaid
from pippy.ir.show.notebook import html
from pippy.ir.show.stages_table import stages_table
from pippy.ir.show.svg import pipe_svg
from pippy.ir.show.text_drawing import text_drawing


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
