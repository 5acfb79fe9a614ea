"""Diagrams: laid out in their languages, well-formed, escaped, and no line through a text."""

import random
import re
from functools import cache
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch

from pippy import pipeline
from pippy.ir.base.readable import shortened
from pippy.ir.show.content import (
    Box,
    Content,
    DrawnValue,
    ParameterCopies,
    StageFigures,
    Structure,
    content_of,
    structure_of,
)
from pippy.ir.show.drawing import html, mermaid, pipe_svg, rows_of
from tests.ir.show.shown import DRAWN, Named, example
from tests.zoo import WAYS, exhibits

SVG = "{http://www.w3.org/2000/svg}"
X = torch.randn(4, 8)

MERMAID = """
flowchart LR
    n0(["x"])
    n1(["target"])
    n2["submod_0<br/>64 parameters<br/>512 FLOPs"]
    n3["submod_1<br/>72 parameters<br/>1.0 k FLOPs"]
    n4["submod_2<br/>136 parameters<br/>1.0 k FLOPs"]
    n5{{"_loss<br/>0 FLOPs"}}
    n6(["output"])
    n0 -->|"x<br/>float32[4, 8] 128 B"| n2
    n1 -->|"target<br/>float32[4, 8] 128 B"| n5
    n2 ==>|"mm_param<br/>parameter<br/>float32[8, 8] 256 B"| n3
    n2 -->|"relu<br/>float32[4, 8] 128 B"| n3
    n2 -->|"mm<br/>float32[4, 8] 128 B"| n4
    n3 -->|"lin<br/>float32[4, 8] 128 B"| n4
    n4 -->|"lin_1<br/>float32[4, 8] 128 B"| n5
    n5 -->|"_loss<br/>loss<br/>float32[] 4 B"| n6
    n3 -. "lin.weight, lin.bias<br/>replicated" .- n4
"""

NASTY = """a"b<c>&d'e`f;g\\h#i|j"""


def nasty():
    """A content with names that mean something in every language that we write."""
    boxes = (Box("x", "input"), Box(NASTY, "stage"), Box("submod_1", "stage"), Box("output", "output"))
    ways = [(0, (1,)), (1, (2,)), (1, (2, 3)), (2, (3,))]
    values = tuple(DrawnValue(f"{NASTY}{i}", f"v{i}", "parameter", *way, origin=NASTY) for i, way in enumerate(ways))
    stages = {box.name: StageFigures(box.name, (NASTY,), 1, 4, 0) for box in boxes if box.kind == "stage"}
    return Content(Structure(boxes, values, (ParameterCopies((NASTY,), (1, 2)),), frozenset()), None, stages)


def scattered(seed):
    """Any structure that a graph may have: inputs first, then stages, values going forward, some of them copied."""
    choose = random.Random(seed)
    inputs, stages = choose.randrange(4), choose.randrange(1, 12)
    kinds = ["input"] * inputs + ["stage"] * stages + ["output"]
    boxes = tuple(Box(f"{kind}_{index}" * choose.choice([1, 1, 4]), kind) for index, kind in enumerate(kinds))
    sources = [*range(inputs), *sorted(choose.choices(range(inputs, inputs + stages), k=2 * stages))]
    values = []
    for index, source in enumerate(sources):
        later = range(max(source + 1, inputs), len(boxes))
        count = choose.choice([0 if source < inputs else 1, 1, 1, 1, 2, 4])  # only an input may be unused
        users = tuple(sorted(choose.sample(later, min(len(later), count))))
        origin = choose.choice(["", "layer.weight"]) if source >= inputs else ""
        name = f"value_{index}" if source >= inputs else boxes[source].name
        values.append(DrawnValue(name, f"v{index}", "parameter" if origin else "value", source, users, origin))
    groups = [
        sorted(choose.sample(range(inputs, inputs + stages), 2)) for _ in range(choose.randrange(4)) if stages > 1
    ]
    copies = tuple(ParameterCopies((f"layer.{index}",), tuple(group)) for index, group in enumerate(groups))
    stages = {box.name: StageFigures(box.name, (), 1, 4, 0) for box in boxes if box.kind == "stage"}
    return Content(Structure(boxes, tuple(values), copies, frozenset()), None, stages)


