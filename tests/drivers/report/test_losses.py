"""What is lost in a step, two steps beside each other, and the colours of both."""

import re
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pippy.drivers.base.errors import DriverError
from pippy.drivers.plan import add_communication, make_schedule, simulate
from pippy.drivers.plan.drawings import DARK_GROUND, GROUND, NAMED, in_the_dark
from pippy.drivers.plan.language.edges import Replicated
from pippy.drivers.plan.language.instructions import KINDS, Compute, Receive, Send
from pippy.drivers.report.activity import Activity, Cause
from pippy.drivers.report.drawings import DARK_FILLS, FILLS, dark_rules
from pippy.drivers.report.findings import StepPart, critical_path, losses, step_parts
from pippy.drivers.report.record import Recording
from pippy.drivers.report.step_data import BatchSize
from pippy.ir.base.readable import duration, percent
from tests.drivers.report.browser import cut_at, needs_browser, opened
from tests.drivers.report.test_record import programs, randoms, times
from tests.drivers.report.test_report import tables
from tests.drivers.synthetic_steps import slow_stage, stepped


@settings(max_examples=30, deadline=None)
@given(programs(), randoms, times, times, times, st.none() | times)
def test_the_critical_path_is_a_chain_of_what_had_to_follow_one_another(
    program, dice, flight, starting, ending, adding
):
    """It has no gap, and no waiting. If what it has of transfers took no time, the step would still take the rest: that is so
    only if each part of it had to wait for the part before."""
    durations = {each: dice.random() for order in program.orders for each in order if not isinstance(each, Receive)}
    cost = lambda each: durations.get(each, 0.0)  # noqa: E731
    step = stepped(program, cost, flight, starting, ending, adding)
    path = critical_path(program, step.activities)
    assert (path[0][1].start, path[-1][1].end) == (0.0, pytest.approx(step.makespan))
    assert all(one.end == other.start for (_, one), (_, other) in pairwise(path))
    assert not {each.cause for _, each in path} & {Cause.WAITING, Cause.FILL, Cause.DRAIN}
    transfers = sum(each.duration for _, each in path if each.cause == Cause.TRANSFER)
    others = stepped(program, cost, 0.0, starting, ending, adding)
    assert others.makespan >= step.makespan - transfers - 1e-9


@settings(max_examples=25, deadline=None)
@given(programs(), randoms, times, times, times, st.none() | times)
def test_the_parts_add_up_to_the_measured_step(program, dice, flight, starting, ending, adding):
    step = stepped(program, lambda each: dice.random(), flight, starting, ending, adding)
    found = step_parts(step)
    assert sum(found.values()) == pytest.approx(step.makespan)
    assert min(found.values()) >= 0
    shown = list(losses(step).values())
    assert shown == sorted(shown, reverse=True)


def test_each_part_is_what_the_step_would_be_shorter_without_it():
    """A step is made with all of them, and again with one of them taken away."""
    given = {"flight": 0.5, "starting": 3.0, "ending": 1.0, "adding": 2.0}
    found = step_parts(slow_stage(3.0, **given))
    ends = {
        "flight": StepPart.TRANSFER,
        "starting": StepPart.STARTING,
        "ending": StepPart.PYTHON,
        "adding": StepPart.ADDING,
    }
    for name, part in ends.items():
        without = slow_stage(3.0, **{key: value for key, value in given.items() if key != name})
        assert found[part] == pytest.approx(slow_stage(3.0, **given).makespan - without.makespan)
    program = slow_stage(3.0).program
    even = float(simulate(program, 1.5, 0.75, 0.75, backward=1.5).makespan)
    assert found[StepPart.UNEVEN] == pytest.approx(slow_stage(3.0).makespan - even)
    assert found[StepPart.COMPUTING] == pytest.approx(4 * 12.0 / 4)
    assert found[StepPart.SCHEDULE] == pytest.approx(even - 12.0)


