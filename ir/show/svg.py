"""A Pipe as an SVG: stages from left to right, or from top to bottom where they are many; the notes below."""

from xml.etree import ElementTree

from pippy.ir.show.picture import Picture, notes
from pippy.ir.show.svg_column import draw_column
from pippy.ir.show.svg_elements import LETTER, LINE, document, group, words
from pippy.ir.show.svg_row import draw_row
from pippy.ir.show.units import shortened

_ROW = 7  # boxes that are still readable side by side
_NOTE = 120


def svg(picture: Picture) -> str:
    """The text of the SVG. A thick arrow is a parameter that travels, a dashed line joins copies of a parameter."""
    content = ElementTree.Element("g")
    beside = sum(box.kind != "input" for box in picture.flow.boxes)
    width, height = (draw_row if beside <= _ROW else draw_column)(content, picture)
    lines = notes(picture)
    for index, text in enumerate(lines):
        words(group(content, text), (16, height + LINE * (index + 1)), shortened(text, _NOTE))
    widest = max(min(len(text), _NOTE) for text in lines) * LETTER + 32
    stages = sum(box.kind == "stage" for box in picture.flow.boxes)
    return document(content, (max(width, widest), height + LINE * (len(lines) + 1)), f"a Pipe of {stages} stages")
