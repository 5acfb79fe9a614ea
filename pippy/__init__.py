"""A graph compiler for pipeline parallelism in PyTorch.

Mark where a model is cut, call `pipeline(model, loss_fn)`, print the Pipe, run it.

The public names are those of `pippy.api`. They are imported when the first of them is used, because that imports torch:
the command line answers `--help`, and works with schedules, without it.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pippy.ir.base.logs import set_up_logging

if TYPE_CHECKING:
    from pippy.api import *  # noqa: F403 - it has an __all__
    from pippy.api import __all__ as __all__

    __version__: str


class _Package(ModuleType):
    """A package whose files do not hide the public names that they are called by, as pippy/pipeline.py does."""

    def __setattr__(self, name: str, value: Any) -> None:
        """The import system sets every module that it has imported; of these, only folders are kept."""
        if not isinstance(value, ModuleType) or hasattr(value, "__path__"):
            super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    """The version, a public name, or else a file of this folder that was imported."""
    if name == "__version__":
        return _version()
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module("pippy.api"), name, None) or sys.modules.get(f"{__name__}.{name}")
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found


def __dir__() -> list[str]:
    return [*globals(), "__version__", *__getattr__("__all__")]


def _version() -> str:
    """The version of what is installed; a folder of sources that was not installed has none, so it is before all."""
    from importlib.metadata import PackageNotFoundError, version  # it takes as long as the rest of this file

    try:
        return version("pippy-compiler")
    except PackageNotFoundError:
        return "0+unknown"


sys.modules[__name__].__class__ = _Package
set_up_logging()
