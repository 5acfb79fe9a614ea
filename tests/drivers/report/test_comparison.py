"""The page that shows two recordings side by side."""

import re
from dataclasses import replace

import pytest

from pippy.drivers.base.errors import DriverError
from pippy.drivers.report.findings import step_parts
from pippy.drivers.report.record import Recording
from pippy.drivers.report.step_data import BatchSize
from pippy.ir.base.readable import duration, percent
from tests.drivers.report.browser import cut_at, needs_browser, opened
from tests.drivers.report.test_report import read, tables
from tests.drivers.synthetic_steps import slow_stage


def lasting(*seconds, **options):
    return Recording(steps=[slow_stage(each, **options) for each in seconds])


@pytest.fixture
def page(tmp_path):
    return tmp_path / "comparison.html"


def test_it_says_what_is_shorter_and_which_part_differs_most(page):
    before, after = lasting(3.0, 3.1, 2.9, flight=0.5), lasting(1.0, flight=0.2)
    before.compare(after, page, names=("uneven", "even"))
    read(page)
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


def test_other_numbers_of_stages_are_compared_too(page):
    lasting(2.0, stages=3).compare(lasting(2.0, stages=4, slow=3), page)
    stages = tables(page)[1]
    assert [[cell for cell, _ in row[1:]] for row in stages[1:]] == [
        ["2 s", "2 s", "0 s"],
        ["2 s", "2 s", "0 s"],
        ["4 s", "2 s", "−2 s"],
        ["–", "4 s", "–"],
    ]


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
