"""Every example in a docstring of the schedules runs, and every public class and function in them is described."""

import ast
import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import pippy.drivers.schedules as package

MODULES = sorted(module.name for module in pkgutil.iter_modules(package.__path__))


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    module = importlib.import_module(f"{package.__name__}.{name}")
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(module, optionflags=flags).failed == 0


@pytest.mark.parametrize("name", package.__all__)
def test_what_is_exported_has_an_example(name):
    assert ">>>" in (getattr(package, name).__doc__ or ""), f"{name} has no example"


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is_about(name):
    path = Path(package.__path__[0]) / f"{name}.py"
    assert ast.get_docstring(ast.parse(path.read_text()))
