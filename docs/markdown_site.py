"""What Sphinx is told about these pages, which are written for GitHub too.

index.md        its lists of links are the table of contents: each list under a heading is a toctree, and stays a list
*.ipynb         a notebook is read as Markdown: its cells, and what they show
```text         directly after ```python it is what the code prints, and looks so
`Pipe.verify`   inline code that is the name of something in the reference leads there
docstrings      what a module's docstring sets in by four spaces is a drawing
signatures      parameters that begin with an underscore are nobody's to give, and are left out
search          results have excerpts also where the site is opened from disk, where a page cannot read another
"""

import ast
import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

INSTANCES = {  # how pages call an object of a class
    "driver": "PipelineDriverBase",
    "pipe": "Pipe",
    "recording": "pippy.drivers.report.record.Recording",
}
MOVED = {  # old names of pages, and the parts that they became
    "docs/data": "loop.html#data-that-the-workers-load",
    "docs/evaluation": "loop.html#evaluation",
    "docs/joining": "hosts.html#workers-that-join",
    "docs/logging": "loop.html#logging",
    "docs/ray": "hosts.html#ray",
    "docs/slurm": "hosts.html#slurm",
    "docs/workers": "running.html#what-is-sent",
}
METHODS = {"train"}  # what pages mean a method of a module by, though a public name is the same
_NAME = re.compile(r"(?P<name>[A-Za-z_][\w.]*)(?:\(.*\))?", re.DOTALL)
_PICTURE = re.compile(
    r'<picture>\s*<source media="[^"]*" srcset="(?P<dark>[^"]*)">\s*'
    r'<img alt="(?P<alt>[^"]*)" src="(?P<light>[^"]*)">\s*</picture>'
)
_ERROR = re.compile(r"^(\w+(Error|Warning)|PeerLost): ", re.MULTILINE)
_TEXTS = "page_texts.js"
_READ_TEXTS = """const pageTexts = %s;
if (location.protocol === "file:")
  window.fetch = async (url) => {
    const main = document.createElement("main");
    main.setAttribute("role", "main");
    main.textContent = pageTexts[url.replace(/^\\.\\//, "")] ?? "";
    return { text: async () => main.outerHTML };
  };
"""
_SECTION = re.compile(r"^## (?P<heading>.*)$(?P<body>(?:\n(?!## ).*)*)", re.MULTILINE)
_ENTRY = re.compile(r"^- \[(?P<title>[^\]]*)\]\((?P<link>[^)#]*)\)", re.MULTILINE)


def with_toctrees(text: str) -> str:
    """The table of contents, with a hidden toctree for each list of links under a heading.

    >>> print(with_toctrees("# Docs\\n## Start\\n- [What it is](../README.md): in short\\n- [More](more.md)").strip())
    # Docs
    ## Start
    - [What it is](../README.md): in short
    - [More](more.md)
    <BLANKLINE>
    ```{toctree}
    :hidden:
    :caption: Start
    <BLANKLINE>
    What it is <../README>
    More <more>
    ```
    """
    return text + "".join(_toctree(section["heading"], section["body"]) for section in _SECTION.finditer(text))


