"""The drawings: exact text, well-formed SVG, trace events that add up; of programs and of recorded runs."""

import json
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from pippy.drivers.plan import Span, Timeline, make_schedule, render_svg, render_text, render_trace, simulate
from pippy.drivers.plan.language.errors import ArgumentError
from pippy.drivers.plan.language.instructions import Compute, Op

RECORDED = Timeline(
    [
        [Span(Compute(Op.FORWARD, 0, 0), 0.0, 0.1), Span(Compute(Op.FORWARD, 0, 1), 0.1, 0.3)],
        [Span(Compute(Op.FORWARD, 1, 0), 0.2, 0.3)],
    ]
)


def test_a_recorded_run_is_drawn_like_a_simulated_one():
    assert render_text(RECORDED) == "0 | F0 F1 --\n1 | .  .  F0"
    assert render_text(RECORDED, step=0.3) == "0 | F1\n1 | F0"


def test_a_grid_too_wide_to_read_is_refused():
    with pytest.raises(ArgumentError, match=r"a grid of 30000 columns is unreadable; pass a longer step"):
        render_text(RECORDED, step=1e-5)
    with pytest.raises(ArgumentError, match=r"step=0 must be a number above zero"):
        render_text(RECORDED, step=0)


def test_a_zero_cost_pass_is_still_drawn():
    program = make_schedule("1f1b", workers=1, chunks=1)
    assert render_text(simulate(program, forward=0).timeline).count("|") == 1


def test_an_empty_timeline_is_drawn_as_nothing():
    assert render_text(Timeline([[], []])) == "0 | .\n1 | ."
    assert render_svg(Timeline([[]])).count("<rect") == 1  # the ground


def test_the_svg_has_one_box_for_each_pass():
    program = make_schedule("zb_v", workers=3, chunks=4)
    root = ElementTree.fromstring(render_svg(program))
    titles = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 3 * 6 * 4
    assert titles[0] == "F0.0: 0 to 0.5"


def test_the_boxes_of_a_worker_do_not_overlap():
    root = ElementTree.fromstring(render_svg(make_schedule("1f1b", workers=2, chunks=5)))
    boxes = [
        (box.get("y"), float(box.get("x") or 0), float(box.get("width") or 0))
        for box in root.iter()
        if "rect" in box.tag
    ]
    for (row, left, width), (next_row, next_left, _) in pairwise(boxes):
        assert row != next_row or next_left >= left + width - 0.02


def test_the_trace_adds_up():
    result = simulate(make_schedule("interleaved_1f1b", workers=2, chunks=3, stages_per_worker=2))
    events = json.loads(render_trace(result.timeline, unit=10.0))["traceEvents"]
    passes = [event for event in events if event["ph"] == "X"]
    assert len(passes) == 2 * 2 * 2 * 3
    assert max(event["ts"] + event["dur"] for event in passes) == float(result.makespan) * 10
    for worker, idle in enumerate(result.idle):
        busy = sum(event["dur"] for event in passes if event["tid"] == worker)
        assert busy == float(result.makespan - idle) * 10


@pytest.mark.parametrize("spans", [[(0.0, 2.0), (1.0, 3.0)], [(1.0, 0.5)], [(-1.0, 1.0)]])
def test_a_timeline_that_cannot_be_is_refused(spans):
    with pytest.raises(ArgumentError, match=r"worker 0 runs F0\.0 from .* in order of time"):
        Timeline([[Span(Compute(Op.FORWARD, 0, 0), *span) for span in spans]])
