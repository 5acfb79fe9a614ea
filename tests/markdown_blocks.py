"""Runs the ```python and ```console blocks of a Markdown page, and compares what they print with the page.

The blocks of a page share a namespace. A ```text block directly after a ```python block is what it must print: exactly, but
for spaces at the ends of lines, and with `...` for any text, as in doctest. A word or two may follow ```python:

    raises=Name   the block must raise this error; ``Name: message`` belongs to what it prints
    warns=Name    the block must warn so; ``Name: message`` belongs to what it prints
    file=net.py   how error messages call the block; else they say page_1.py, page_2.py, …

A block with ``save=net.py``, of ```python or ```text, does not run: it is a file for commands.

A ```console block holds commands, `$ pippy …`, and below each what it prints, errors too. They run one after the other in a
folder that the page has for its files. After ```console may follow

    exit=1        the last command must end with this status; all others must end with 0

`python -m tests.markdown_blocks README.md docs/*.md` writes what the blocks print into the pages. Read the diff afterwards.
"""

import contextlib
import io
import linecache
import re
import shlex
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

from pippy import PippyWarning
from pippy.cli import main as command_line

_BLOCK = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
_OPTIONS = {"python": ("raises", "warns", "file", "save"), "text": ("save",), "console": ("exit",)}
_COMMAND = re.compile(r"^\$ (.*)$", re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


class PageError(AssertionError):
    """A block does not do what its page says."""


@dataclass(frozen=True)
class Block:
    """A block that runs. ``expected`` is what it must print, which stands at ``span`` in the page.

    For Python that is the text block after it; a console block is what it must print itself, its commands included.
    """

    page: str
    line: int
    language: str
    code: str
    options: dict[str, str]
    expected: str | None = None
    span: tuple[int, int] | None = None

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, text: str) -> Iterator[Block]:
    """The blocks of a page that run, in order."""
    found, count = list(_BLOCK.finditer(text)), 0
    expects = [_is_output(text, one, other) for one, other in zip([None, *found], found)]
    for index, match in enumerate(found):
        language, *words = match["info"].split() or [""]
        line = text.count("\n", 0, match.start()) + 1
        if language == "text" and not expects[index] and not words:
            raise PageError(f"{page}:{line}: a text block directly after no python block is compared with nothing")
        if language not in _OPTIONS or expects[index]:
            continue
        options = dict(word.partition("=")[::2] for word in words)
        if not set(options) <= set(_OPTIONS[language]):
            raise PageError(f"{page}:{line}: {' '.join(words)!r}; a block may say {', '.join(_OPTIONS[language])}")
        if language == "console":
            yield Block(page, line, language, match["body"], options, match["body"], match.span("body"))
            continue
        count += 1
        options.setdefault("file", f"{Path(page).stem}_{count}.py")
        output = found[index + 1] if index + 1 < len(found) and expects[index + 1] else None
        yield Block(
            page, line, language, match["body"], options, output and output["body"], output and output.span("body")
        )


def _is_output(text: str, before: re.Match[str] | None, match: re.Match[str]) -> bool:
    """Whether a block is the output of the one before it."""
    if before is None or match["info"].strip() != "text" or before["info"].split()[:1] != ["python"]:
        return False
    return not text[before.end() : match.start()].strip()


def check_page(page: str, text: str) -> int:
    """Run a page and return the number of its blocks. Raises a `PageError` if a block does not do what the page says."""
    blocks = list(blocks_of(page, text))
    for block, output in zip(blocks, run(blocks)):
        if block.expected is not None and not matches(block.expected, output):
            raise PageError(f"{block.where} prints\n{output}\nand not, as the page says,\n{block.expected}")
    return len(blocks)


def run(blocks: list[Block]) -> Iterator[str]:
    """Run the blocks, and return what each prints. The Python blocks are one script; the commands share a folder."""
    script, main = types.ModuleType("__main__"), sys.modules["__main__"]
    with tempfile.TemporaryDirectory() as folder:
        for block in blocks:
            if "save" in block.options:
                (Path(folder) / block.options["save"]).write_text(block.code)
                yield ""
                continue
            if block.language == "console":
                yield _run_commands(block, folder)
                continue
            sys.modules["__main__"] = script  # where pickle looks for the classes of a block
            try:
                output = _run(block, script.__dict__)
            finally:
                sys.modules["__main__"] = main
            yield output


def _run_commands(block: Block, folder: str) -> str:
    """The commands of a console block, each with what it prints."""
    commands = _COMMAND.findall(block.code)
    if not block.code.startswith("$ ") or not all(command.split()[0] == "pippy" for command in commands):
        raise PageError(f"{block.where}: a console block holds commands: $ pippy ...")
    printed = []
    for number, command in enumerate(commands, start=1):
        with contextlib.chdir(folder), _path_restored():
            done = CliRunner().invoke(command_line, shlex.split(command)[1:], prog_name="pippy")
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise PageError(f"{block.where} raises {done.exception!r} at: {command}") from done.exception
        wanted = int(block.options.get("exit", 0)) if number == len(commands) else 0
        if done.exit_code != wanted:
            raise PageError(f"{block.where} ends with {done.exit_code} at: {command}\n{done.output}")
        printed.append(f"$ {command}\n{_stripped(done.output)}".rstrip() + "\n")
    return "".join(printed)


@contextlib.contextmanager
def _path_restored() -> Iterator[None]:
    """Forget the modules that a command imported from the page's folder: another page may have others of the same names."""
    path, modules = list(sys.path), set(sys.modules)
    try:
        yield
    finally:
        sys.path[:] = path
        here = str(Path.cwd())
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(here):
                del sys.modules[name]


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
    """A page with the actual outputs of its blocks."""
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
