"""When the stages compute: schedules, the programs they make, proofs, timelines and drawings. Pure Python."""

from pippy.drivers.schedules.communicate import add_communication
from pippy.drivers.schedules.costs import Costs
from pippy.drivers.schedules.make import make_schedule
from pippy.drivers.schedules.program import Program
from pippy.drivers.schedules.program_file import load_program, parse_program
from pippy.drivers.schedules.registry import register
from pippy.drivers.schedules.render_svg import render_svg
from pippy.drivers.schedules.render_text import render_text
from pippy.drivers.schedules.render_trace import render_trace
from pippy.drivers.schedules.simulate import Simulation, simulate, simulate_with
from pippy.drivers.schedules.timeline import Span, Timeline
from pippy.drivers.schedules.validate import validate

__all__ = [
    "Costs",
    "Program",
    "Simulation",
    "Span",
    "Timeline",
    "add_communication",
    "load_program",
    "make_schedule",
    "parse_program",
    "register",
    "render_svg",
    "render_text",
    "render_trace",
    "simulate",
    "simulate_with",
    "validate",
]