@cache
def content(name):
    """What is drawn under a name."""
    if name == "nasty":
        return nasty()
    if name.startswith("scattered "):
        return scattered(int(name.split()[1]))
    pipe, args = DRAWN[name.removesuffix(BARE)]()
    return content_of(pipe) if name.endswith(BARE) else content_of(pipe, args)


BARE = " without arguments"
NAMES = [*DRAWN, *(f"{name}{BARE}" for name in DRAWN), "nasty", *(f"scattered {seed}" for seed in range(30))]
every_content = pytest.mark.parametrize("name", NAMES)


def test_mermaid():
    assert example().draw(X, X).mermaid() == MERMAID.lstrip()


@every_content
def test_each_mermaid_line_is_a_box_or_an_arrow_with_clean_text(name):
    head, *lines = mermaid(content(name)).splitlines()
    assert head == "flowchart LR"
    text = r'"[^"`<>&]*"'
    box, arrow, link = (
        rf"n\d+(\(\[|\[|\{{\{{){text}(\]\)|\]|\}}\}})",
        rf"n\d+ (--|==)>\|{text}\| n\d+",
        rf"n\d+ -\. {text} \.- n\d+",
    )
    for line in lines:
        assert re.fullmatch(rf" {{4}}({box}|{arrow}|{link})", line.replace("<br/>", "")), line


@every_content
def test_the_svg_is_well_formed_and_names_everything(name):
    drawn = content(name)
    root = ElementTree.fromstring(pipe_svg(drawn))
    titles = [(title.text or "").splitlines()[0] for title in root.iter(f"{SVG}title")]
    boxes = [box for box in drawn.structure.boxes if box.kind != "input"]  # an input is the value that it gives
    for named in (*boxes, *drawn.structure.values):
        assert named.name in titles
    for copies in drawn.structure.copies:
        assert copies.names[0] in titles
    shown = [text.text for text in root.iter(f"{SVG}text")]
    assert all(shortened(box.name, 24) in shown for box in boxes)


@every_content
def test_every_use_has_an_arrow(name):
    structure = content(name).structure
    heads = list(ElementTree.fromstring(pipe_svg(content(name))).iter(f"{SVG}polygon"))
    assert len(heads) == sum(len(value.users) for value in structure.values)


def size_of(root):
    return float(root.get("width")), float(root.get("height"))


def text_boxes(root):
    """Where each text is: left, top, right, bottom."""
    for text in root.iter(f"{SVG}text"):
        width, x, y = len(text.text or "") * 6.62, float(text.get("x")), float(text.get("y"))
        left = x - {"start": 0, "middle": width / 2, "end": width}[text.get("text-anchor")]
        if width:
            yield left, y - 8, left + width, y + 2


def segments(root):
    """The straight pieces of every line, round corners taken as sharp ones."""
    for path in root.iter(f"{SVG}path"):
        points = [tuple(map(float, pair.split(","))) for pair in re.findall(r"[\d.]+,[\d.]+", path.get("d"))]
        for (x, y), (u, v) in pairwise(points):
            yield min(x, u), min(y, v), max(x, u), max(y, v)


def rectangles(root):
    for rect in list(root.iter(f"{SVG}rect"))[1:]:
        x, y, width, height = (float(rect.get(key)) for key in ("x", "y", "width", "height"))
        yield x, y, x + width, y + height


def overlap(one, other):
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def inside(one, other):
    return other[0] <= one[0] and other[1] <= one[1] and one[2] <= other[2] and one[3] <= other[3]


def check_texts(drawing):
    root = ElementTree.fromstring(drawing)
    texts, boxes = list(text_boxes(root)), list(rectangles(root))
    for number, text in enumerate(texts):
        assert inside(text, (0, 0, *size_of(root)))
        assert not any(overlap(text, segment) for segment in segments(root))
        assert all(inside(text, box) for box in boxes if overlap(text, box))
        assert not any(overlap(text, other) for other in texts[number + 1 :])