def _toctree(caption: str, body: str) -> str:
    entries = [f"{each['title']} <{PurePosixPath(each['link']).with_suffix('')}>" for each in _ENTRY.finditer(body)]
    if not entries:
        return ""
    return "\n\n" + "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *entries, "```"])


def notebook_as_markdown(text: str) -> str:
    """A notebook as a page: its cells, and what they show."""
    return "\n\n".join(part for cell in json.loads(text)["cells"] for part in _of_cell(cell))


def _of_cell(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        shown = output.get("text") or output.get("data", {}).get("text/plain") or output.get("traceback", "")
        yield f"```text\n{''.join(shown).rstrip()}\n```"


class NotebookParser(MystParser):
    """Reads a notebook."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        super().parse(notebook_as_markdown(inputstring), document)


class MarkOutputs(SphinxTransform):
    """Gives what a block of Python prints a class of its own."""

    default_priority = 400

    def apply(self, **kwargs: Any) -> None:
        for block in self.document.findall(nodes.literal_block):
            before = block.previous_sibling()
            while isinstance(before, nodes.literal_block) and "output" in before["classes"]:
                before = before.previous_sibling()
            if block.get("language") == "text" and isinstance(before, nodes.literal_block):
                block["classes"].append("output")
                if _ERROR.search(block.rawsource):
                    block["classes"].append("error")


class FoldersAreNoPages(SphinxTransform):
    """A link to a folder of the repository is its text: the site has files only."""

    default_priority = 410

    def apply(self, **kwargs: Any) -> None:
        here = self.env.doc2path(self.env.docname).parent
        for link in list(self.document.findall(pending_xref)):
            if link.get("reftype") == "myst" and (here / link["reftarget"]).is_dir():
                link.replace_self(link.children)


class LinkNames(SphinxPostTransform):
    """Makes a link to the reference of inline code that names something there."""

    default_priority = 20

    def run(self, **kwargs: Any) -> None:
        for literal in list(self.document.findall(nodes.literal)):
            if isinstance(literal.parent, nodes.reference | nodes.title) or "xref" in literal["classes"]:
                continue
            link = _link(self.app, self.env.docname, literal.astext(), literal.deepcopy())
            if link is not None:
                literal.replace_self(link)


def _link(app: Sphinx, docname: str, text: str, shown: nodes.Node) -> nodes.Element | None:
    found = documented(app.env.domains.python_domain.objects, text)
    if found is None:
        return None
    name, entry = found
    return make_refnode(app.builder, docname, entry.docname, entry.node_id, shown, name)


def documented(objects: Mapping[str, Any], text: str) -> tuple[str, Any] | None:
    """What the reference has under a name as pages write it.

    >>> documented({"pippy.Pipe.verify": 1, "pippy.pipeline": 2}, "pipeline(model, loss_fn)")
    ('pippy.pipeline', 2)
    >>> documented({"pippy.Pipe.verify": 1}, "pipe.verify()"), documented({}, "x[0]")
    (('pippy.Pipe.verify', 1), None)
    """
    match = _NAME.fullmatch(text)
    if match is None or match["name"] in METHODS:
        return None
    first, dot, rest = match["name"].partition(".")
    written = INSTANCES.get(first, first) if rest else first
    for module in ("", "pippy.", "pippy.errors."):
        if (entry := objects.get(name := f"{module}{written}{dot}{rest}")) is not None:
            return name, entry
    return None


def _missing(app: Sphinx, env: BuildEnvironment, node: pending_xref, shown: nodes.Element) -> nodes.Element | None:
    """What a docstring or a signature names by another module than that of the reference, or without one."""
    if node.get("refdomain") != "py" or not (target := node["reftarget"]).replace(".", "").isidentifier():
        return None
    name = target.rsplit(".", 1)[1] if target.startswith("pippy.") else target
    return _link(app, node["refdoc"], name, shown)


def _docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    if what == "module":
        lines[:] = with_drawings(lines)


def with_drawings(lines: Sequence[str]) -> list[str]:
    """A docstring whose paragraphs that are set in stay as they are: reStructuredText would flow them together.

    >>> with_drawings(["A pass.", "", "    a ──▶ b", "", "    c", "", "End."])
    ['A pass.', '', '::', '', '    a ──▶ b', '', '    c', '', 'End.']
    """
    made: list[str] = []
    inside = False
    for line in lines:
        if line.startswith("    ") and not inside and made and not made[-1]:
            made += ["::", ""]
        inside = line.startswith("    ") or (inside and not line)
        made.append(line)
    return made


def _signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str, str | None] | None:
    return None if signature is None else (without_private(signature), returns)


def without_private(signature: str) -> str:
    """A signature without the parameters that begin with an underscore.

    >>> without_private("(n: int, *, names: list[str] = [], _worker: str = 'a b')")
    '(n: int, *, names: list[str]=[])'
    >>> without_private("(x, *, _y=1)"), without_private("(value=<object>)")
    ('(x)', '(value=<object>)')
    """
    if "_" not in signature:
        return signature
    try:
        (made,) = ast.parse(f"def made{signature}: pass").body
    except SyntaxError:  # a default without a text that can be read again
        return signature
    assert isinstance(made, ast.FunctionDef)
    given = made.args
    kept = [at for at, each in enumerate(given.kwonlyargs) if not each.arg.startswith("_")]
    if len(kept) == len(given.kwonlyargs):
        return signature
    given.kwonlyargs, given.kw_defaults = [given.kwonlyargs[at] for at in kept], [given.kw_defaults[at] for at in kept]
    return f"({ast.unparse(given)})"


def _texts_for_search(app: Sphinx, pagename: str, templatename: str, context: Any, doctree: Any) -> None:
    if pagename == "search":
        app.add_js_file(_TEXTS)


def _write_texts(app: Sphinx, error: Exception | None) -> None:
    """Write the text of each page into a script: a browser lets a page that is a file read no other file."""
    if error is not None or app.builder.format != "html":
        return
    names = [f"{name}.html" for name in sorted(app.env.found_docs)]
    texts = {name: page_text((app.outdir / name).read_text(encoding="utf-8")) for name in names}
    script = _READ_TEXTS % json.dumps(texts, ensure_ascii=False)
    (app.outdir / "_static" / _TEXTS).write_text(script, encoding="utf-8")


def page_text(page: str) -> str:
    """The text of a page's article.

    >>> page_text('<nav>Next</nav><article role="main"><h1>A <b>step</b><a class="headerlink">¶</a></h1> 1 &lt; 2</article>')
    'A step 1 < 2'
    """
    article = re.search(r'<article[^>]*role="main".*?</article>', page, re.DOTALL)
    text = re.sub(r'<a class="headerlink".*?</a>|<[^>]*>', "", article[0] if article else "", flags=re.DOTALL)
    return html.unescape(" ".join(text.split()))


def with_pictures(text: str) -> str:
    """A page whose ``<picture>`` is two pictures, for light and for dark pages: Sphinx does not look into HTML.

    >>> with_pictures('<picture>\\n<source media="…" srcset="b.svg">\\n<img alt="A step" src="a.svg">\\n</picture>')
    '![A step](a.svg){.only-light}\\n![A step](b.svg){.only-dark}'
    """
    return _PICTURE.sub(r"![\g<alt>](\g<light>){.only-light}\n![\g<alt>](\g<dark>){.only-dark}", text)


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = with_pictures(source[0])
    if docname == app.config.root_doc:
        source[0] = with_toctrees(source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls."""
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
    app.add_transform(MarkOutputs)
    app.add_transform(FoldersAreNoPages)
    app.add_post_transform(LinkNames)
    app.connect("source-read", _read)
    app.connect("missing-reference", _missing)
    app.connect("autodoc-process-docstring", _docstring)
    app.connect("autodoc-process-signature", _signature)
    app.connect("html-page-context", _texts_for_search)
    app.connect("build-finished", _write_texts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
