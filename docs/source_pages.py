"""Pages that show source files: those of the library, and whatever file a page links to; and links from the reference to them.

A link to a file of the repository is for GitHub, which shows it. Sphinx would let the reader download it.
"""

import inspect
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "files"  # of the site
LIBRARY = ("pippy", "ir", "drivers")
LANGUAGES = {
    ".py": "python",
    ".toml": "toml",
    ".yml": "yaml",
    ".css": "css",
    ".html": "html",
    ".js": "javascript",
    ".cpp": "cpp",
    ".sh": "sh",
    ".txt": "text",
    "": "text",
}  # of the files that get a page


def shown(path: Path) -> str | None:
    """The name of a file under the root, if it gets a page. What is installed there, in a virtual environment, gets none.

    >>> shown(ROOT / "pippy/ir/pipe.py"), shown(ROOT / "docs/inside.svg"), shown(Path("/etc/hosts"))
    ('ir/pipe.py', None, None)
    >>> shown(Path(inspect.getsourcefile(nodes)))
    """
    path = path.resolve()
    if path.suffix not in LANGUAGES or not path.is_relative_to(ROOT) or not path.is_file():
        return None
    if path.is_relative_to(Path(sys.prefix).resolve()):
        return None
    return path.relative_to(ROOT).as_posix()


def link_to(info: dict[str, str], prefix: str = "../../") -> str | None:
    """Where the reference leads for a name: to its line.

    >>> link_to({"module": "pippy", "fullname": "Pipe.from_tracing"}).partition("#")[0]
    '../../files/ir/pipe.html'
    >>> link_to({"module": "pippy", "fullname": "Pipe.nothing"})
    """
    found: Any = sys.modules.get(info["module"])
    for name in info["fullname"].split("."):
        found = getattr(found, name, None)
    function: Any = getattr(found, "fget", found)
    try:
        function = inspect.unwrap(function)
        path, (lines, line) = inspect.getsourcefile(function), inspect.getsourcelines(function)
        line += next((at for at, text in enumerate(lines) if text.lstrip().startswith(("def ", "class "))), 0)
    except (TypeError, OSError, AttributeError):
        return None
    file = shown(Path(path)) if path else None
    return f"{prefix}{_page(file)}.html#line-{max(line, 1)}" if file else None


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """What sphinx.ext.linkcode asks; every page of the reference is two folders down."""
    return link_to(info) if domain == "py" and info["module"] else None


def _page(name: str) -> str:
    return f"{FOLDER}/{name.removesuffix('.py')}"


class FilesArePages(SphinxTransform):
    """A link to a file leads to the page that shows it."""

    default_priority = 420

    def apply(self, **kwargs: Any) -> None:
        docname = self.env.docname
        for link in list(self.document.findall(addnodes.download_reference)):
            name = shown(Path(self.env.relfn2path(link["reftarget"], docname)[1]))
            if name is not None:
                uri = f"{'../' * docname.count('/')}{_page(name)}.html"
                link.replace_self(nodes.reference("", "", *link.children, refuri=uri, internal=True, file=name))


def _linked(env: BuildEnvironment) -> set[str]:
    """The files that pages link to."""
    trees = map(env.get_doctree, env.found_docs)
    return {link["file"] for tree in trees for link in tree.findall(nodes.reference) if "file" in link}


def _write(app: Sphinx, failed: Exception | None) -> None:
    """Write the pages; by a template of their own, for the theme takes ten times as long for each."""
    if failed or app.builder.format != "html":
        return
    library = {shown(path) for folder in LIBRARY for path in (ROOT / folder).rglob("*.py")}
    for name in library | _linked(app.env):
        if name is not None:
            page = Path(app.outdir, f"{_page(name)}.html")
            page.parent.mkdir(parents=True, exist_ok=True)
            root = "../" * _page(name).count("/")
            page.write_text(
                app.builder.templates.render("file.html", {"name": name, "root": root, "body": _body(app, name)})
            )


def _body(app: Sphinx, name: str) -> str:
    builder: Any = app.builder
    language = LANGUAGES[Path(name).suffix] if app.config.highlight_files else "none"
    lines = {"linenos": "inline", "lineanchors": "line", "anchorlinenos": True}
    return str(builder.highlighter.highlight_block((ROOT / name).read_text(), language, location=name, **lines))


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls."""
    app.add_transform(FilesArePages)
    app.add_config_value("highlight_files", True, "html")
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
