"""What is found in recorded steps: sentences, trace events, and a picture."""

import json
import re
from collections import defaultdict
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from pippy.drivers.plan import add_communication, make_schedule
from pippy.drivers.plan.drawings import ticks
from pippy.drivers.plan.language.instructions import Compute, Receive, Send
from pippy.drivers.report.findings import off_cores
from tests.drivers.report.test_report import SVG
from tests.drivers.synthetic_steps import BYTES, slow_stage, stepped


def test_uneven_stages_lead_where_they_lose_most_and_what_is_promised_is_of_the_measured_step():
    now = slow_stage(9.0, flight=0.5)
    said = now.findings()[0]
    assert said.startswith("The largest loss is uneven stages: ")
    assert "Stage 2 on worker 2 is the slowest: 18 s for a micro-batch (F 9 s + B 9 s)" in said
    assert "6 s on average" in said
    even = stepped(now.program, lambda each: 3.0 * isinstance(each, Compute)).makespan
    then = now.makespan - (slow_stage(9.0).makespan - even)
    assert f"would take about {then:.3g} s in place of {now.makespan:.3g} s" in said
    assert sum("is the slowest" in each for each in now.findings()) == 1


def test_what_loses_most_comes_first_and_the_slowest_stage_later():
    """The stages are uneven, and much more is lost to starting: what even stages save is said of the step as it was."""
    lead, stage, _ = slow_stage(3.0, starting=100.0).findings()
    assert lead.startswith(
        "The largest loss is starting the step: 100 s of the 128 s of the step (78 %). The step had yet to"
    )
    assert "would take about 121 s in place of 128 s" in stage


def test_even_stages_are_said_to_be_even():
    lead, stage, _ = slow_stage(1.01).findings()
    assert lead.startswith("The largest loss is the order of the schedule: ")
    assert "More micro-batches, a zero-bubble schedule (zb_h1, zb_v) or several stages on each worker" in lead
    assert "even enough" in stage
    assert "Move layers" not in stage


def test_one_slow_computation_does_not_make_a_stage_slow():
    program = add_communication(make_schedule("1f1b", workers=3, chunks=5))
    step = stepped(program, lambda each: {"F0.1": 100.0, "F2.1": 3.0}.get(str(each), float(isinstance(each, Compute))))
    assert step.findings()[0].startswith("The largest loss is passes slower than their median: ")
    assert "even enough" in step.findings()[1]


def test_one_stage_has_no_slowest():
    step = stepped(add_communication(make_schedule("1f1b", workers=1, chunks=2)))
    assert step.findings()[:2] == [
        "No large loss: 100 % of the step of 4 s was computing.",
        "There is one stage, on worker 0: 2 s for a micro-batch (F 1 s + B 1 s).",
    ]
    assert step.findings()[2].startswith("100 % of the workers' time was computing.")


def test_another_schedule_is_advised_only_if_it_is_another():
    zero_bubble = stepped(add_communication(make_schedule("zb_v", workers=2, chunks=2)))
    assert zero_bubble.findings()[0].endswith("More micro-batches make that a smaller share.")
    inference = stepped(add_communication(make_schedule("forward_only", workers=2, chunks=2)))
    assert inference.findings()[0].endswith("More micro-batches make that a smaller share.")


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"starting": 100.0}, "starting the step: 100 s of the 114 s of the step (88 %). The step had yet to reach"),
        (
            {"adding": 100.0},
            "adding up: 100 s of the 114 s of the step (88 %). Gradients are added up: of replicated",
        ),
        ({"ending": 100.0}, "Python: 100 s of the 114 s of the step (88 %). It passes between the instructions"),
        ({"flight": 10.0}, "transfer: 100 s of the 114 s of the step (88 %). Values were on their way"),
    ],
)
def test_the_largest_loss_is_named_with_a_remedy(options, cause):
    assert slow_stage(1.0, **options).findings()[0].startswith(f"The largest loss is {cause}")


def test_sending_is_named_where_it_takes_longest():
    program = add_communication(make_schedule("forward_only", workers=2, chunks=4))
    step = stepped(program, lambda each: {Compute: 1.0, Send: 5.0}.get(type(each), 0.0))
    assert step.findings()[0].startswith(
        "The largest loss is sending: 19 s of the 24 s of the step (79 %). Handing over"
    )


def test_time_without_a_core_is_said():
    """Each worker computes for 8 seconds, and had a core for 6."""
    step = slow_stage(1.0, cpu=6.0)
    assert off_cores(step) == pytest.approx(0.25)
    assert "For 25 % or more" in step.findings()[1]
    assert len(slow_stage(1.0, cpu=7.9).findings()) == len(slow_stage(1.0, cpu=None).findings()) == 3


def test_without_cores_no_cause_is_blamed_alone():
    lead, cores, *_ = slow_stage(1.0, cpu=6.0, flight=0.5, starting=6.0).findings()
    assert lead.startswith("The largest loss is outside the computations: 11 s of the 25 s of the step (44 %)")
    assert "no core" in cores