@every_content
def test_no_text_is_crossed_or_covered(name):
    check_texts(pipe_svg(content(name)))


@pytest.mark.filterwarnings("ignore:a mark after the model's last operation")
@pytest.mark.parametrize(("name", "sharing"), WAYS)
def test_the_zoo_is_drawn(name, sharing):
    model = exhibits[name]()
    spec = model.output_loss_value_spec
    pipe = pipeline(model, type(model).loss_fn, output_loss_value_spec=spec, multi_use_param_spec=sharing)
    args = (*model.inputs(), *(() if pipe.target_name is None else (model.target(),)))
    check_texts(pipe.draw(*args).svg())
    ElementTree.fromstring(pipe.draw()._repr_html_())
    lines = str(pipe.draw(*args)).splitlines()
    assert sum("─▶" in line or "unused" in line for line in lines) == len(structure_of(pipe).values)


@every_content
def test_no_box_is_crossed_or_covered(name):
    root = ElementTree.fromstring(pipe_svg(content(name)))
    boxes = list(rectangles(root))
    for number, box in enumerate(boxes):
        inner = (box[0] + 1, box[1] + 1, box[2] - 1, box[3] - 1)
        assert not any(overlap(inner, segment) for segment in segments(root))
        assert not any(overlap(box, other) for other in boxes[number + 1 :])


@every_content
def test_lines_only_cross(name):
    """No two lines run along one another, those of one value left out."""
    root = ElementTree.fromstring(pipe_svg(content(name)))
    lines = [list(segments(group)) for group in root.iter(f"{SVG}g") if group.find(f"{SVG}path") is not None]
    for number, one in enumerate(lines):
        for other in lines[number + 1 :]:
            assert not any(along(a, b) for a in one for b in other)


def along(one, other):
    """Whether two straight pieces run the same way on the same line, and share more than a point."""
    for start, end, fixed in ((0, 2, 1), (1, 3, 0)):
        if one[fixed] == one[fixed + 2] == other[fixed] == other[fixed + 2]:
            return min(one[end], other[end]) - max(one[start], other[start]) > 0
    return False


def test_the_picture_has_the_rows_of_the_text():
    root = ElementTree.fromstring(pipe_svg(content("example")))
    texts = sorted(root.iter(f"{SVG}text"), key=lambda text: float(text.get("y")))
    names = [text.text.partition("  ")[0] for text in texts if text.get("text-anchor") == "start"]
    rows = [row.name for row in rows_of(content("example").structure)]
    assert [name for name in names if name in rows] == rows


def test_a_parameter_that_travels_and_copies_look_different():
    root = ElementTree.fromstring(pipe_svg(content("example")))
    strokes = [path.get("stroke") for path in root.iter(f"{SVG}path")]
    dashed = [path.get("stroke") for path in root.iter(f"{SVG}path") if path.get("stroke-dasharray")]
    assert len(set(strokes)) == 3
    assert (len(dashed), strokes.count("#b45309")) == (1, 1)


@every_content
def test_html_is_well_formed_and_takes_the_colours_of_the_page(name):
    text = html(content(name))
    root = ElementTree.fromstring(text)
    assert len(list(root.iter("tr"))) == len(content(name).stages) + 2
    table = text[text.index("<table") :]
    assert "color:" not in table
    assert "background" not in table
    (style,) = root.iter(f"{SVG}style")
    selectors = re.sub(r"^@media [^{]*{|{[^}]*}", ",", style.text.removesuffix("}"))
    assert all(each.strip().startswith(".pippy-pipe ") for each in selectors.split(",") if each.strip())
    assert "<script" not in text


def test_a_notebook_shows_names_as_they_are():
    pipe, _ = DRAWN["named"]()
    root = ElementTree.fromstring(pipe._repr_html_())
    assert [cell.text for cell in root.iter("td")].count(f"layers.{Named.NAME}") == 2
    assert structure_of(pipe).copies[0].names == (f"layers.{Named.NAME}.weight", f"layers.{Named.NAME}.bias")
