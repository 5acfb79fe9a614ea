"""The site that `make docs` makes has every page, the reference has every public name, and links lead somewhere.

A public name that the reference lacks is added by a line in a page of docs/reference.
"""

import ast
import doctest
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

import pippy
from docs import markdown_site, source_pages
from pippy import errors
from pippy.drivers import plan as schedules
from tests.drivers.report.browser import needs_browser, opened
from tests.markdown_blocks import blocks_of

ROOT = Path(__file__).resolve().parent.parent
IDS = re.compile(r'\bid="([^"]+)"')
LINKS = re.compile(r'<(?:a|img)\b[^>]*?\b(?:href|src)="([^"]+)"')


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", str(folder)]
    command += ["-D", "highlight_files=0"]  # seconds
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


@pytest.fixture(scope="module")
def ids(site):
    """The anchors of every page."""
    return {page: set(IDS.findall(page.read_text())) for page in site.rglob("*.html")}


@pytest.fixture(scope="module")
def reference(site, ids):
    """The names that the reference has."""
    return set().union(*(ids[page] for page in (site / "docs/reference").glob("*.html")))


@pytest.mark.parametrize("module", [pippy, errors, schedules], ids=lambda module: module.__name__)
def test_every_public_name_is_in_the_reference(reference, module):
    wanted = {name for name in module.__all__ if not isinstance(getattr(module, name), type(sys))}
    if module is pippy:
        wanted -= set(errors.__all__)  # they have a page of their own
    assert len(wanted) > 5
    assert {f"{module.__name__}.{name}" for name in wanted} - reference == set()


def test_methods_are_in_the_reference_and_private_names_are_not(reference):
    assert {"pippy.Pipe.from_tracing", "pippy.PipelineDriverBase.run", "pippy.Cluster.close"} <= reference
    assert [name for name in reference if re.search(r"^pippy\b.*\._", name)] == []


def test_every_name_that_a_page_imports_is_in_the_reference(reference):
    imported = {
        (node.module, each.name)
        for page in (ROOT / "docs").glob("*.md")
        for block in blocks_of(page.name, page.read_text())
        if block.language == "python"
        for node in ast.walk(ast.parse(block.code))
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "pippy"
        for each in node.names
    }
    assert ("pippy.drivers.plan", "make_schedule") in imported
    known = {name.removeprefix("module-") for name in reference}
    names = {name.rpartition(".")[2] for name in known}
    assert [each for each in imported if each[0] not in known - {"pippy"} and each[1] not in names] == []


def test_every_page_is_there_with_links_that_lead_somewhere(site, ids):
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "docs").glob("*.ipynb"),
    ]
    for page in [*pages, ROOT / "exps/README.md"]:
        made = (site / page.relative_to(ROOT)).with_suffix(".html")
        for link in map(unescape, LINKS.findall(made.read_text())):
            if "://" in link:
                continue
            file, _, anchor = link.partition("#")
            target = (made.parent / file).resolve() if file else made
            assert target.exists(), f"{made.name}: {link}"
            assert not anchor or target.suffix != ".html" or anchor in ids[target], f"{made.name}: {link}"
            assert target.suffix not in (".md", ".ipynb"), f"{made.name}: {link} is a page, and not what it became"


def test_the_old_name_of_a_page_leads_on(site, ids):
    assert markdown_site.MOVED
    for name in markdown_site.MOVED:
        page = site / f"{name}.html"
        (link,) = LINKS.findall(page.read_text())
        file, _, anchor = link.partition("#")
        assert anchor in ids[(page.parent / file).resolve()], link
        assert f"url={link}" in page.read_text()


def test_what_pages_hold_arrives(site):
    tutorial = (site / "docs/tutorial.html").read_text()
    assert re.search(
        r'class="highlight-python notranslate".*?class="output highlight-text notranslate"', tutorial, re.DOTALL
    )
    assert 'href="reference/models.html#pippy.pipe_split"' in tutorial
    assert "KeyboardInterrupt" in (site / "docs/notebook.html").read_text()
    assert "module.py" not in (site / "index.html").read_text()
    assert (site / "_images/inside.svg").read_text() == (ROOT / "docs/inside.svg").read_text()


def test_the_examples_of_the_builder():
    assert doctest.testmod(markdown_site).failed == 0
    assert doctest.testmod(source_pages).failed == 0


def test_a_link_to_a_file_leads_to_a_page_that_shows_it(site, ids):
    made = site / "docs/changing.html"
    assert 'href="../files/ir/compile.html"' in made.read_text()
    assert list(site.rglob("*.py")) == []  # nothing to download
    assert "def compile_traced" in (site / "files/ir/compile.html").read_text()


def test_the_reference_leads_to_the_line_of_each_name(site):
    page = (site / "docs/reference/models.html").read_text()
    file, line = re.search(
        r'href="\.\./\.\./files/([\w/]*)\.html#line-(\d+)"', page[page.index('id="pippy.pipeline"') :]
    ).groups()
    shown = (ROOT / f"{file}.py").read_text().splitlines()[int(line) - 1]
    assert (file, shown) == ("pippy/pipeline", "def pipeline(")


def test_private_parameters_are_not_in_the_reference(site):
    page = unescape(re.sub(r"<[^>]*>", "", (site / "docs/reference/workers.html").read_text()))
    assert "local_cluster(" in page
    assert "_worker:" not in page


@needs_browser
def test_a_search_shows_excerpts_where_the_site_is_opened_from_disk(site, tmp_path):
    shown, _ = opened(site / "search.html", "", "?q=microbatches", profile=tmp_path)
    assert len(re.findall(r'<p class="context">[^<]*\S', shown)) > 3
