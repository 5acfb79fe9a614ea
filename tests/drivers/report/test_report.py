"""What is made of recorded steps: sentences, trace events, a picture, a page."""

import re
from collections import defaultdict
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from pippy import PipelineDriver, pipe_split, pipeline
from pippy.drivers.base.errors import DriverError
from pippy.drivers.plan.language.instructions import Receive
from pippy.drivers.report.record import Recording
from pippy.drivers.report.step_data import BatchSize
from pippy.ir.base.readable import duration, percent
from tests.drivers.models import Chain, TiedLanguage
from tests.drivers.report.browser import cut_at, needs_browser, opened
from tests.drivers.synthetic_steps import slow_stage

SVG = "{http://www.w3.org/2000/svg}"
NASTY = "</script><script>document.documentElement.dataset.error='escaped'</script><b>&\"'"


# The page


class Page(HTMLParser):
    """A report, whose elements are closed in order, and what tests ask for: the text of each kind of element; the cells of all
    tables, with what is shown and the words behind it; the columns that cells name, and how many tables are in no box."""

    VOID = {"meta", "br"}

    def __init__(self, path):
        super().__init__()
        self.open, self.attributes, self.text = [], [], defaultdict(str)
        self.tables, self.columns, self.outside = [], [], 0
        self.feed(path.read_text())
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.attributes += attrs
        if tag == "table":
            self.outside += self.open[-1] != ("div", "wide")
            self.tables.append([]), self.columns.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append(["", ""])
            self.columns[-1] += [given["data-of"]] if tag == "td" else []
        elif tag == "span" and self.in_a_cell():
            self.tables[-1][-1][-1][1] += given.get("title", "")
        if tag not in self.VOID:
            self.open.append((tag, given.get("class")))

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.text[self.open[-1][0] if self.open else ""] += data
        if self.in_a_cell():
            self.tables[-1][-1][-1][0] += data

    def in_a_cell(self):
        return any(tag in ("th", "td") for tag, _ in self.open)


def tables(path):
    return Page(path).tables


