"""The report about a step. Its parts, from top to bottom:

title ─ steps, to click through ─ what ran ─ largest loss, and other findings ─ timeline (measured above predicted) ─
where the time went ─ stages ─ values between workers ─ memory
"""

import re
from collections.abc import Callable, Sequence
from html import escape

from pippy.drivers.plan.cost.held_bytes import HeldBytes
from pippy.drivers.plan.language.program import Program
from pippy.drivers.report.document import html_document, parts_bar, sections, what_ran
from pippy.drivers.report.findings import findings
from pippy.drivers.report.memory_drawing import memory_drawing
from pippy.drivers.report.step_data import StepData
from pippy.drivers.report.steps_strip import steps_strip
from pippy.drivers.report.tables import memory_table, stages, times, traffic
from pippy.drivers.report.timeline_view import timeline

Counted = Callable[
    [Program], Sequence[HeldBytes] | None
]  # what each worker should hold in a program; None if not known


def page(
    step: StepData, recorded: Sequence[StepData], dropped: int, title: str, counted: Counted = lambda _: None
) -> str:
    """The HTML of the report about one of the ``recorded`` steps of a recording, with others of them to click on."""
    strip = steps_strip(step, recorded, dropped, lambda each: about(each, counted(each.program)))
    return html_document(title, f'{strip}<main id="step">{about(step, counted(step.program))}</main>')


def about(step: StepData, counted: Sequence[HeldBytes] | None = None) -> str:
    """All that a report says of one step, as HTML."""
    lead, *others = map(escape, findings(step))
    lead = re.sub(r"^(.*?\.)(?= |$)", r"<b>\1</b>", lead)
    said = "".join(f"<p>{sentence}</p>" for sentence in others)
    return (
        f'<p class="what">{what_ran(step)}</p>'
        f'<div class="findings"><p>{lead}</p>'
        f'<p class="hint">What made the step as long as it was:</p>{parts_bar(step, step.makespan)}{said}</div>'
    ) + sections(
        [
            ("Timeline", timeline(step)),
            ("Where the time went", times(step)),
            ("Stages", stages(step)),
            ("Values between workers", traffic(step)),
            ("Memory", memory_table(step) + memory_drawing(step, counted)),
        ]
    )
