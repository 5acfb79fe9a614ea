"""Makes the documentation as HTML: the pages, the notebook, and a reference of the public names. The command is `make docs`.

    README.md, docs/*.md, docs/*.ipynb,
    exps/README.md                     ──▶ build/docs/*.html        markdown-it-py, which reads Markdown as GitHub does
    docstrings                         ──▶ build/docs/api/*.html    pdoc

The reference has `pippy`, the errors, what drivers give back, and every module that a page imports from: what is shown to be
used is documented. Both tools are small, and need no configuration: the pages stay readable as they are.
"""

import argparse
import ast
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import pdoc.doc
import pdoc.render
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

import pippy

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
ALWAYS = (
    "pippy",
    "pippy.drivers.driver_base",
    "pippy.drivers.errors",
    "pippy.drivers.model_on_workers",
    "pippy.drivers.optimizer",
    "pippy.drivers.recording.record",
    "pippy.drivers.recording.step_data",
    "pippy.drivers.schedules",
    "pippy.ir.errors",
)
PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><nav>{contents}</nav><main>{body}</main></body>
</html>
"""
STYLE = """
body { display: flex; margin: 0; font: 16px/1.5 system-ui, sans-serif; color: #22303c; background: #fff }
nav { flex: 0 0 14rem; padding: 1.5rem 1rem; background: #f6f6f2; font-size: 14px; min-height: 100vh }
nav a { display: block; padding: 2px 0 }
main { flex: 1; min-width: 0; max-width: 60rem; padding: 1rem 2.5rem }
a { color: #2a6099; text-decoration: none }
a:hover { text-decoration: underline }
pre { background: #f6f6f2; padding: .8rem 1rem; overflow-x: auto; font-size: 13px; line-height: 1.35 }
code { font-family: ui-monospace, monospace; font-size: .9em }
table { border-collapse: collapse; display: block; overflow-x: auto }
th, td { text-align: left; padding: .25rem .8rem; border-bottom: 1px solid #ddd; vertical-align: top }
img { max-width: 100% }
@media (max-width: 50rem) { body { display: block } nav { min-height: 0 } }
"""


def pages() -> dict[Path, str]:
    """The pages, and the files that they become."""
    notebooks = sorted(DOCS.glob("*.ipynb"))
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")), *notebooks]
    return {path: f"{path.stem}.html" for path in found} | {ROOT / "exps" / "README.md": "experiments.html"}


def markdown_of(path: Path) -> str:
    """A page as Markdown; a notebook is its cells and what they show."""
    if path.suffix != ".ipynb":
        return path.read_text()
    return "\n\n".join(part for cell in json.loads(path.read_text())["cells"] for part in _of_cell(cell))


def _of_cell(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        shown = output.get("text") or output.get("data", {}).get("text/plain") or output.get("traceback", "")
        yield f"```text\n{''.join(shown).rstrip()}\n```"


def anchor(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it.

    >>> anchor("What `run` does, and why")
    'what-run-does-and-why'
    """
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


class Renderer:
    """Makes HTML of pages: their links lead to what the pages become, or to files of the repository."""

    def __init__(self, output: Path) -> None:
        self.output, self.pages = output, pages()
        self.markdown = MarkdownIt("commonmark", {"highlight": _highlighted}).enable("table")

    def write(self, path: Path, contents: str) -> None:
        """Make one page."""
        tokens = self.markdown.parse(markdown_of(path))
        title = "pippy"
        for token, following in zip(tokens, [*tokens[1:], None]):
            if token.type == "heading_open" and following is not None:
                token.attrSet("id", anchor(following.content))
                title = following.content if token.tag == "h1" else title
            self._lead(token, path.parent)
        body = self.markdown.renderer.render(tokens, self.markdown.options, {})
        style = STYLE + HtmlFormatter().get_style_defs("pre")
        page = PAGE.format(title=escape(title), style=style, contents=contents, body=body)
        (self.output / self.pages[path]).write_text(page)

    def contents(self) -> str:
        """The links beside every page, in the order of the table of contents."""
        found = re.findall(r"^- \[([^\]]*)\]\(([^)]*)\)", (DOCS / "index.md").read_text(), re.MULTILINE)
        links = [(name, self.link(link, DOCS)) for name, link in found]
        shown = [("Contents", "index.html"), *links, ("API reference", "api/pippy.html")]
        return "".join(f'<a href="{escape(link)}">{escape(name)}</a>' for name, link in dict(shown).items())

    def link(self, link: str, folder: Path) -> str:
        """Where a link of a page in ``folder`` leads from the page's HTML."""
        file, mark, rest = link.partition("#")
        if not file or "://" in file:
            return link
        target = (folder / file).resolve()
        made = self.pages.get(target) or (target.name if target.suffix == ".svg" else None)
        return (made or os.path.relpath(target, self.output)) + mark + rest

    def _lead(self, token: Token, folder: Path) -> None:
        for name in ("href", "src"):
            if name in token.attrs:
                token.attrSet(name, self.link(str(token.attrs[name]), folder))
        for child in token.children or ():
            self._lead(child, folder)


def _highlighted(code: str, language: str, _: str) -> str:
    """The inside of a code block; of a language that nobody knows, as it is."""
    try:
        return highlight(code, get_lexer_by_name(language.split()[0]), HtmlFormatter(nowrap=True))
    except (ClassNotFound, IndexError):
        return escape(code)


def imported_modules(texts: Sequence[str]) -> set[str]:
    """The modules of pippy from which Python blocks of pages import.

    >>> sorted(imported_modules(["```python\\nfrom pippy.ir.pipe import Pipe\\nimport torch\\n```"]))
    ['pippy.ir.pipe']
    """
    found: set[str] = set()
    for text in texts:
        for block in re.findall(r"^```python[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            for node in ast.walk(ast.parse(block)):
                found.update({node.module or ""} if isinstance(node, ast.ImportFrom) else ())
    return {name for name in found if name.split(".")[0] == "pippy"}


def write_reference(folder: Path, modules: Sequence[str]) -> None:
    """The reference of modules, by pdoc."""
    vars(pippy).update(
        {name: getattr(pippy, name) for name in pippy.__all__}
    )  # pdoc does not see what is imported late
    pdoc.render.configure(docformat="markdown", include_undocumented=False, search=True)
    found = {name: pdoc.doc.Module.from_name(name) for name in modules}
    found["pippy"].__dict__["submodules"] = [module for name, module in found.items() if name != "pippy"]
    for name, module in found.items():
        back = Markup(f'<a href="{"../" * name.count(".")}../index.html">all pages</a>')
        pdoc.render.env.globals["footer_text"] = back
        path = folder / f"{name.replace('.', '/')}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(pdoc.render.html_module(module, found))
    (folder / "index.html").write_text(pdoc.render.html_index(found))
    (folder / "search.js").write_text(pdoc.render.search_index(found))


def build(output: Path) -> None:
    """All of it, over what is there."""
    (output / "api").mkdir(parents=True, exist_ok=True)
    renderer = Renderer(output)
    contents = renderer.contents()
    for path in renderer.pages:
        renderer.write(path, contents)
    for picture in DOCS.glob("*.svg"):
        shutil.copy(picture, output)
    texts = [markdown_of(path) for path in renderer.pages]
    write_reference(output / "api", sorted({*ALWAYS, *imported_modules(texts)}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "build/docs", help="the folder (%(default)s)")
    folder = parser.parse_args().output.resolve()
    build(folder)
    print(f"The documentation is in {folder / 'index.html'}")
