"""Schedules on the command line: the figures are the simulation's, and the files are those of the library."""

import json
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from pippy.cli.schedule import OTHER_NAMES, grid, plain
from pippy.drivers.plan import Costs, load_program, make_schedule, render_text, simulate, simulate_with
from pippy.drivers.plan.orders.registry import REGISTRY

TRAINING = sorted(name for name, entry in REGISTRY.items() if entry.training)


def cells(output, first):
    """The row of a table that begins with this word."""
    (line,) = [line for line in output.splitlines() if re.match(rf"{first}\s", line)]
    return line.split()


def test_the_grid_is_that_of_the_library(pippy):
    program = make_schedule("zb_h1", workers=3, chunks=5)
    assert f"\n\n{render_text(program)}\n\n" in pippy("schedule zb_h1 -p 3 -m 5")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("1F1B", "1f1b"),
        ("V-Min", "v_min"),
        ("eager-1F1B", "eager_1f1b"),
        ("zb-h1", "zb_h1"),
        ("ZB V", "zb_v"),
        ("Fill-Drain", "fill_drain"),
        ("GPipe", "fill_drain"),
    ],
)
def test_names_in_any_case_and_punctuation(pippy, given, name):
    assert pippy("schedule", given, "-p", "2", "-m", "4").startswith(f"{name}: 2 workers")


def test_no_two_schedules_have_the_same_plain_name():
    assert len({plain(name) for name in REGISTRY} | set(OTHER_NAMES)) == len(REGISTRY) + len(OTHER_NAMES)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("schedule 1f2b -p 2 -m 2", "Did you mean 1f1b"),
        ("schedule looped -p 2 -m 2", "Did you mean looped_bfs"),
        ("schedule pipedream -p 2 -m 2", "Take one of fill_drain, 1f1b"),
        ("schedule 1f1b -p 2", "Missing option '-m'"),
        ("schedule 1f1b -p 0 -m 2", "'-p'"),
        ("schedule 1f1b -p 2 -m two", "'two' is not a valid integer"),
        ("schedule 1f1b -p 2 -m 2 --forward one", "'one' is no cost; give a number"),
        ("schedule 1f1b -p 2 -m 2 --forward 1,-2", "of at least 0"),
        ("schedule 1f1b -p 2 -m 2 --forward nan", "of at least 0"),
        ("schedule 1f1b -p 2 -m 2 --froward 1", "'--backward', '--forward'?"),
        ("compare -p 2", "Missing option '-m'"),
        ("validate nothing.txt", "'nothing.txt' does not exist"),
    ],
)
def test_what_is_not_understood_is_a_usage_error(pippy, command, words):
    output = pippy(command, status=2)
    assert words in output
    assert "Try 'pippy" in output


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("schedule 1f1b -p 2 -m 2 --forward 1,2,3", "3 costs for 2 stages"),
        ("schedule zb_v -p 2 -m 2 -v 3", "needs a V-shaped placement"),
        ("schedule 1f1b -p 2 -m 2 --memory 3", "1f1b takes no options"),
        ("schedule list -p 2 -m 2 -v 3 --memory 1", "leaves worker 0 no room"),
        ("schedule 1f1b -p 2 -m 2 --svg no/such/folder.svg", "'no/such/folder.svg' cannot be written: No such file"),
    ],
)
def test_what_cannot_work_is_an_error(pippy, command, words):
    output = pippy(command, status=1)
    assert output.splitlines()[-1].startswith("Error: ")
    assert words in output


@settings(max_examples=15)
@given(
    some.sampled_from(["1f1b", "fill_drain", "zb_h1", "zb_v", "interleaved_1f1b"]),
    some.integers(1, 4),
    some.integers(1, 6),
    *[some.sampled_from([0.0, 0.5, 1.0, 1.37, 3.0])] * 4,
)
def test_costs_and_figures_are_those_of_the_simulation(name, workers, chunks, forward, half, weight, comm):
    from click.testing import CliRunner

    from pippy.cli import main

    costs = f"--forward {forward} --input {half} --weight {weight} --comm {comm}"
    done = CliRunner().invoke(main, ["schedule", name, "-p", str(workers), "-m", str(chunks), *costs.split()])
    program = make_schedule(name, workers=workers, chunks=chunks)
    result = simulate(program, forward, half, weight, latency=comm)
    assert done.exit_code == 0, done.output
    assert f"makespan {float(result.makespan):g}, bubble " in done.output
    for worker in range(workers):
        row = re.search(rf"^worker {worker} +(\S+) +(\S+) +(\S+)% +(\d+)$", done.output, re.MULTILINE)
        busy = sum(span.duration for span in result.timeline.spans[worker])
        assert float(row[1]) == pytest.approx(float(busy), rel=1e-5, abs=1e-4)
        assert float(row[2]) == pytest.approx(float(result.idle[worker]), rel=1e-5, abs=1e-4)
        assert int(row[4]) == program.peak_live[worker]