def test_sending_that_keeps_the_sender_from_its_next_pass_is_on_the_path():
    """The first worker sends for 5 s after each forward of 1 s."""
    program = add_communication(make_schedule("forward_only", workers=2, chunks=4))
    step = stepped(program, lambda each: {Compute: 1.0, Send: 5.0}.get(type(each), 0.0))
    assert step.makespan == 24.0
    path = [(worker, str(each.cause), each.duration) for worker, each in critical_path(program, step.activities)]
    assert path == [*[(0, "computing", 1.0), (0, "sending", 5.0)] * 4]


def test_one_slow_pass_is_a_loss_of_its_own():
    """Medians do not show it; whoever waits for it does."""
    program = add_communication(make_schedule("1f1b", workers=3, chunks=5))
    step = stepped(program, lambda each: {"F0.1": 100.0}.get(str(each), float(isinstance(each, Compute))))
    assert next(iter(losses(step))) == StepPart.SLOWER
    assert step_parts(step)[StepPart.UNEVEN] == 0


def test_adding_up_is_that_of_the_last_worker_to_bring_gradients():
    """Worker 0 waits from second 1 for the gradients that worker 1 has at second 9: until then, worker 1 counts."""
    program = make_schedule("1f1b", workers=2, chunks=1)
    program = replace(program, replicated=(Replicated("weight", (0, 1)),))
    worker0 = [Activity(Cause.PYTHON, 0.0, 1.0), Activity(Cause.ADDING, 1.0, 10.0)]
    worker1 = [Activity(Cause.SENDING, 0.0, 9.0, 0, 0), Activity(Cause.ADDING, 9.0, 9.5)]
    path = critical_path(program, [worker0, worker1])
    assert [(worker, str(each.cause), each.duration) for worker, each in path] == [
        (1, "sending", 9.0),
        (0, "adding up", 1.0),
    ]


# The page that shows two recordings side by side.


def lasting(*seconds, **options):
    return Recording(steps=[slow_stage(each, **options) for each in seconds])


@pytest.fixture
def page(tmp_path):
    return tmp_path / "comparison.html"


def test_it_says_what_is_shorter_and_which_part_differs_most(page):
    before, after = lasting(3.0, 3.1, 2.9, flight=0.5), lasting(1.0, flight=0.2)
    before.compare(after, page, names=("uneven", "even"))
    text = page.read_text()
    first, second = (each.typical.makespan for each in (before, after))
    shorter = percent(1 - second / first)
    assert f"even takes {duration(second)} for a step, uneven {duration(first)}: {shorter} shorter." in text
    assert "The largest difference is uneven stages: 7 s less." in text
    lengths = sorted(each.makespan for each in before.steps)
    ranges = f"{duration(lengths[0])} to {duration(lengths[2])} in uneven (3 steps)"
    assert f"All steps of one are shorter than all of the other: {ranges}" in text


def test_the_table_has_both_and_their_differences(page):
    before, after = lasting(3.0, flight=0.5, starting=1.0), lasting(1.0, flight=0.2, adding=2.0)
    before.compare(after, page)
    found = {row[0][0]: [cell for cell, _ in row[1:]] for row in tables(page)[0]}
    first, second = step_parts(before.typical), step_parts(after.typical)
    assert found.pop("part") == ["before", "after", "difference"]
    total = found.pop("the step")
    assert total[:2] == [duration(each.typical.makespan) for each in (before, after)]
    assert set(found) == {str(part) for part in {**first, **second}}
    for part, cells in found.items():
        change = second.get(part, 0.0) - first.get(part, 0.0)
        sign = "+" if change > 1e-9 else "−" if change < -1e-9 else ""
        assert cells == [
            duration(first.get(part, 0.0)),
            duration(second.get(part, 0.0)),
            sign + duration(abs(change) if sign else 0.0),
        ]
    changes = [abs(second.get(part, 0.0) - first.get(part, 0.0)) for part in first | second]
    assert max(changes) == abs(second["uneven stages"] - first["uneven stages"])
    assert next(iter(found)) == "uneven stages"


