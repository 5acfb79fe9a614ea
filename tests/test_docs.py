"""The documentation is true: its blocks run and print what it says, and its links lead somewhere."""

import ast
import doctest
import re
import tempfile
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

import pippy
from pippy.drivers.base import errors as driver_errors
from pippy.drivers.plan import make_schedule, render_svg, simulate
from pippy.drivers.plan.orders.registry import REGISTRY
from pippy.ir.base import errors
from tests import markdown_blocks
from tests.drivers.processes import close_open_cluster
from tests.markdown_blocks import PageError, blocks_of, broken_links, check_page, links, written

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_the_blocks_of_a_page_do_what_it_says(path, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a page leaves its folders there
    try:
        with patch.dict(REGISTRY):  # a page may register a schedule of its own
            check_page(name_of(path), path.read_text())
    finally:
        close_open_cluster()  # that of a page which stopped half-way


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"], ids=name_of)
def test_links_lead_somewhere(path):
    assert broken_links(path, ROOT) == []


def test_every_page_is_in_the_table_of_contents():
    listed = links((ROOT / "docs/index.md").read_text())
    assert [path.name for path in PAGES[1:] if path.name not in ("index.md", *listed)] == []


def diff_of(text: str, sign: str) -> str:
    """One side of a page's diff."""
    (lines,) = re.findall(r"^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return "\n".join(line[1:] for line in lines.splitlines() if line[:1] in (sign, " "))


def linear_layers():
    return [nn.Linear(4, 4, dtype=torch.float64) for _ in range(4)]


def transformer_layers():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    ends = (nn.Linear(4, 16, dtype=torch.float64), nn.Linear(16, 4, dtype=torch.float64))
    return [ends[0], nn.Unflatten(1, (2, 8)), encoder, nn.Flatten(), ends[1]]


@pytest.mark.parametrize("layers", [linear_layers, transformer_layers])
def test_both_sides_of_the_readme_s_diff_train_the_same(layers):
    """Of a transformer, whose layers are cut apart, every stage has one."""
    trained = []
    for sign in "-+":
        torch.manual_seed(0)
        net = nn.Sequential(*layers())
        data = torch.randn(3, 2, 16, 4, dtype=torch.float64)
        script = {"torch": torch, "nn": nn, "data": data, "Net": partial(nn.Sequential, *net)}
        try:
            exec(diff_of((ROOT / "README.md").read_text(), sign), script)
        finally:
            close_open_cluster()
        trained.append(script["model"].state_dict())
    largest = max(stage.parameters for stage in script["pipe"].balance.stages)
    assert largest < 0.5 * sum(each.numel() for each in script["model"].parameters())
    for name, plain in trained[0].items():
        torch.testing.assert_close(trained[1][name], plain)


def page(*blocks: str) -> str:
    return "A page.\n\n" + "\n".join(f"```{block}\n```\n" for block in blocks)


def test_blocks_share_a_namespace_and_their_output_is_compared():
    text = page("python\na = 'one '\nprint(a)\nprint(2)", "text\none\n2", "python\nprint(a * 2)", "text\n...one")
    assert check_page("page.md", text) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (page("python\nprint(1)", "text\n2"), r"page\.md:3 prints\n1\n"),
        (page("python\nprint(1)\nprint(2)", "text\n1"), "prints"),
        (page("python\nprint(1)", "text\n1\n..."), "prints"),
        (page("python\n1 / 0"), r"page\.md:3 raises ZeroDivisionError: division by zero; the page says nothing"),
        (page("python raises=ValueError\npass"), "raises nothing; the page says ValueError"),
        (page("python raises=ValueError\n1 / 0"), "raises ZeroDivisionError.*; the page says ValueError"),
        (page("python raises=KeyError\n{}['a']", "text\nKeyError: 'b'"), "prints\nKeyError: 'a'"),
        (page("python\nimport pippy, warnings\nwarnings.warn('w', pippy.PippyWarning)"), "warns PippyWarning: w"),
        (page("python warns=PippyWarning\npass"), "warns nothing; the page says PippyWarning"),
        (page("python raise=ValueError\n1 / 0"), "a block may say raises, warns, file, save"),
        (
            page("console\n$ pippy schedule 1f1b -p 1 -m 1\nnothing"),
            r"page\.md:3 prints\n\$ pippy schedule [^\n]*\n1f1b: 1 worker",
        ),
        (page("console\n$ pippy schedule 2f2b -p 1 -m 1\n..."), "ends with 2 at: pippy schedule 2f2b"),
        (page("console exit=1\n$ pippy schedule 1f1b -p 1 -m 1\n..."), "ends with 0 at: pippy schedule 1f1b"),
        (page("text file=a.txt\na"), "a block may say save"),
        (page("console\n$ rm -r /"), r"a console block holds commands: \$ pippy"),
        (page("console\npippy doctor"), "a console block holds commands"),
        (page("console file=a.py\n$ pippy doctor"), "a block may say exit"),
        (page("text\nlost"), "compared with nothing"),
        (page("python\nprint(1)") + "\nA sentence.\n" + page("text\n2"), "compared with nothing"),
        (page("python\na = 1") + page("python\nb"), "NameError"),
    ],
)
def test_what_is_not_so_is_caught(text, words):
    with pytest.raises(PageError, match=words):
        check_page("page.md", text)


