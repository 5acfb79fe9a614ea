"""What is installed is one ordinary package, though two of its folders are links."""

import re
import subprocess
import sys
import tomllib
import zipfile

import pytest
from packaging.specifiers import SpecifierSet

from tests.distributions import ROOT, build_wheel, main


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("built"))


def test_the_wheel_holds_every_module_once(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    modules = [name for name in names if name.endswith(".py")]
    expected = {f"pippy/{path.relative_to(ROOT)}" for part in ("ir", "drivers") for path in (ROOT / part).rglob("*.py")}
    links = ("ir", "drivers")
    own = [path for path in (ROOT / "pippy").rglob("*.py") if path.relative_to(ROOT / "pippy").parts[0] not in links]
    expected |= {str(path.relative_to(ROOT)) for path in own}
    assert sorted(modules) == sorted(expected)
    assert "pippy/py.typed" in names
    assert {"pippy/drivers/report/page.css", "pippy/drivers/report/page.js"} <= set(names)
    assert wheel.name.startswith("pippy_compiler-")


def test_the_wheel_works_without_the_checkout(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    script = (
        "import torch, pippy; from torch import nn; assert pippy.__file__.startswith(r'%s'), pippy.__file__;"
        "pipe = pippy.Pipe.from_sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.MSELoss());"
        "pipe(torch.ones(1, 2), torch.ones(1, 2)); print(pipe.num_stages)"
    ) % (tmp_path / "site")
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.stdout.strip() == "2", done.stderr


def test_the_citation_and_the_classifiers_say_what_the_project_says():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = dict(re.findall(r"^(\w+): (.+)$", (ROOT / "CITATION.cff").read_text(), re.M))
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])
    named = [each.rpartition(" :: ")[2] for each in project["classifiers"] if "Python :: 3." in each]
    assert all(python in SpecifierSet(project["requires-python"]) for python in named)
    tried = (ROOT / "README.md").read_text().partition("Parts of the tests were run on Python ")[2]
    assert named[1:] == tried.partition(", and")[0].split(" and ")
    workflow = (ROOT / ".github/workflows/checks.yml").read_text()
    assert re.findall(r'"(3\.\d+)"', workflow) == named and "run: .ci/run\n" in workflow


def test_both_distributions_are_built_in_place_of_older_ones(tmp_path):
    (tmp_path / "older.whl").touch()
    main(tmp_path)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    names = sorted(each.name for each in tmp_path.iterdir())
    assert names == [f"pippy_compiler-{version}-py3-none-any.whl", f"pippy_compiler-{version}.tar.gz"]
