"""The parts of a model by their names, while it is traced."""

from typing import Any

from torch import nn


def lookup_attribute(modules: dict[str, nn.Module], target: str) -> Any:
    """The value of the target of a node: a module among ``modules``, by their paths, or an attribute of one."""
    if target in modules:
        return modules[target]
    path, _, name = target.rpartition(".")
    found = modules[path] if path in modules else _walk(modules[""], path)
    return getattr(found, name)


def _walk(value: Any, path: str) -> Any:
    for atom in path.split("."):
        value = getattr(value, atom)
    return value