def test_costs_of_each_stage(pippy):
    output = pippy("schedule 1f1b -p 3 -m 4 --forward 1,3,2 --input 1,2,3 --weight 2,1,1 --backward 2,2,2")
    costs = Costs(forward=[1, 3, 2], backward_input=[1, 2, 3], backward_weight=[2, 1, 1], backward=[2, 2, 2])
    assert f"makespan {simulate_with(make_schedule('1f1b', workers=3, chunks=4), costs).makespan:g}," in output


def test_forwards_that_are_computed_again(pippy):
    output = pippy("schedule fill_drain -p 2 -m 3 --checkpoint always")
    assert "1 | .  F0 F1 F2 R0 B0 -- R1 B1 -- R2 B2 -- .  ." in output
    assert "makespan 15," in output


def test_an_awkward_common_step_gives_a_grid_that_can_be_read():
    result = simulate(make_schedule("1f1b", workers=2, chunks=4), 1.37, latency=0.123)
    drawn = grid(result.timeline)
    assert drawn.endswith("a column is 0.685")
    assert max(map(len, drawn.splitlines())) < 250
    assert all(f"F{chunk}" in row and f"B{chunk}" in row for row in drawn.splitlines()[:2] for chunk in range(4))


def test_a_grid_that_is_too_wide_is_not_drawn(pippy):
    output = pippy("schedule 1f1b -p 2 -m 200")
    assert "too wide to be read" in output
    assert "a column is 10\n" in pippy("schedule 1f1b -p 2 -m 200 --step 10")


def test_files(pippy, tmp_path):
    pippy("schedule 1f1b -p 2 -m 3 --svg a.svg --trace a.json --program a.txt")
    assert (tmp_path / "a.svg").read_text().startswith("<svg ")
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) == 2 * 2 * 3
    assert load_program(tmp_path / "a.txt") == make_schedule("1f1b", workers=2, chunks=3)


def test_list_looks_for_these_costs_and_this_memory(pippy, tmp_path):
    pippy("schedule list -p 3 -m 4 --forward 1,3,2 --comm 0.5 --memory 2 --program a.txt")
    costs = Costs(forward=[1.0, 3.0, 2.0], latency=0.5)
    assert load_program(tmp_path / "a.txt") == make_schedule("list", workers=3, chunks=4, memory=2, costs=costs)


def test_compare_has_a_row_for_every_schedule_or_says_why_not(pippy):
    output = pippy("compare -p 2 -m 4")
    table, left_out = output.split("left out:")
    assert all(re.search(rf"^\s*{name}[\s:]", output, re.MULTILINE) for name in REGISTRY)
    assert left_out.split() == "forward_only: it does not train".split()
    makespans = [float(line.split()[2]) for line in table.splitlines()[2:] if line]
    assert makespans == sorted(makespans)
    assert len(makespans) == len(REGISTRY) - 1


def test_the_figures_of_compare(pippy):
    """1F1B on 4 workers and 8 micro-batches: a bubble of (p-1)(F+B), and 2(p-1)m values that pass."""
    name, stages, makespan, bubble, peak, sends, steps = cells(pippy("compare -p 4 -m 8"), "1f1b")
    assert (stages, makespan, bubble, peak, sends, steps) == ("4", "33", "27.3%", "4", "48", "16")
    name, stages, makespan, _, peak, _, steps = cells(pippy("compare -p 4 -m 8"), "zb_v")
    assert (stages, makespan, peak, steps) == ("8", "25.5", "4", "48")  # 8 of half stages
    for name, expected in (("v_half", ("26.5", "3")), ("v_min", ("29.5", "2"))):
        _, _, makespan, _, peak, _, _ = cells(pippy("compare -p 4 -m 8"), name)
        assert (makespan, peak) == expected
    output = pippy("compare -p 4 -m 8 --comm 1")
    assert [cells(output, name)[2] for name in ("1f1b", "eager_1f1b")] == ["49", "39"]


