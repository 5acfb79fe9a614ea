"""Imports run strictly downward, between folders and between files, and a name is defined in one file.

A layer is a folder, but for files at the root of pippy/. It may import from the layers before it, and from itself. Imports for
typing count, too.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parent.parent

LAYERS = """
    drivers/plan/language drivers/plan/proofs drivers/plan/passes drivers/plan/cost drivers/plan/orders drivers/plan/search
    drivers/plan/drawings drivers/plan/make drivers/plan/choice drivers/plan

    ir/base ir/call ir/run ir/halves ir/record ir/cut ir/loss ir/verify ir/show ir/trace ir

    drivers/base drivers/compare drivers/batch drivers/lowering
    drivers/wire drivers/wire/messages drivers/wire/gpu drivers/files drivers/protocol drivers/placement
    drivers/worker/halves drivers/worker/gradients drivers/worker/measure drivers/worker/data drivers/worker/state
    drivers/worker/compiled drivers/worker drivers/session drivers/count drivers/report
    drivers/engines drivers/engines/local drivers/engines/hub drivers/engines/torchrun drivers/engines/ray
    drivers/engines/joined drivers/engines/open_cluster
    drivers/choice drivers/model/optimizers drivers/model/state drivers/model/recovery drivers/model drivers/generation
    drivers/driver/data drivers/driver/steps drivers/driver/check drivers/driver drivers

    pippy/errors pippy/balance pippy/pipeline pippy/training pippy/integrations pippy/api pippy/cli pippy/__main__ pippy
""".split()
PURE = ("drivers/plan",)  # these import no torch
WITHOUT_TRACER = ("ir/run", "ir/halves", "drivers/worker")

# Top-level names that several files define, each with what it means there. This list may only get shorter.
SEVERAL_MEANINGS = {
    "Connect": "an action of the command log, and the urgent message that it sends",
    "Place": "where a tensor is: in a module, in shared memory, among inputs, and in a stage",
    "Run": "adjacent stages on one worker, and what a forward has left for the backward",
    "Send": "an instruction, and an action of the command log",
    "phases": "the phases of a schedule, in the file of each schedule that has them",
}


def module_name(path: Path) -> str:
    """The name that a file is imported by; a package's is that of its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "pippy" else ("pippy", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def own_files() -> dict[str, Path]:
    """The files of the library by their names."""
    files = [*(ROOT / "ir").rglob("*.py"), *(ROOT / "drivers").rglob("*.py")]
    files += [
        path for path in (ROOT / "pippy").rglob("*.py") if path.relative_to(ROOT).parts[1] not in ("ir", "drivers")
    ]
    return {module_name(path): path for path in sorted(files)}


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: import by the full path, not relatively"
            yield node.lineno, node.module or ""
            # `from pippy import drivers` names a module too
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def layer_of(path: Path) -> int:
    """The number of the innermost layer that a file is in."""
    name = str(path.relative_to(ROOT).with_suffix("")).removesuffix("/__init__")
    while name not in LAYERS:
        name, _, _ = name.rpartition("/")
    return LAYERS.index(name)


def upward_imports(files: Mapping[str, Path], path: Path) -> list[str]:
    """What a file imports from a layer above its own, and what it imports by the name of a link's target."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for line, name in imported_names(path)
        if name.partition(".")[0] in ("ir", "drivers")
        or (name in files and name != "pippy" and layer_of(files[name]) > layer_of(path))
    ]


def defined_names(path: Path) -> Iterator[str]:
    """The names that a file defines at its top level, without those that begin with an underscore."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            targets = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            assigned = node.targets if isinstance(node, ast.Assign) else [node.target]
            targets = [
                name.id for each in assigned for name in getattr(each, "elts", [each]) if isinstance(name, ast.Name)
            ]
        else:
            continue
        yield from (name for name in set(targets) if not name.startswith("_"))


def files_by_name(files: Mapping[str, Path]) -> dict[str, list[str]]:
    """The files that define each top-level name."""
    found = defaultdict(list)
    for path in files.values():
        for name in set(defined_names(path)):
            found[name].append(str(path.relative_to(ROOT)))
    return found


