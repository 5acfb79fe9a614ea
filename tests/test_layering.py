"""Imports run strictly downward: pippy → pippy.drivers → pippy.ir; the schedules import neither torch nor ir."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

FORBIDDEN = {
    "ir": ("pippy.drivers", "pippy.api", "pippy.pipeline", "pippy.balance", "pippy.cli", "ir", "drivers"),
    "drivers": ("pippy.api", "pippy.pipeline", "pippy.balance", "pippy.cli", "ir", "drivers"),
    "drivers/schedules": ("torch", "pippy.ir"),
    "pippy": ("ir", "drivers"),
}


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: import by the full path, not relatively"
            yield node.lineno, node.module or ""
            # `from pippy import drivers` names a module too
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def upward_imports(folder: str, path: Path) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for line, name in imported_names(path)
        for forbidden in FORBIDDEN[folder]
        if name == forbidden or name.startswith(forbidden + ".")
    ]


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_imports_run_downward(folder):
    files = [path for path in (ROOT / folder).rglob("*.py") if not (folder == "pippy" and path.is_symlink())]
    assert [fault for path in files for fault in upward_imports(folder, path)] == []


def test_an_upward_import_is_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "pass.py"
    path.write_text("import pippy.drivers.driver\nfrom pippy import drivers\n")
    assert upward_imports("ir", path) == ["pass.py:1: pippy.drivers.driver", "pass.py:2: pippy.drivers"]


def test_the_folders_are_links():
    assert (ROOT / "pippy/ir").is_symlink()
    assert (ROOT / "pippy/drivers").is_symlink()
