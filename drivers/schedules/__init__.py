"""When the stages compute: schedules, the programs they make, proofs, timelines and drawings. Pure Python."""

from pippy.drivers.schedules.checks.validate import validate
from pippy.drivers.schedules.communicate import add_communication
from pippy.drivers.schedules.drawings.svg import render_svg
from pippy.drivers.schedules.drawings.text import render_text
from pippy.drivers.schedules.drawings.trace import render_trace
from pippy.drivers.schedules.make import make_schedule
from pippy.drivers.schedules.orders.registry import register
from pippy.drivers.schedules.programs.program import Program
from pippy.drivers.schedules.programs.program_file import load_program, parse_program
from pippy.drivers.schedules.recompute import add_recompute
from pippy.drivers.schedules.simulation.costs import Costs
from pippy.drivers.schedules.simulation.simulate import Simulation, simulate, simulate_with
from pippy.drivers.schedules.simulation.timeline import Span, Timeline

__all__ = [
    "Costs",
    "Program",
    "Simulation",
    "Span",
    "Timeline",
    "add_communication",
    "add_recompute",
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
