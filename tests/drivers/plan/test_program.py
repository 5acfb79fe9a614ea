"""Instructions and programs go through their text unchanged, and any other text is refused at its line and column."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pippy.drivers.plan import add_communication, load_program, make_schedule, parse_program
from pippy.drivers.plan.language.edges import Checkpoints, Edge, Pass, Replicated
from pippy.drivers.plan.language.errors import ArgumentError, ParseError, PlacementError
from pippy.drivers.plan.language.instructions import Add, Compute, Free, Op, Receive, Reduce, Send, parse_instruction
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.language.program import Program
from tests.drivers.plan.graphs import build, edges

counts = st.integers(0, 10**9 - 1)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
instructions = st.one_of(
    st.builds(Compute, st.sampled_from(Op), counts, counts),
    st.builds(Send, names, counts, counts),
    st.builds(Receive, names, counts, counts),
    st.builds(Free, names, counts),
    st.builds(Add, names, counts, names),
    st.builds(Reduce, st.lists(names, min_size=1, max_size=3).map(".".join)),
)


@given(instructions)
def test_an_instruction_goes_through_its_text(instruction):
    assert parse_instruction(str(instruction)) == instruction


@given(st.text(alphabet="FBIWsendrcivfuo tma01.2", max_size=24))
def test_text_that_is_read_is_the_instructions_own(text):
    try:
        instruction = parse_instruction(text)
    except ParseError:
        return
    assert str(instruction) == text


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("", 1, "expected an instruction"),
        ("X0.0", 1, "expected an instruction"),
        ("f0.0", 1, "expected an instruction"),
        ("F", 2, "expected a stage number, found the end of the line"),
        ("F.0", 2, "expected a stage number"),
        ("F-1.0", 2, "expected a stage number"),
        ("F01.0", 3, "expected '.'"),
        ("F1 .0", 3, "expected '.'"),
        ("F1.x", 4, "expected a micro-batch number"),
        ("F1.00", 5, "expected the end of the line"),
        ("F1.0 ", 5, "expected the end of the line"),
        ("F" + "1" * 5000 + ".0", 11, "expected '.'"),
        ("F1.٣", 4, "expected a micro-batch number"),
        ("send", 1, "expected an instruction"),
        ("send 1x.0 to 1", 6, "expected the name of a value"),
        ("send x to 1", 7, "expected '.'"),
        ("send x.0 from 1", 9, "expected ' to '"),
        ("receive x.0 from", 12, "expected ' from '"),
        ("reduce .weight", 8, "expected the name of a sum: of a parameter, or stage 2 part 0"),
    ],
)
def test_an_instruction_misspelt(text, column, message):
    with pytest.raises(ParseError) as caught:
        parse_instruction(text, line=7)
    assert (caught.value.line, caught.value.column) == (7, column)
    assert message in str(caught.value)


PROGRAMS = {
    "computations": make_schedule("zb_v", workers=3, chunks=2),
    "lowered": add_communication(make_schedule("1f1b", workers=3, chunks=2)),
    "inference": make_schedule("forward_only", workers=2, chunks=3, stages_per_worker=2),
    "skips": add_communication(
        make_schedule("1f1b", workers=3, chunks=2).for_graph(
            edges("x F0 -> F1 F2", "y F1 -> F2", "dy B2 -> B1"), [1, 2], [Replicated("emb.weight", (1, 2))]
        )
    ),
    "hosts": add_communication(
        replace(
            make_schedule("forward_only", workers=3, chunks=2, replicas=2).for_graph(edges("x F0 -> F1 F2")),
            hosts=(0, 1, 1, 2, 0, 0),
        )
    ),
    "replicas": make_schedule("1f1b", workers=2, chunks=2, replicas=2),
    "notes": add_communication(
        replace(make_schedule("interleaved_1f1b", workers=2, chunks=4, stages_per_worker=2, replicas=2), notes=(0, 2))
    ),
    "slices": make_schedule("1f1b", workers=1, chunks=2, slices=2),
    "checkpoints": make_schedule("fill_drain", workers=2, chunks=5, checkpoint={0: "always", 1: "except_last"}),
    "no edges": make_schedule("fill_drain", workers=2, chunks=1).for_graph([]),
    "a limit of none": build("F0.0, B0.0", (0,)),
    "a list": Program("any name, 10 % of it", Placement((0,)), 1, ((),), (0,)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_goes_through_its_file(name, tmp_path):
    program = PROGRAMS[name]
    program.save(tmp_path / "program")
    assert load_program(tmp_path / "program") == program
    assert str(parse_program(str(program))) == str(program)


TEXT = str(PROGRAMS["skips"])


@pytest.mark.parametrize(
    ("old", "new", "line", "column", "message"),
    [
        ("pippy program 1", "pippy program 2", 1, 1, "expected 'pippy program 1'"),
        ("schedule 1f1b", "schedule ", 2, 10, "expected the name of a schedule"),
        ("workers 3", "workers 0", 3, 9, "workers must be at least 1, found 0"),
        ("workers 3", "workers three", 3, 9, "expected how many workers"),
        ("workers 3", "workers 4", 6, 11, "expected 3 stages on 4 workers"),
        ("stages 3", "stages 4", 6, 11, "expected 4 stages on 3 workers"),
        ("stages 3", "stage 3", 4, 1, "expected 'stages '"),
        ("chunks 2", "chunks 2 ", 5, 9, "expected the end of the line"),
        ("placement 0 1 2", "placement 0 1 3", 6, 11, "expected 3 stages on 3 workers"),
        ("placement 0 1 2", "placement 0  1 2", 6, 13, "expected the worker of a stage"),
        ("backward 1 2", "backward 1 5", 7, 10, "there is no stage 5; the placement has stages 0 to 2"),
        ("backward 1 2", "backward 2 1", 7, 10, "backward=(2, 1) must name each stage once, in order"),
        ("backward 1 2", "backward some", 7, 10, "expected a stage number, all or none"),
        ("memory 2 2 1", "memory 3 2", 8, 8, "memory of 2 workers for placement 0 1 2; give one per worker"),
        ("memory 2 2 1", "memory lots", 8, 8, "expected a number of stage-micro-batches, or unlimited"),
        (
            "x F0 -> F1 F2",
            "x F0 -> F1 F3",
            9,
            6,
            "edge x F0 -> F1 F3: there is no stage 3; the placement has stages 0 to 2",
        ),
        ("y F1 -> F2", "y F1 -> F3", 10, 6, "edge y F1 -> F3: there is no stage 3"),
        ("x F0 -> F1 F2", "x F0 -> ", 9, 14, "expected a pass, F or B and a stage number"),
        ("x F0 -> F1 F2", "x I0 -> F1", 9, 8, "expected a pass, F or B and a stage number"),
        ("communication explicit", "communication none", 13, 15, "expected 'explicit' or 'implied'"),
        ("worker 1", "worker 2", 23, 1, "expected 'worker 1'"),
        ("  F1.0", " F1.0", 25, 1, "expected 'worker 2'"),
        ("  F1.0", "  G1.0", 25, 3, "expected an instruction"),
        ("hosts 0 1 1 2 0 0", "hosts 0 1 1", 8, 7, "hosts of 3 workers for placement 0 1 2 and 2 replicas"),
        ("hosts 0 1 1 2 0 0", "hosts a a b b c c", 8, 7, "expected the host of a worker"),
        ("hosts 0 1 1 2 0 0", "hosts 0 1 1 2 0 0 ", 8, 19, "expected the host of a worker"),
        ("replicas 2", "replicas 3", 7, 11, "expected 3 stages on 6 workers in 3 replicas"),
        ("slices 2", "slices 3", 5, 8, "chunks=4 for 3 slices of each sequence"),
        ("notes 0 2", "notes 0 7", 11, 7, "notes: there is no stage 7; the placement has stages 0 to 3"),
        ("notes 0 2", "notes 2 0", 11, 7, "notes=(2, 0) must name each stage once, in order"),
        ("checkpoint 0 0-4", "checkpoint 0 0-5", 9, 17, "there is no micro-batch 5 of 5"),
        ("checkpoint 0 0-4", "checkpoint 0", 9, 13, "expected a micro-batch number"),
        ("checkpoint 0 0-4", "checkpoint 0 0-1 2-4", 9, 16, "write this line as 'checkpoint 0 0-4'"),
        ("checkpoint 0 0-4", "checkpoint 0 3 1", 9, 12, "must name at least one micro-batch, each once, in order"),
        ("checkpoint 0 0-4", "checkpoint 2 0-4", 9, 12, "there is no stage 2; the placement has stages 0 to 1"),
        ("checkpoint 0 0-4", "checkpoint 1 0-4", 9, 12, "[1, 1] must name each stage once, in order"),
        (
            "backward all\nmemory 1 2\ncheckpoint",
            "backward 1\nmemory 1 2\ncheckpoint",
            9,
            12,
            "stage 0 has no backward",
        ),
    ],
)
def test_a_program_misspelt(old, new, line, column, message):
    text = next(text for text in (TEXT, *map(str, PROGRAMS.values())) if old in text)
    with pytest.raises(ParseError) as caught:
        parse_program(text.replace(old, new, 1))
    assert message in str(caught.value)
    assert (caught.value.line, caught.value.column) == (line, column)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1, column 1: expected 'pippy program 1', found the end of the line"),
        (TEXT[:-1], "the last line must end with a newline"),
        (TEXT + "\n", "expected the end of the program"),
        (TEXT + "worker 3\n", "expected the end of the program"),
        (TEXT.replace("\n", "\r\n"), "expected the end of the line, found '\\r'"),
        (TEXT.split("worker 2")[0], "expected 'worker 2', found the end of the line"),
        ("\ufeff" + TEXT, "line 1, column 1: expected 'pippy program 1'"),
    ],
)
def test_a_program_cut_or_continued(text, message):
    with pytest.raises(ParseError) as caught:
        parse_program(text)
    assert message in str(caught.value)


@given(st.data())
def test_any_change_of_one_character_is_refused_or_read_as_it_is_written(data):
    place = data.draw(st.integers(0, len(TEXT) - 1))
    text = TEXT[:place] + data.draw(st.sampled_from(" \n0123FBIW.xyz-")) + TEXT[place + 1 :]
    try:
        program = parse_program(text)
    except (ParseError, ArgumentError, PlacementError):
        return
    assert str(program) == text


SUMMED = edges("x F0 -> F1", "z F0 -> F1", "g2 B1 -> B0", "y B1 -> B1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunks": 0}, "chunks=0 must be a whole number of at least 1"),
        ({"edges": edges("x F0 -> F1", "x F1 -> B1")}, "edge x F0 -> F1: x is there twice"),
        ({"edges": (Edge("a b", Pass("F", 0), (Pass("F", 1),)),)}, "'a b' must be a name of letters"),
        ({"edges": (Edge("x", Pass("F", 0), ()),)}, "no pass needs it; leave the edge out"),
        ({"memory": (1, -1)}, "memory=(1, -1): -1 must be a whole number of at least 0"),
        ({"hosts": (0, "b")}, "hosts=(0, 'b'): 'b' must be a whole number of at least 0"),
        ({"replicated": (Replicated("w", (0,)), Replicated("w", (1,)))}, "w is there twice; give each name one line"),
        ({"backward": (1,), "edges": edges("x B1 -> B0")}, "stage 0 has no backward; leave the edge out"),
        ({"replicated": (Replicated("w", (0, 9)),)}, "replicated w 0 9: there is no stage 9"),
        ({"replicated": (Replicated("w", ()),)}, "no stage has a copy"),
        ({"notes": (1,)}, "notes=(1,): there are no other replicas to tell; leave notes out"),
        ({"checkpoints": (Checkpoints(0, ()),)}, "must name at least one micro-batch"),
        ({"checkpoints": (Checkpoints(0, (0, 2)),)}, "the program has micro-batches 0 to 0"),
        ({"edges": SUMMED, "added": (("g2",),)}, "added g2: one value is no sum; leave the line out"),
        ({"edges": SUMMED, "added": (("g2", "g9"),)}, "added g2 g9: no edge of the program is called g9"),
        ({"edges": SUMMED, "added": (("g2", "g2"),)}, "added g2 g2: g2 is there twice; add each value once"),
        ({"edges": SUMMED, "added": (("g2", "x"),)}, "x F0 -> F1 and g2 B1 -> B0 are not gradients of one value"),
        ({"edges": SUMMED, "added": (("x", "z"),)}, "x F0 -> F1 and x F0 -> F1 are not gradients of one value"),
        ({"edges": SUMMED, "added": (("g2", "y"),)}, "y B1 -> B1 and g2 B1 -> B0 are not gradients of one value"),
    ],
)
def test_a_program_that_contradicts_itself(changes, message):
    with pytest.raises(ArgumentError) as caught:
        replace(build("F0.0, B0.0 | F1.0, B1.0", (0, 1)), **changes)
    assert message in str(caught.value)


def test_orders_for_other_workers_than_the_placement_has():
    with pytest.raises(ArgumentError, match="orders of 1 workers for placement 0 1; give one per worker"):
        build("F0.0", (0, 1))


@pytest.mark.parametrize("name", ["", " x", "x\ny", "é"])
def test_a_schedule_name_that_cannot_be_written(name):
    with pytest.raises(ArgumentError, match=r"schedule=.* must be one line of ASCII text"):
        Program(name, Placement((0,)), 1, ((),), (0,))