def test_compare_says_why_a_schedule_does_not_fit(pippy):
    output = pippy("compare -p 2 -m 4 -v 3")
    assert "  zb_v: zb_v needs a V-shaped placement" in output
    output = pippy("compare -p 2 -m 4 --forward 1,2,3", status=1)
    assert "1f1b: forward=[1.0, 2.0, 3.0] has 3 costs for 2 stages" in output
    assert "Error: no schedule fits" in output


def test_a_long_search_is_left_out(pippy):
    assert "list: a search over so many computations takes long" in pippy("compare -p 4 -m 100")


@pytest.mark.parametrize("name", TRAINING)
def test_what_schedule_writes_validate_proves(pippy, name):
    pippy(f"schedule {name} -p 2 -m 4 --program a.txt")
    assert pippy("validate a.txt").startswith(f"a.txt: OK: {name}: 2 workers, ")
    assert pippy("validate a.txt --buffer 4").startswith("a.txt: OK")


def test_programs_from_standard_input(pippy):
    text = str(make_schedule("1f1b", workers=1, chunks=1))
    assert pippy("validate -", input=text).startswith("standard input: OK: 1f1b: 1 worker, 1 stage, 1 micro-batch")


def test_a_program_that_cannot_run(pippy, tmp_path):
    program = make_schedule("1f1b", workers=2, chunks=20)
    (tmp_path / "a.txt").write_text(str(program.with_orders([reversed(order) for order in program.orders])))
    (tmp_path / "b.txt").write_text(str(program))
    output = pippy("validate a.txt b.txt", status=1)
    assert re.match(r"a\.txt: program 1f1b cannot run: \d+ faults\n- worker 0, ", output)
    assert "b.txt: OK" in output
    assert len(output.splitlines()) == 13
    assert re.search(r"… and \d+ more", output)
    assert "<--" in pippy("validate a.txt --mark", status=1)


def test_a_line_that_is_none(pippy, tmp_path):
    (tmp_path / "a.txt").write_text(str(make_schedule("1f1b", workers=1, chunks=1)).replace("F0.0", "G0.0"))
    assert pippy("validate a.txt", status=1).startswith("a.txt:12:3: ")


def test_a_file_that_is_no_text(pippy, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    assert pippy("validate a.txt", status=1).startswith("a.txt: 'utf-8' codec can't decode")
    assert "is a directory" in pippy("validate .", status=2)


def test_a_comparison_that_takes_long_says_how_far_it_is(pippy, monkeypatch):
    assert "1 of" not in pippy("compare -p 2 -m 4")
    monkeypatch.setattr(sys.modules["pippy.cli.schedule"], "SLOW", 8)
    said = pippy("compare -p 2 -m 4").splitlines()
    assert re.fullmatch(r"1 of (\d+): fill_drain makespan 15, bubble 20.0 ?%, peak 4", said[0]), said[0]
    count = int(said[0].split()[2].rstrip(":"))
    assert said[count - 1].startswith(f"{count} of {count}: ")
    assert said[count].startswith("schedule ")


@pytest.mark.parametrize("option", ["--svg", "--trace", "--program"])
def test_a_picture_of_another_kind_is_refused_before_anything_is_computed(pippy, tmp_path, option):
    said = pippy(f"schedule 1f1b -p 2 -m 4 {option} step.PNG", status=1)
    assert "no .png files. Write step.svg" in said and "0 |" not in said
    assert list(tmp_path.iterdir()) == []
    pippy("schedule 1f1b -p 2 -m 4 --svg step.svg")


def test_a_terminal_without_lines_and_arrows_shows_the_nearest_letters():
    command = [sys.executable, "-m", "pippy", "compare", "-p", "2", "-m", "4"]
    done = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": "latin-1"}, capture_output=True, check=True)
    lines = done.stdout.decode("latin-1").splitlines()
    assert set(lines[1]) == {"-"} and len(lines[1]) >= len(lines[0])
