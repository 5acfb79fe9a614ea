"""The colours of what workers do in a step. Passes are bright; idle time is a shade of the page; starting is hatched."""

from pippy.drivers.plan.drawings.colours import DARK_FAINT, DARK_GROUND, DARK_INK, NAMED, in_the_dark
from pippy.drivers.plan.language.instructions import KINDS
from pippy.drivers.report.activity import Cause

FILLS = {
    **{str(key): kind.colour for key, kind in KINDS.items() if kind.colour},
    Cause.STARTING: "#8d96a1",
    Cause.FILL: "#eceff2",
    Cause.WAITING: "#fad0d0",
    Cause.TRANSFER: "#f5ac3d",
    Cause.SENDING: "#c9683c",
    Cause.ADDING: "#d6487d",
    Cause.PYTHON: "#565b63",
    Cause.DRAIN: "#eceff2",
}
DARK_FILLS = FILLS | {
    Cause.STARTING: "#4f5964",
    Cause.FILL: "#20262c",
    Cause.WAITING: "#5b3038",
    Cause.PYTHON: "#8a919b",
    Cause.DRAIN: "#20262c",
}
HATCHED = Cause.STARTING


def css_class(kind: str) -> str:
    """The class of what has a colour.

    >>> css_class("adding up")
    'k-adding-up'
    """
    return f"k-{kind.replace(' ', '-')}"


def dark_colours() -> str:
    """The style sheet that gives a drawing of a step, and what has the same classes, the colours of dark pages."""
    changed = {kind: colour for kind, colour in DARK_FILLS.items() if colour != FILLS[kind]}
    boxes = {f".step .{css_class(kind)} rect": f"fill: {colour}" for kind, colour in changed.items() if kind != HATCHED}
    swatches = {f"i.{css_class(kind)}": f"background-color: {colour} !important" for kind, colour in changed.items()}
    others = {
        ".step": f"fill: {DARK_INK}",
        ".step .ground": f"fill: {DARK_GROUND}",
        ".step .axis line": f"stroke: {DARK_FAINT}",
        ".step .box text": f"fill: {NAMED}",
        ".step .hatch rect": f"fill: {DARK_FILLS[HATCHED]}",
        ".step .hatch path": f"stroke: {DARK_GROUND}",
    }
    return in_the_dark(others | boxes | swatches)