def test_each_page_has_a_namespace_of_its_own():
    check_page("page.md", page("python\na = 1"))
    with pytest.raises(PageError, match="NameError"):
        check_page("page.md", page("python\na"))


def test_an_expected_error_is_compared_with_its_message():
    check_page("page.md", page("python raises=KeyError\nprint(1)\n{}['a']", "text\n1\nKeyError: 'a'"))
    check_page(
        "page.md",
        page(
            "python warns=PippyWarning\nimport pippy, warnings\nwarnings.warn('w', pippy.PippyWarning)",
            "text\nPippyWarning: w",
        ),
    )


def test_what_blocks_print_can_be_written_into_the_page():
    text = page("python\nprint(1)", "text\n2", "python\nprint(3)", "text\n3")
    assert written("page.md", text) == page("python\nprint(1)", "text\n1", "python\nprint(3)", "text\n3")


def test_the_examples_of_the_checker():
    assert doctest.testmod(markdown_blocks).failed == 0


def test_commands_share_a_folder_with_the_files_of_their_page():
    blocks = (
        "python save=wide.py\nfrom torch import nn\n\nmodel = nn.Sequential(nn.Linear(7, 7))",
        "console\n$ pippy show wide.py:model --sequential --format table\n...56...",
        "console\n$ pippy schedule 1f1b -p 1 -m 1 --program a.txt\n...\n$ pippy validate a.txt\na.txt: OK: ...",
    )
    assert check_page("page.md", page(*blocks)) == 3
    with pytest.raises(PageError, match=r"there is no file 'wide\.py'"):
        check_page("page.md", page(blocks[1]))


def test_what_commands_print_can_be_written_into_the_page():
    text = page("console\n$ pippy schedule 1f1b -p 1 -m 1 --program a.txt\n...\n$ pippy validate a.txt\nwrong")
    ends = written("page.md", text).splitlines()[-2:]
    assert ends == ["a.txt: OK: 1f1b: 1 worker, 1 stage, 1 micro-batch, 2 instructions, communication implied", "```"]
    assert check_page("page.md", written("page.md", text)) == 1


def test_links_that_lead_nowhere_are_found(tmp_path):
    (tmp_path / "other.md").write_text("# The other page\n\n```text\n# no heading\n```\n")
    path = tmp_path / "page.md"
    path.write_text(
        "[a](other.md) [b](other.md#the-other-page) [c](https://example.org/x) <!-- [d](hidden.md) -->\n"
        "[e](missing.md) [f](other.md#no-heading) [g](../outside.md) [h](#nowhere)\n"
    )
    assert broken_links(path, tmp_path) == ["missing.md", "other.md#no-heading", "../outside.md", "#nowhere"]


def test_every_public_name_has_an_entry_in_the_reference():
    """Add one, as in ``.. autofunction:: name``, to the page of docs/reference where readers look for it."""
    pages = [path.read_text() for path in (ROOT / "docs/reference").glob("*.md")]
    entries = {name for page in pages for name in re.findall(r"^\.\. auto\w+:: (\w+)$", page, re.MULTILINE)}
    assert set(pippy.__all__) - entries - {"errors", "PippyError", "PippyWarning"} == set()


def test_every_error_has_its_block():
    text = (ROOT / "docs/errors.md").read_text()
    shown = {block.options.get("raises") or block.options.get("warns") for block in blocks_of("errors.md", text)}
    types = {
        name
        for module in (errors, driver_errors)
        for name, each in vars(module).items()
        if isinstance(each, type) and each.__module__ == module.__name__
    }
    assert types - shown == {"PippyError"}


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_the_pictures_of_schedules_are_theirs(name):
    """If it is drawn otherwise now: pippy schedule NAME -p 4 -m 8 --svg docs/NAME.svg."""
    drawn = render_svg(simulate(make_schedule(name, workers=4, chunks=8)).timeline)
    assert (ROOT / f"docs/{name}.svg").read_text().strip() == drawn.strip()


def test_the_first_line_of_every_file_says_what_it_holds():
    """In place of a table in docs/changing.md, which names the command that lists these lines."""
    folders = [ROOT / each for each in ("ir", "drivers", "pippy/balance", "pippy/cli", "pippy/training")]
    files = [*(ROOT / "pippy").glob("*.py"), *(file for each in folders for file in each.rglob("*.py"))]
    said = {
        name_of(path): ast.get_docstring(ast.parse(path.read_text())) or "" for path in files if path.stat().st_size
    }
    lines = {name: text.partition("\n")[0] for name, text in said.items()}
    assert [name for name, line in lines.items() if len(line.split()) < 3] == []
    assert [line for line in lines.values() if list(lines.values()).count(line) > 1] == []
