"""The colours of a recorded step differ, also for readers who see no red, no green or no blue, on light and dark pages."""

import re
from itertools import combinations

import pytest

from pippy.drivers.plan.drawings import DARK_GROUND, GROUND, NAMED
from pippy.drivers.plan.language.instructions import KINDS
from pippy.drivers.report.activity import Cause
from pippy.drivers.report.drawings import DARK_FILLS, FILLS, dark_colours
from tests.drivers.synthetic_steps import slow_stage

# How each kind of eye sees linear red, green and blue: G. M. Machado et al., IEEE TVCG 15 (2009), severity 1
EYES = {
    "all colours": [(1, 0, 0), (0, 1, 0), (0, 0, 1)],
    "no red": [(0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)],
    "no green": [(0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)],
    "no blue": [(1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)],
}
CONES = [(0.4122, 0.5363, 0.0514), (0.2119, 0.6807, 0.1074), (0.0883, 0.2817, 0.6300)]
OKLAB = [(0.2105, 0.7936, -0.0041), (1.9780, -2.4286, 0.4506), (0.0259, 0.7828, -0.8087)]
PAGES = {"light": FILLS | {"page": GROUND}, "dark": DARK_FILLS | {"page": DARK_GROUND}}


def linear(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]


def times(matrix, vector):
    return [sum(a * b for a, b in zip(row, vector)) for row in matrix]


def seen(colour, eye):
    """A colour in Oklab, where distances are about as large as they look."""
    cones = times(CONES, [min(max(each, 0), 1) for each in times(EYES[eye], linear(colour))])
    return times(OKLAB, [each ** (1 / 3) for each in cones])


def distance(one, other, eye):
    return sum((a - b) ** 2 for a, b in zip(seen(one, eye), seen(other, eye))) ** 0.5


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("eye", EYES)
def test_colours_differ_for_all_eyes(page, eye):
    fills = {kind: colour for kind, colour in PAGES[page].items() if kind != Cause.DRAIN}
    close = {
        (one, other): round(found, 3)
        for one, other in combinations(fills, 2)
        if (found := distance(fills[one], fills[other], eye)) < 0.03
    }
    assert close == {}


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("eye", EYES)
def test_computing_starting_and_fill_are_clearly_apart(page, eye):
    fills = PAGES[page]
    assert distance(fills[Cause.STARTING], fills[Cause.FILL], eye) > 0.15
    for op in ("F", "B"):
        assert distance(fills[op], fills[Cause.STARTING], eye) > 0.06
        assert distance(fills[op], fills[Cause.FILL], eye) > 0.2


def test_the_colours_that_blue_and_green_had_before_would_fail():
    """Forward and the backward of weights were alike for eyes that see no red; starting and fill were for all."""
    assert distance("#7aa6e8", "#b6a3e3", "no red") < 0.03
    assert distance("#e3e6ea", "#eceef1", "all colours") < 0.03


def test_names_are_read_in_all_passes():
    """The contrast that web pages are to have: 4.5 to 1."""
    colours = [each.colour for each in KINDS.values() if each.colour]
    light = [times([(0.2126, 0.7152, 0.0722)], linear(each))[0] for each in colours]
    (dark,) = times([(0.2126, 0.7152, 0.0722)], linear(NAMED))
    assert min((each + 0.05) / (dark + 0.05) for each in light) > 4.5


def test_a_picture_has_the_colours_of_dark_pages_and_hatches_what_starts():
    text = slow_stage(1.0, starting=2.0).svg()
    assert dark_colours() in text.replace("&gt;", ">")
    assert len(re.findall(r'class="box k-starting"><title>.*?</title><rect [^>]*fill="url\(#hatch\)"', text, re.S)) == 4
    for cause in (Cause.FILL, Cause.WAITING, Cause.PYTHON):
        assert f".step .k-{cause} rect {{ fill: {DARK_FILLS[cause]} }}" in text
    assert f".step .hatch rect {{ fill: {DARK_FILLS[Cause.STARTING]} }}" in text