def test_what_may_be_chance_is_said_to_be(page):
    lasting(2.0, 3.0, 4.0).compare(lasting(3.9, 2.9, 1.0), page)
    assert "The difference may be chance; record more of them." in page.read_text()
    lasting(2.0).compare(lasting(2.0), page)
    assert "after takes 20 s for a step, before 20 s." in page.read_text()


def test_mini_batches_of_other_sizes_are_not_compared_by_their_steps(page):
    sizes = (Recording(steps=[replace(slow_stage(2.0), batch=BatchSize(rows))]) for rows in (40, 80))
    next(sizes).compare(next(sizes), page)
    said = "compare samples per second, not steps: before 2 samples/s of 40 samples a step and after 4 samples/s of 80"
    assert said in page.read_text()


def test_what_is_no_recording_is_refused(page):
    with pytest.raises(
        DriverError, match=r"compare\(\) takes another Recording, as `driver.record\(\)` gives it, not 'x'"
    ):
        lasting(2.0).compare("x", page)
    with pytest.raises(DriverError, match="give two strings"):
        lasting(2.0).compare(lasting(2.0), page, names="ab")
    with pytest.raises(DriverError, match="nothing was recorded"):
        lasting(2.0).compare(Recording(), page)
    assert not page.exists()


ACTS = """
const data = document.documentElement.dataset, views = document.querySelectorAll(".view");
document.querySelector("[data-do=in]").click();
data.ticks = [...views].map(each => [...each.querySelectorAll(".axis text")].map(text => text.textContent).join()).join("|");
data.rows = [...views].map(each => Math.round(each.getBoundingClientRect().top)).join();
"""


@needs_browser
def test_both_timelines_show_the_same_time(page):
    lasting(3.0, flight=0.5).compare(lasting(1.0), page, names=("</script><i>", "&"))
    spans = re.findall(r'"?span&quot;: ([\d.]+)', page.read_text())
    assert len(spans) == 2 and len(set(spans)) == 1
    _, found = opened(page, ACTS)
    assert found.get("error") is None
    one, other = found["ticks"].split("|")
    assert one == other == "10 s,15 s,20 s"
    assert len(set(re.findall(r"\d+", found["rows"]))) == 1, "they are side by side"


@needs_browser
def test_nothing_of_a_comparison_is_cut_at_400_pixels(page):
    lasting(3.0, flight=0.5).compare(lasting(1.0), page, names=("with_the_new_network_cards", "with_the_old_ones"))
    assert cut_at(page, 400) == ""


# The colours of a recorded step differ, also for readers who see no red, no green or no blue, on light and dark pages.


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


def times_of(matrix, vector):
    return [sum(a * b for a, b in zip(row, vector)) for row in matrix]


def seen(colour, eye):
    """A colour in Oklab, where distances are about as large as they look."""
    cones = times_of(CONES, [min(max(each, 0), 1) for each in times_of(EYES[eye], linear(colour))])
    return times_of(OKLAB, [each ** (1 / 3) for each in cones])


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


def test_names_are_read_in_all_passes():
    """The contrast that web pages are to have: 4.5 to 1."""
    colours = [each.colour for each in KINDS.values() if each.colour]
    light = [times_of([(0.2126, 0.7152, 0.0722)], linear(each))[0] for each in colours]
    (dark,) = times_of([(0.2126, 0.7152, 0.0722)], linear(NAMED))
    assert min((each + 0.05) / (dark + 0.05) for each in light) > 4.5


def test_a_picture_has_the_colours_of_dark_pages_and_hatches_what_starts():
    text = slow_stage(1.0, starting=2.0).svg()
    assert in_the_dark(dark_rules()) in text
    assert (
        len(re.findall(r'class="box k-starting"[^>]*><title>.*?</title><rect [^>]*fill="url\(#hatch\)"', text, re.S))
        == 4
    )
    for cause in (Cause.FILL, Cause.WAITING, Cause.PYTHON):
        assert f".pippy-timeline .k-{cause} rect {{ fill: {DARK_FILLS[cause]} }}" in text
    assert f".pippy-timeline .hatch rect {{ fill: {DARK_FILLS[Cause.STARTING]} }}" in text
