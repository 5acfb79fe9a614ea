"""When the stages compute: schedules, the programs they make, proofs, timelines and drawings. Pure Python."""

from pippy.drivers.plan.cost.simulate import Costs, Simulation, Span, Timeline, simulate, simulate_with
from pippy.drivers.plan.drawings import render_svg, render_text, render_trace
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.language.program_file import load_program, parse_program
from pippy.drivers.plan.make import make_schedule
from pippy.drivers.plan.orders.registry import register
from pippy.drivers.plan.passes.communicate import add_communication
from pippy.drivers.plan.passes.rewrites import add_recompute
from pippy.drivers.plan.proofs.validate import validate

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