def test_trace_events_are_what_perfetto_reads(real):
    """The fields of the trace event format: complete events, metadata, and the two ends of flows."""
    step = real.steps[-1]
    document = json.loads(step.trace())
    assert document["displayTimeUnit"] == "ms"
    events = document["traceEvents"]
    assert {each["ph"] for each in events} == {"X", "M", "s", "f"}
    for each in events:
        assert isinstance(each["pid"], int)
        assert isinstance(each["tid"], int)
        assert isinstance(each["name"], str)
        if each["ph"] != "M":
            assert each["ts"] >= 0
            assert isinstance(each["cat"], str)
        if each["ph"] == "X":
            assert each["dur"] >= 0
    names = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert names == {(process, worker): f"worker {worker}" for process in (0, 1) for worker in range(4)}


def test_tracks_do_not_overlap_and_hold_all_computations(real, tmp_path):
    step = real.steps[-1]
    step.save_trace(tmp_path / "step.json")
    real.save_trace(tmp_path / "steps.json")
    for file, steps in [("step.json", 1), ("steps.json", 3)]:
        tracks = defaultdict(list)
        for each in json.loads((tmp_path / file).read_text())["traceEvents"]:
            if each["ph"] == "X":
                tracks[each["pid"], each["tid"]].append(each)
        for (_, worker), track in tracks.items():
            track.sort(key=lambda each: each["ts"])
            assert all(one["ts"] + one["dur"] <= other["ts"] + 1e-3 for one, other in pairwise(track))
            computed = [each["name"] for each in track if re.fullmatch(r"[FBIW]\d+\.\d+", each["name"])]
            expected = list(map(str, step.program.computations[worker]))
            assert computed == expected * steps


def test_every_value_has_an_arrow_from_its_send_to_its_receive():
    """Both ends lie within slices of the right tracks; Perfetto draws no arrow else."""
    step = stepped(seconds=lambda each: 1.0 if isinstance(each, Compute) else 0.01, flight=0.25)
    events = json.loads(step.trace())["traceEvents"]
    begins = {each["id"]: each for each in events if each["ph"] == "s"}
    ends = {each["id"]: each for each in events if each["ph"] == "f"}
    receives = [each for order in step.program.orders for each in order if isinstance(each, Receive)]
    assert len(begins) == len(ends) == len(receives)
    for name, end in ends.items():
        assert end["bp"] == "e"
        assert begins[name]["ts"] <= end["ts"]
        inside = [
            each
            for each in events
            if each["ph"] == "X" and each["pid"] == 0 and each["tid"] == end["tid"]
            if each["ts"] <= end["ts"] < each["ts"] + each["dur"]
        ]
        assert [each["cat"] for each in inside] == ["TRANSFER"]


def test_sends_say_their_bytes():
    step = stepped(seconds=lambda instruction: 0.5)
    sends = [each for each in json.loads(step.trace())["traceEvents"] if each.get("cat") == "SENDING"]
    assert {each["args"]["bytes"] for each in sends} == {BYTES}
    assert len(sends) == sum(isinstance(each, Send) for order in step.program.orders for each in order)


def test_the_picture_is_xml_with_a_box_for_each_computation(real, tmp_path):
    step = real.steps[-1]
    step.save_svg(tmp_path / "step.svg")
    root = ElementTree.parse(tmp_path / "step.svg").getroot()
    assert root.tag == f"{SVG}svg"
    titles = [title.text.splitlines()[0] for title in root.iter(f"{SVG}title")]
    for order in step.program.computations:
        for compute in order:
            assert titles.count(str(compute)) == titles.count(f"{compute} as predicted") == 1


def test_boxes_lie_where_their_times_say():
    step = slow_stage(1.0)
    boxes = {
        group.find(f"{SVG}title").text.splitlines()[0]: group.find(f"{SVG}rect").attrib
        for group in ElementTree.fromstring(step.svg()).iter(f"{SVG}g")
        if group.find(f"{SVG}title") is not None
    }
    spans = {str(span.compute): span for spans in step.timeline.spans for span in spans}
    scale = float(boxes["F0.0"]["width"])
    for name, span in spans.items():
        assert float(boxes[name]["x"]) - float(boxes["F0.0"]["x"]) == pytest.approx(float(span.start) * scale, abs=0.2)
        assert boxes[name]["y"] == boxes[f"F{name[1]}.0"]["y"]


@pytest.mark.parametrize("span", [1e-7, 0.0123, 1.0, 99.0, 1e5])
def test_ticks_are_few_and_reach_the_end(span):
    found = list(ticks(span))
    assert 4 <= len(found) <= 11
    assert found[0] == 0
    assert found[-1] <= span * 1.001 <= found[-1] + 2 * found[1]
