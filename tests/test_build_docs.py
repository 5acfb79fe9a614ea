"""`make docs` makes HTML of every page and a reference of every public name, with links that lead somewhere."""

import doctest
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

import pippy
from docs import build
from pippy.drivers import errors as driver_errors
from pippy.drivers import schedules
from pippy.ir import errors

ROOT = Path(__file__).resolve().parent.parent
IDS = re.compile(r'\bid="([^"]+)"')
LINKS = re.compile(r'<(?:a|img)\b[^>]*?\b(?:href|src)="([^"]+)"')


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-W", "error", str(ROOT / "docs/build.py"), "--output", str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


def ids(page):
    return set(IDS.findall(page.read_text()))


@pytest.mark.parametrize(
    ("page", "module"),
    [
        ("pippy", pippy),
        ("pippy/drivers/schedules", schedules),
        ("pippy/ir/errors", errors),
        ("pippy/drivers/errors", driver_errors),
    ],
)
def test_every_public_name_is_in_the_reference(built, page, module):
    names = getattr(module, "__all__", None) or [
        name for name, each in vars(module).items() if getattr(each, "__module__", None) == module.__name__
    ]
    wanted = {name for name in names if not isinstance(getattr(module, name), type(sys))}
    assert len(wanted) > 5
    assert wanted - ids(built / f"api/{page}.html") == set()


def test_methods_are_in_the_reference_and_private_names_are_not(built):
    found = ids(built / "api/pippy.html")
    assert {"Pipe.from_tracing", "PipelineDriver1F1B.run", "Cluster.close", "pipeline"} <= found
    assert [name for name in found if re.search(r"(^|\.)_(?!_init__)", name)] == []


def test_every_page_is_there_with_links_that_lead_somewhere(built):
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*.ipynb")]
    for page in pages:
        made = built / f"{page.stem}.html"
        for link in map(unescape, LINKS.findall(made.read_text())):
            if "://" in link:
                continue
            file, _, anchor = link.partition("#")
            target = (built / file).resolve() if file else made
            assert target.exists(), f"{made.name}: {link}"
            if anchor and target.suffix == ".html":
                assert anchor in ids(target), f"{made.name}: {link}"
            assert target.suffix not in (".md", ".ipynb"), f"{made.name}: {link} is a page, and not what it became"


def test_code_tables_and_the_picture_arrive(built):
    assert "<table>" in (built / "running.html").read_text()
    assert 'class="kn"' in (built / "tutorial.html").read_text()
    assert 'src="inside.svg"' in (built / "inside.html").read_text()
    assert (built / "inside.svg").read_text() == (ROOT / "docs/inside.svg").read_text()
    assert "KeyboardInterrupt" in (built / "notebook.html").read_text()


def test_every_module_that_a_page_imports_from_is_in_the_reference(built):
    texts = [build.markdown_of(page) for page in build.pages()]
    modules = build.imported_modules(texts)
    assert "pippy.drivers.schedules.orders.schedule" in modules
    assert [name for name in modules if not (built / f"api/{name.replace('.', '/')}.html").exists()] == []
    assert "pippy/drivers/schedules.html" in (built / "api/pippy.html").read_text()


def test_the_examples_of_the_builder():
    assert doctest.testmod(build).failed == 0