class Positions(nn.Module):
    """An embedding of what is no input."""

    def __init__(self):
        super().__init__()
        self.position, self.last = nn.Embedding(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = x + self.position(torch.arange(8)).sum(0)
        pipe_split()
        return self.last(y)


def language_batch():
    tokens = torch.randint(0, 12, (6, 4))
    return tokens, tokens


def recorded(*steps, dropped=0):
    return Recording(steps=list(steps), dropped=dropped)


def test_the_page_needs_nothing_from_elsewhere(real, tmp_path):
    real.report(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#(plot0|hatch|head)\))", text)
    reader = Page(tmp_path / "report.html")
    assert [name for name, _ in reader.attributes if name in ("src", "href", "srcset")] == []
    assert "3 steps, and 2 earlier ones dropped" in text


def test_what_users_name_is_text_on_the_page(tmp_path):
    step = slow_stage(2.0, names=[NASTY, "worker1", "worker2", "worker3"])
    recorded(step).report(tmp_path / "report.html", title=NASTY)
    reader = Page(tmp_path / "report.html")
    assert reader.text["h1"] == reader.text["title"].split("F0.0")[0] == NASTY
    assert (tmp_path / "report.html").read_text().count("<script>") == 1
    ElementTree.fromstring(step.svg())


def test_the_page_says_what_was_found(tmp_path):
    recorded(slow_stage(3.0, flight=0.5, adding=0.25)).report(tmp_path / "report.html")
    text = re.sub(r"<[^>]+>", " ", (tmp_path / "report.html").read_text().split("</svg>")[1].split("<script>")[0])
    text = " ".join(text.split())
    assert "stage 2 slowest" in text
    assert "gradient_1 worker 2 → worker 1 4 1000 B 3.9 KiB 500 ms" in text
    assert "23.4 KiB in all" in text
    assert "worker 3 stage 3 1.0 MiB resident 1" in text
    assert "several hosts" not in text


def test_the_table_of_causes_shows_shares_and_tells_the_rest_on_pointing(tmp_path):
    step = slow_stage(3.0, flight=0.5)
    recorded(step).report(tmp_path / "report.html")
    (head, *rows), *_ = tables(tmp_path / "report.html")
    assert [shown for shown, _ in head] == ["worker", "idle", "computing", "fill", "waiting", "transfer", "drain"]
    assert len(rows) == 4
    for worker, (row, spent) in enumerate(zip(rows, step.spent())):
        cells = dict(zip((shown for shown, _ in head), row))
        for cause in ("computing", "fill", "waiting", "transfer", "drain"):
            seconds = sum(each for name, each in spent.items() if name.startswith(cause))
            shown, told = cells[cause]
            assert shown == (percent(seconds / step.makespan) if seconds else "–")
            assert (f"worker {worker}, {cause}: {duration(seconds)}" in told) == bool(seconds)
        assert cells["idle"][0] == percent(1 - spent["computing"] / step.makespan)
        assert "predicted: " in cells["idle"][1]
    assert "waiting: 20 s\nfor worker 1: 20 s\npredicted: 20 s" in rows[0][4][1]


def test_stages_and_values_have_the_names_of_the_modules(real, tmp_path):
    real.report(tmp_path / "report.html")
    _, stages, values, memory = tables(tmp_path / "report.html")
    assert [row[0][0].replace(" slowest", "") for row in stages[1:]] == [
        f"stage {each}layers.{each}" for each in range(4)
    ]
    assert {row[0][0] for row in values[1:]} >= {"tanh", "gradient of tanh"}
    assert {row[0][1] for row in values[1:]} >= {"tanh_grad_from_submod_1, as the program calls it"}
    assert [row[1][0] for row in memory[1:]] == [f"stage {each} (layers.{each})" for each in range(4)]
    step = real.steps[-1]
    assert re.search(r"Stage (\d) \(layers\.\1\) on worker \1 is the slowest", " ".join(step.findings()))
    titles = [each.text for each in ElementTree.fromstring(step.svg()).iter(f"{SVG}title")]
    assert sum("\nforward of stage 2 (layers.2), micro-batch 3\n" in each for each in titles) == 1
    assert any("\ngradient of tanh\n" in each for each in titles)


def test_the_page_has_an_arrow_for_each_value_hidden_until_it_is_asked_for(tmp_path):
    step = slow_stage(2.0, flight=0.25)
    recorded(step).report(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    drawing = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    lines = [each.attrib for each in drawing.iter("line") if "data-v" in each.attrib]
    receives = [(each, worker) for worker, order in enumerate(step.program.orders) for each in order]
    receives = [(each, worker) for each, worker in receives if isinstance(each, Receive)]
    assert {each["data-v"] for each in lines} == {f"{r.value}.{r.microbatch}/{worker}" for r, worker in receives}
    assert len(lines) == len(receives) == 24
    assert {each["visibility"] for each in lines} == {"hidden"}
    for receive, worker in receives:
        line = next(each for each in lines if each["data-v"] == f"{receive.value}.{receive.microbatch}/{worker}")
        assert float(line["data-s"]) == pytest.approx(step.send_times[receive.value, receive.microbatch, worker])
        assert float(line["data-e"]) >= float(line["data-s"]) + 0.25 - 1e-6
        assert float(line["y2"]) - float(line["y1"]) == 31 * (worker - receive.source)


def test_the_page_says_how_good_the_clocks_are(tmp_path):
    step = slow_stage(1.0, flight=0.5, ahead=[0, 0, 7.0, 7.0], clocks=["a", "a", "b", "b"])
    recorded(step).report(tmp_path / "report.html")
    assert f"may be off by {step.clock_errors[2] * 1e3:.3g} ms" in (tmp_path / "report.html").read_text()


def test_the_step_of_middle_length_is_shown(tmp_path):
    lengths = [slow_stage(each) for each in (3.0, 1.0, 2.0)]
    recorded(*lengths).report(tmp_path / "report.html")
    assert "shows step 2," in (tmp_path / "report.html").read_text()
    recorded(*lengths).report(tmp_path / "report.html", step=-2)
    assert "shows step 1," in (tmp_path / "report.html").read_text()


def test_memory_over_time_is_drawn_to_one_scale_and_to_the_time_of_the_step(tmp_path):
    """Worker 2 holds most, in its third instruction; the count has half of everything."""
    step = slow_stage(2.0, starting=1.0)
    most = [[10 * (worker + 1) + (17 if (worker, at) == (2, 2) else 0) for at in range(len(order) + 1)]
            for worker, order in enumerate(step.program.orders)]  # fmt: skip
    noted = tuple(replace(each, held=(its, its)) for each, its in zip(step.noted, most))
    counted = tuple(SimpleNamespace(most=[each // 2 for each in its]) for its in most)
    measured = recorded(replace(step, noted=noted))
    measured.report(tmp_path / "report.html", memory=SimpleNamespace(program=step.program, workers=counted))
    text = (tmp_path / "report.html").read_text()
    drawn = re.findall(r'<polyline class="held-(\w+)" [^>]*points="([^"]*)"', text)
    assert [name for name, _ in drawn] == ["measured", "counted"] * 4
    for at, (_, points) in enumerate(drawn):
        worker, its = at // 2, [each // (1 + at % 2) for each in most[at // 2]]
        places = [tuple(map(float, each.split(","))) for each in points.split()]
        assert places[0][0] == pytest.approx(900 * 1.0 / step.makespan, abs=0.1)
        assert min(y for _, y in places) == pytest.approx(2 + 78 * (1 - max(its) / 47), abs=0.1)
        if worker == 2:
            start, end = step.records[2].spans()[2]
            high = [x for x, y in places if y == min(y for _, y in places)]
            assert high == pytest.approx([900 * start / step.makespan, 900 * end / step.makespan], abs=0.1)
    assert "worker 2: at its peak measured 47 B, counted 23 B (-51.1 %)" in text
    recorded(step).report(tmp_path / "report.html")
    assert "<polyline" not in (tmp_path / "report.html").read_text()
    assert "driver.record(memory=True)" in (tmp_path / "report.html").read_text()


def test_the_page_has_the_lengths_of_all_steps_and_says_which_it_shows(tmp_path):
    steps = [slow_stage(each) for each in (3.0, 1.0, 2.0)]
    recorded(*steps).report(tmp_path / "report.html", step=1)
    bars = re.findall(
        r'<i title="(step \d: [^"]*)" (aria-current)? *style="height:([\d.]+)%"', (tmp_path / "report.html").read_text()
    )
    longest = max(each.makespan for each in steps)
    assert [(words, bool(here)) for words, here, _ in bars] == [
        (f"step {number}: {duration(each.makespan)}", number == 1) for number, each in enumerate(steps)
    ]
    assert [float(height) for *_, height in bars] == [
        pytest.approx(100 * each.makespan / longest, abs=0.1) for each in steps
    ]


def test_the_typical_step_is_the_one_that_a_report_shows(tmp_path):
    others = [replace(slow_stage(each), batch=BatchSize(64, 1024)) for each in (3.0, 1.0, 2.0)]
    assert recorded(slow_stage(9.0, chunks=8), *others).typical is others[2]
    recorded(*others).report(tmp_path / "report.html")
    what = f"20 s · {64 / 20:.3g} samples/s · {1024 / 20:.3g} tokens/s</p>"
    assert what in (tmp_path / "report.html").read_text()
    with pytest.raises(DriverError, match="nothing was recorded"):
        _ = Recording().typical


def test_samples_and_tokens_are_those_of_the_mini_batch(threads):
    """The rows of both micro-batches, and the whole numbers that a model with an embedding takes; the target is none."""
    x = torch.randn(8, 8)
    sizes = []
    labels = torch.randint(0, 12, (8, 3))
    for model, args in [(Chain(2), (x, x)), (TiedLanguage(), language_batch()), (Positions(), (x, labels))]:
        driver = PipelineDriver(pipeline(model, lambda y, t: y.float().mean() + 0.0 * t.float().mean()), threads)
        with driver.record() as recording:
            driver.run(2, *args)
        sizes.append((recording.steps[0].batch.samples, recording.steps[0].batch.tokens))
        driver.close()
    assert sizes == [(8, None), (6, 24), (8, None)]


def test_a_report_of_nothing_is_refused(tmp_path):
    for act in (Recording().report, Recording().save_trace):
        with pytest.raises(DriverError, match="nothing was recorded; run steps inside"):
            act(tmp_path / "nothing")
    with pytest.raises(DriverError, match="step=1: the recording has 1 step; give 0 to 0"):
        recorded(slow_stage(1.0)).report(tmp_path / "nothing", step=1)
    assert list(tmp_path.iterdir()) == []


ACTS = """
const data = document.documentElement.dataset, timeline = document.querySelector(".view");
const press = (name) => document.querySelector(`[data-do="${name}"]`).click();
data.first = data.view;
press("in");
data.in = data.view;
timeline.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
data.moved = data.view;
press("all");
data.all = data.view;
const first = document.querySelector("g.k-F");
first.scrollIntoView();
const box = first.querySelector("rect").getBoundingClientRect();
const at = {clientX: box.left + box.width / 2, clientY: box.top + box.height / 2, bubbles: true};
timeline.dispatchEvent(new PointerEvent("pointermove", at));
data.tip = document.getElementById("tip").textContent;
const wheel = () => timeline.dispatchEvent(new WheelEvent("wheel", {...at, deltaY: -500, cancelable: true}));
document.activeElement.blur();
data.scrolled = String(wheel()) + " " + data.view;
timeline.focus();
data.zoomed = String(wheel());
data.wheeled = data.view;
timeline.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"}));
data.left = String(wheel());
const share = document.querySelector("td [tabindex]");
share.dispatchEvent(new PointerEvent("pointermove", {bubbles: true}));
data.share = document.getElementById("tip").textContent;
const arrows = () => document.querySelectorAll(".arrows line[visibility=visible]").length;
press("all");
const transfer = document.querySelector("g.k-transfer");
const its = transfer.querySelector("rect").getBoundingClientRect();
data.hidden = arrows();
const there = {clientX: its.left + its.width / 2, clientY: its.top + 5, bubbles: true};
timeline.dispatchEvent(new PointerEvent("pointermove", there));
data.pointed = arrows();
press("arrows");
data.asked = arrows();
press("arrows");
timeline.dispatchEvent(new PointerEvent("pointerleave"));
data.again = arrows();
data.wide = document.documentElement.scrollWidth - innerWidth;
press("all");
document.body.style.width = "460px";
dispatchEvent(new Event("resize"));
const boxes = [...document.querySelectorAll(".box")].map(each => each.getBoundingClientRect());
const inside = timeline.getBoundingClientRect();
data.letters = document.querySelector(".row").getBoundingClientRect().height;
data.outside = boxes.filter(each => each.right > inside.right || each.left < inside.left).length;
data.ticks = [...document.querySelectorAll(".axis text")].map(each => each.textContent).join();
data.narrow = Math.max(...[...document.querySelectorAll("section > *")].map(each => each.getBoundingClientRect().right)) - 460;
"""


@needs_browser
def test_the_page_works_in_a_browser(tmp_path):
    """Its script runs without an error, zooms and moves, and names what is pointed at. There is no network to ask."""
    page = tmp_path / "report.html"
    names = [NASTY, "worker1", "worker2", "worker3"]
    recorded(slow_stage(2.0, flight=0.1, names=names)).report(page, title=NASTY)
    text, found = opened(page, ACTS, "#view=2,6")
    assert found.get("error") is None
    assert int(found["ready"]) == text.count('<g class="box')
    views = {name: tuple(map(float, found[name].split())) for name in ("first", "in", "moved", "all", "wheeled")}
    assert views["first"] == (2.0, 6.0)
    assert views["in"] == (3.0, 5.0)
    assert views["moved"] == pytest.approx((3.4, 5.4))
    assert views["all"][0] == 0
    assert views["wheeled"][1] - views["wheeled"][0] == pytest.approx(views["all"][1] / 2.71828, rel=1e-3)
    assert found["tip"].startswith("F0.0\nforward of stage 0, micro-batch 0\n1 s, from")
    assert int(found["wide"]) <= 0
    assert found["scrolled"] == f"true {found['all']}", "the wheel is the page's until the timeline has the focus"
    assert (found["zoomed"], found["left"]) == ("false", "true")
    assert "(worker 0), idle: 12.8 s\npredicted: 12 s, 60 %" in found["share"]
    assert [found[each] for each in ("hidden", "pointed", "asked", "again")] == ["0", "1", "24", "0"]
    assert float(found["letters"]) > 11, "letters of a narrow page are as large as those of a wide one"
    assert int(found["outside"]) == 0
    assert found["ticks"] == "0 s,10 s,20 s"
    assert float(found["narrow"]) < 450


# A narrow page


@pytest.fixture
def wide_names(tmp_path):
    """The report of workers with long names, which make tables wide."""
    names = [f"a_worker_with_a_long_name_{number}.of.a.host" for number in range(4)]
    page = tmp_path / "report.html"
    recorded(slow_stage(9.0, flight=0.5, names=names)).report(page)
    return page


def test_each_cell_of_a_table_names_its_column_for_a_narrow_page(wide_names):
    """Tables were cut at the edge of a narrow window: there a row is a block of cells, each under the name of its column."""
    text, page = wide_names.read_text(), Page(wide_names)
    assert len(page.tables) >= 4 and page.outside == 0
    for (heads, *_), cells in zip(page.tables, page.columns):
        assert cells == [shown for shown, _ in heads] * (len(cells) // len(heads)) and cells
    style = text.split("<style>")[1].split("</style>")[0]
    narrow = style.split("@media (max-width: 40rem) {")[1].split("\n}")[0]
    assert (
        "thead { display: none }" in narrow
        and "content: attr(data-of)" in narrow
        and "overflow-wrap: anywhere" in narrow
    )
    assert ".wide { overflow-x: auto }" in style  # on a page that is wider, a table scrolls in a box of its own


@needs_browser
def test_nothing_of_a_report_is_cut_at_400_pixels(wide_names):
    assert cut_at(wide_names, 400) == ""
