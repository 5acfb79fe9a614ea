"""What is installed is one ordinary package, though two of its folders are links."""

import subprocess
import sys
import zipfile

import pytest

from tests.distributions import ROOT, build_wheel


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
