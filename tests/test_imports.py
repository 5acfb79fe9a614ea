"""`import pippy` is quick: torch is imported when it is needed, and all names work as if it had been."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

import pippy
from tests.forked_scripts import run_forked

WITHOUT_TORCH = [
    ["--help"],
    ["--version"],
    *([name, "--help"] for name in ("show", "schedule", "compare", "validate", "run", "doctor")),
    ["schedule", "1F1B", "-p", "2", "-m", "3"],
    ["compare", "-p", "2", "-m", "3"],
    ["validate", "-"],
    ["run", "no_such_script.py", "-n", "2"],
    ["shw"],
]


def python(code, *args):
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, input="", timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_added_by(statement):
    """The modules that a statement imports where torch is imported already."""
    return python(f"import sys, torch; was = {{*sys.modules}}\n{statement}\nprint(*({{*sys.modules}} - was))").split()


def test_import_pippy_adds_next_to_nothing_to_the_import_of_torch():
    """Only what sets up its logger."""
    logs = {"pippy.ir", "pippy.ir.base", "pippy.ir.base.errors", "pippy.ir.base.logs"}
    assert set(modules_added_by("import pippy")) == {"pippy", *logs}


def test_the_public_names_need_little_beside_torch():
    """What they import is counted: time depends on the machine. `python exps/startup.py --imports` measures it."""
    modules = modules_added_by("from pippy import *")
    packages = {each.partition(".")[0] for each in modules}
    assert packages - {"pippy", *sys.stdlib_module_names} == {"torch", "cloudpickle"}
    assert len([each for each in modules if each.startswith("torch.")]) <= 10
    assert len([each for each in modules if not each.startswith(("pippy.", "torch.", "cloudpickle"))]) <= 40


def test_help_and_schedules_need_no_torch():
    code = f"""
import sys
from pippy.cli import main
for args in {WITHOUT_TORCH!r}:
    try:
        main(args)
    except SystemExit:
        pass
    assert "torch" not in sys.modules, args
print("done")
"""
    assert python(code).splitlines()[-1] == "done"


FIRST = [
    "import pippy.pipeline, pippy; assert not hasattr(pippy.pipeline, '__file__'); pippy.pipeline.__call__",
    "from pippy.pipeline import pipeline; import pippy; assert pippy.pipeline is pipeline",
    "from pippy import pipeline; assert callable(pipeline)",
    "import pippy, pickle; assert {'Pipe', 'pipeline', 'verify'} <= set(dir(pippy)); pippy.ir.pipe.Pipe; "
    "pippy.drivers.driver.drivers; assert pickle.loads(pickle.dumps(pippy.Pipe)) is pippy.Pipe",
    "import pippy.api, sys; assert not {'ray', 'transformers', 'accelerate'} & set(sys.modules)",
    "from pippy import *; assert Pipe and pipeline and local_cluster and errors.PippyError",
    "import pippy.errors; assert pippy.errors.MarkError and pippy.errors is __import__('sys').modules['pippy.errors']; "
    "from pippy.errors import TracingError, StepError; from pippy import errors; assert errors.StepError is StepError",
    "from pippy import drivers, ir, cli; assert drivers.__path__ and ir.__path__ and cli.main",
    "from pippy.cli import main; import pippy; assert pippy.Pipe.__name__ == 'Pipe'",
    f"import pippy; assert '__version__' in dir(pippy) and pippy.__version__ == {version('pippy-compiler')!r}",
    # what records graphs takes half a second, which a script without such stages need not wait for
    "import sys, pippy; pippy.PipelineDriver; assert not {'sympy', 'pippy.ir.halves.joint'} & set(sys.modules)",
]


def test_names_are_found_whatever_is_imported_first(tmp_path):
    """Each is tried in a process that has what pippy imports, and nothing of pippy yet."""
    ended = run_forked(tmp_path, {f"script_{at}": code for at, code in enumerate([*FIRST, "1 / 0"])})
    assert [status for status, _ in ended.values()] == [0] * len(FIRST) + [1], ended


def test_what_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'pippy' has no attribute 'pipelin'"):
        pippy.pipelin  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Pip'"):
        from pippy import Pip  # noqa: F401
    assert not hasattr(pippy, "_secret")


def test_every_public_name_is_that_of_the_api():
    from pippy import api

    assert pippy.__all__ == api.__all__
    assert all(getattr(pippy, name) is getattr(api, name) for name in api.__all__)


def test_every_error_is_in_one_place():
    from pippy import errors
    from pippy.drivers.base import errors as drivers_errors
    from pippy.ir.base import errors as ir_errors

    defined = {**vars(ir_errors), **vars(drivers_errors)}
    kinds = {
        name for name, each in defined.items() if isinstance(each, type) and issubclass(each, (Exception, Warning))
    }
    assert set(errors.__all__) == kinds
    assert all(getattr(errors, name) is defined[name] for name in kinds)


def test_errors_are_imported_without_torch():
    assert python("import sys, pippy.errors; print('torch' in sys.modules)") == "False\n"


def test_the_version_is_found_when_it_is_asked_for_and_needs_no_torch():
    late = "import sys, pippy; before = 'importlib.metadata' in sys.modules; pippy.__version__"
    assert python(f"{late}; print(before, 'importlib.metadata' in sys.modules, 'torch' in sys.modules)") == (
        "False True False\n"
    )


def test_sources_that_were_not_installed_have_a_version_before_all_others(tmp_path):
    (tmp_path / "pippy").symlink_to(Path(pippy.__file__).parent)
    code = "import sys; sys.path.insert(0, sys.argv[1]); import pippy; print(pippy.__file__, pippy.__version__)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=280
    )
    assert done.stdout.split() == [str(tmp_path / "pippy/__init__.py"), "0+unknown"], done.stderr
    assert Version("0+unknown") < Version("0.1.0.dev0")
