"""The page on schedules runs: every python block, in order, prints exactly the text block that follows it."""

import contextlib
import io
import re
from pathlib import Path

from pippy.drivers.schedules.registry import REGISTRY

PAGE = Path(__file__).parents[3] / "docs" / "schedules.md"
BLOCK = re.compile(r"```python\n(.*?)```(?:\n```text\n(.*?)```)?", re.DOTALL)


def test_the_page_prints_what_it_says():
    before = set(REGISTRY)
    namespace: dict[str, object] = {}
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    try:
        for source, expected in blocks:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(source, str(PAGE), "exec"), namespace)
            assert printed.getvalue() == expected, source
    finally:
        for name in set(REGISTRY) - before:
            del REGISTRY[name]
    assert len(blocks) >= 8


def test_no_drawing_stands_unproven():
    page = PAGE.read_text(encoding="utf-8")
    assert page.count("```text") == sum(bool(expected) for _, expected in BLOCK.findall(page))


def test_every_schedule_is_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in REGISTRY if f"| `{name}` |" not in page] == []
