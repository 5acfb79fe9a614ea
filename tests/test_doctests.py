"""The examples in the docstrings run."""

import doctest
import importlib
import linecache
import pkgutil

import pytest

import pippy


def all_modules() -> list[str]:
    return ["pippy", *(module.name for module in pkgutil.walk_packages(pippy.__path__, "pippy."))]


@pytest.mark.parametrize("name", all_modules())
def test_examples(name):
    linecache.clearcache()  # doctest looks through all of it for each docstring: tests before have left it thousands of graphs
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0


def test_public_names_have_an_example():
    without = [name for name in pippy.__all__ if name != "errors" and ">>>" not in (getattr(pippy, name).__doc__ or "")]
    assert [name for name in without if not issubclass(getattr(pippy, name), pippy.PippyWarning)] == []