def graph_of(files: Mapping[str, Path]) -> nx.DiGraph:
    """Which file imports which. A package's own file names those below it, so that it is left out."""
    modules = {name for name, path in files.items() if path.name != "__init__.py"}
    graph = nx.DiGraph()
    graph.add_nodes_from(modules)
    graph.add_edges_from(
        (name, to) for name in modules for _, to in imported_names(files[name]) if to in modules - {name}
    )
    return graph


def circles(files: Mapping[str, Path]) -> list[list[str]]:
    return [sorted(group) for group in nx.strongly_connected_components(graph_of(files)) if len(group) > 1]


def test_imports_run_downward():
    files = own_files()
    assert [fault for path in files.values() for fault in upward_imports(files, path)] == []


def test_every_layer_is_there():
    assert [layer for layer in LAYERS if not (ROOT / layer).is_dir() and not (ROOT / f"{layer}.py").is_file()] == []
    assert len(set(LAYERS)) == len(LAYERS)


def test_the_page_for_changers_lists_the_rooms_in_this_order():
    page = (ROOT / "docs/changing.md").read_text()
    listed = re.findall(r"^\| `((?:ir|drivers)/\w+)` \| (.*) \|$", page, re.MULTILINE)
    rooms = [each for each in LAYERS if each.count("/") == 1 and each.startswith(("ir/", "drivers/"))]
    rooms = [each for each in rooms if each != "drivers/plan"]  # which stands in front, as it is pure Python
    assert [room for room, _ in listed if room != "drivers/plan"] == rooms
    for room, text in listed:
        assert text == (ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text())) or "").split("\n")[0]


def test_no_files_name_one_another_in_a_circle():
    assert circles(own_files()) == []


def test_a_name_is_defined_in_one_file():
    several = {name: where for name, where in files_by_name(own_files()).items() if len(where) > 1}
    assert {name: where for name, where in several.items() if name not in SEVERAL_MEANINGS} == {}
    assert [name for name in SEVERAL_MEANINGS if name not in several] == [], "take these off the list"


@pytest.mark.parametrize("folder", PURE)
def test_schedules_are_pure_python(folder):
    imported = {name for path in (ROOT / folder).rglob("*.py") for _, name in imported_names(path)}
    assert [name for name in imported if name.split(".")[0] == "torch" or name.startswith("pippy.ir")] == []


@pytest.mark.parametrize("folder", WITHOUT_TRACER)
def test_what_runs_stages_does_not_import_the_tracer(folder):
    files = own_files()
    graph = graph_of(files)
    needed = {name for start in graph if ROOT / folder in files[start].parents for name in nx.descendants(graph, start)}
    assert sorted(name for name in needed if name.startswith("pippy.ir.trace")) == []


def test_faults_are_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    texts = {
        "ir/run/a.py": "import pippy.drivers.driver.drivers\nimport pippy.ir.run.b\nimport ir.run.b\n",
        "ir/run/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pippy.ir.run import a\n",
        "drivers/driver/drivers.py": "from pippy.ir.run.a import x\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    files = own_files()
    assert upward_imports(files, tmp_path / "ir/run/a.py") == [
        "ir/run/a.py:1: pippy.drivers.driver.drivers",
        "ir/run/a.py:3: ir.run.b",
    ]
    assert circles(files)[0][-2:] == ["pippy.ir.run.a", "pippy.ir.run.b"]


def test_names_of_several_files_are_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "ir").mkdir()
    (tmp_path / "ir/a.py").write_text("class Part: ...\nKINDS: tuple = ()\n_own, free = 1, 2\n")
    (tmp_path / "ir/b.py").write_text("def Part(): ...\nKINDS = free = _own = 1\n")
    assert {name: len(where) for name, where in files_by_name(own_files()).items()} == {
        "Part": 2,
        "KINDS": 2,
        "free": 2,
    }


def test_the_folders_are_links():
    assert (ROOT / "pippy/ir").is_symlink()
    assert (ROOT / "pippy/drivers").is_symlink()
