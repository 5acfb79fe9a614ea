"""`make demo` runs, and finds what it says it finds."""

import html
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from exps.demo import cores_in_use, workers_here

ROOT = Path(__file__).parent.parent


def test_the_demo(tmp_path):
    command = [sys.executable, str(ROOT / "exps/demo.py"), "--workers", "2", "--steps", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    for shown in ("stage_backward_4", "tokens  int64[32, 16]", "1 | .    .    F2.0 F3.0 B3.0", "3.580818   3.580818"):
        assert shown in done.stdout
    assert "The parameters on the workers are those of the plain model.\n\nWhere the time went, in step" in done.stdout
    ours, plain, ratio, low, high = map(
        float,
        re.search(
            r"a step, the median of 30: ([\d.]+) ms on 2 workers, ([\d.]+) ms in plain.* in turns: ([\d.]+), and between "
            r"([\d.]+) and ([\d.]+) in half",
            done.stdout,
        ).groups(),
    )
    assert low <= ratio <= high and 0.5 < ratio / (ours / plain) < 2
    assert (ratio > 1) == ("faster in one process" in done.stdout)
    written = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    kinds = {"demo.svg", "demo_schedule.svg", "demo_timeline.svg", "demo_trace.json", "demo_report.html"}
    assert set(written) == kinds and set(re.findall(r"out/\w+\.\w+", done.stdout)) == {f"out/{kind}" for kind in kinds}
    assert {event["ph"] for event in json.loads(written["demo_trace.json"])["traceEvents"]} >= {"X", "s", "f"}
    report = html.unescape(re.sub("<[^>]*>", "", written["demo_report.html"]))
    assert "The demo's last steps" in report
    said, number = re.findall("^- (.*)$", done.stdout, re.M), re.search(r"in step (\d+) of the last 2", done.stdout)
    assert len(said) >= 3 and all(each in report for each in said), "the text and the report tell of the same step"
    assert number and f"This page shows step {number[1]}," in report
    assert re.search(r"\(([\d,.]+ samples/s · [\d,.]+ tokens/s)\)", done.stdout)[1] in report


@pytest.mark.parametrize(("cores", "workers"), [(1, 2), (2, 2), (3, 3), (64, 4)])
def test_there_are_as_many_workers_as_cores(cores, workers, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    assert workers_here() == workers


def test_what_other_programs_compute_is_seen():
    loop = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        loop.stdout.readline()
        assert cores_in_use() > 0.3
    finally:
        loop.kill()
        loop.communicate()
