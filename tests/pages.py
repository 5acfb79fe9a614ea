"""Runs the ```python blocks of a Markdown page, as one script, and compares what they print with the page.

The blocks of a page share a namespace. A ```text block directly after a ```python block is what it must print: exactly, but
for spaces at the ends of lines, and with `...` for any text, as in doctest. A word or two may follow ```python:

    raises=Name   the block must raise this error; ``Name: message`` belongs to what it prints
    warns=Name    the block must warn so; ``Name: message`` belongs to what it prints
    file=net.py   how error messages call the block; else they say page_1.py, page_2.py, …

`python -m tests.pages README.md docs/*.md` writes what the blocks print into the pages. Read the difference that it makes.
"""

import contextlib
import io
import linecache
import re
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pippy import PippyWarning

_BLOCK = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
_OPTIONS = ("raises", "warns", "file")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


class PageError(AssertionError):
    """A page says what is not so."""


@dataclass(frozen=True)
class Block:
    """A ```python block. ``expected`` is the text block after it, which stands at ``span`` in the page."""

    page: str
    line: int
    code: str
    options: dict[str, str]
    expected: str | None = None
    span: tuple[int, int] | None = None

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, text: str) -> Iterator[Block]:
    """The Python blocks of a page, in order."""
    found, count = list(_BLOCK.finditer(text)), 0
    expects = [_is_output(text, one, other) for one, other in zip([None, *found], found)]
    for index, match in enumerate(found):
        language, *words = match["info"].split() or [""]
        line = text.count("\n", 0, match.start()) + 1
        if language == "text" and not expects[index]:
            raise PageError(f"{page}:{line}: a text block directly after no python block is compared with nothing")
        if language != "python":
            continue
        options = dict(word.partition("=")[::2] for word in words)
        if not set(options) <= set(_OPTIONS):
            raise PageError(f"{page}:{line}: {' '.join(words)!r}; a block may say {', '.join(_OPTIONS)}")
        count += 1
        options.setdefault("file", f"{Path(page).stem}_{count}.py")
        output = found[index + 1] if index + 1 < len(found) and expects[index + 1] else None
        yield Block(page, line, match["body"], options, output and output["body"], output and output.span("body"))


def _is_output(text: str, before: re.Match[str] | None, match: re.Match[str]) -> bool:
    """Whether a block is the output of the one before it."""
    if before is None or match["info"].strip() != "text" or before["info"].split()[:1] != ["python"]:
        return False
    return not text[before.end() : match.start()].strip()


def check_page(page: str, text: str) -> int:
    """Run a page; raise a `PageError` where a block does not do what the page says. Gives the number of blocks."""
    blocks = list(blocks_of(page, text))
    for block, output in zip(blocks, run(blocks)):
        if block.expected is not None and not matches(block.expected, output):
            raise PageError(f"{block.where} prints\n{output}\nand not, as the page says,\n{block.expected}")
    return len(blocks)


def run(blocks: list[Block]) -> Iterator[str]:
    """What each block prints. Together they are a script."""
    script, main = types.ModuleType("__main__"), sys.modules["__main__"]
    for block in blocks:
        sys.modules["__main__"] = script  # where pickle looks for the classes of a block
        try:
            output = _run(block, script.__dict__)
        finally:
            sys.modules["__main__"] = main
        yield output


def _run(block: Block, namespace: dict[str, object]) -> str:
    file, printed = block.options["file"], io.StringIO()
    linecache.cache[file] = (len(block.code), None, block.code.splitlines(keepends=True), file)
    raised = None
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always", PippyWarning)
        try:
            exec(compile(block.code, file, "exec"), namespace)
        except Exception as error:
            raised = error
    warned = [each.message for each in caught if issubclass(each.category, PippyWarning)]
    _check_event(block, "raise", block.options.get("raises"), [] if raised is None else [raised])
    _check_event(block, "warn", block.options.get("warns"), warned)
    return printed.getvalue() + "".join(f"{type(event).__name__}: {event}\n" for event in (*warned, raised) if event)


def _check_event(block: Block, verb: str, wanted: str | None, events: Sequence[object]) -> None:
    names = [type(event).__name__ for event in events]
    if names != ([] if wanted is None else [wanted]):
        cause = next((event for event in events if isinstance(event, Exception)), None)
        happened = f"{verb}s {', '.join(f'{name}: {event}' for name, event in zip(names, events)) or 'nothing'}"
        raise PageError(f"{block.where} {happened}; the page says {wanted or 'nothing'}") from cause


def matches(expected: str, output: str) -> bool:
    """Whether a text block agrees with an output.

    >>> matches("a\\n...\\nb\\n", "a \\nc\\nd\\nb"), matches("a\\n", "b\\n")
    (True, False)
    """
    pattern = ".*".join(map(re.escape, _stripped(expected).split("...")))
    return re.fullmatch(pattern, _stripped(output), re.DOTALL) is not None


def _stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.rstrip().split("\n"))


def written(page: str, text: str) -> str:
    """A page with what its blocks print in place of what it says."""
    blocks = list(blocks_of(page, text))
    changes = []
    for block, output in zip(blocks, run(blocks)):
        if block.span is not None and block.expected is not None and not matches(block.expected, output):
            changes.append((block.span, _stripped(output) + "\n"))
    for (start, end), output in reversed(changes):
        text = text[:start] + output + text[end:]
    return text


def links(text: str) -> list[str]:
    """The relative links of a page, without those in blocks and comments."""
    visible = re.sub(r"<!--.*?-->", "", _BLOCK.sub("", text), flags=re.DOTALL)
    return [link for link in _LINK.findall(visible) if "://" not in link]


def broken_links(path: Path, root: Path) -> list[str]:
    """The relative links of a page that lead nowhere: to no file inside ``root``, or to no heading of a page."""
    return [link for link in links(path.read_text()) if not _leads_somewhere(link, path, root)]


def _leads_somewhere(link: str, path: Path, root: Path) -> bool:
    file, _, anchor = link.partition("#")
    target = (path.parent / file).resolve() if file else path
    if not target.exists() or not target.is_relative_to(root):
        return False
    return not anchor or anchor in _anchors(target.read_text())


def _anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(written(name, Path(name).read_text()))
