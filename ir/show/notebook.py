"""A Pipe as HTML, for notebooks: the drawing and the table of stages.

The drawing has a background of its own; the table takes the colours of the page. So both are readable in any theme.
"""

from pippy.ir.show.content import Content
from pippy.ir.show.html_table import html_table
from pippy.ir.show.stages_table import table_cells
from pippy.ir.show.svg import pipe_svg


def html(content: Content) -> str:
    """The HTML. A drawing or table that is wider than the page has a scroll bar of its own."""
    return f'<div style="overflow-x: auto">{pipe_svg(content)}{html_table(table_cells(content), total=True)}</div>'
