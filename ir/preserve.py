"""Tracing runs the user's `forward` with stand-ins for tensors; whatever that leaves on the model is taken back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pippy.ir import source

_TABLES = ("_parameters", "_buffers", "_modules")


@contextmanager
def unaltered(model: nn.Module, silent: bool = False) -> Iterator[None]:
    """Leave every module of ``model`` with the attributes that it had, and say what its forward tried to set."""
    before = [(path, module, _attributes(module)) for path, module in model.named_modules()]
    try:
        yield
    finally:
        changed = [f"{path}.{name}".lstrip(".") for path, module, old in before for name in _restore(module, old)]
    if changed and not silent:
        source.warn(
            f"forward() sets {', '.join(changed)} on the model; a pipeline's stages do not set attributes, so it stays "
            "as it was. Return the value, or keep it in a buffer that is changed in place"
        )


def _attributes(module: nn.Module) -> dict[str, dict[str, Any]]:
    plain = {name: value for name, value in module.__dict__.items() if name not in _TABLES}
    return {"": plain, **{table: dict(module.__dict__[table]) for table in _TABLES}}


def _restore(module: nn.Module, before: dict[str, dict[str, Any]]) -> list[str]:
    changed = []
    for table, old in before.items():
        now = module.__dict__ if table == "" else module.__dict__[table]
        names = [name for name in now if not (table == "" and name in _TABLES)]
        stale = [name for name in names if name not in old or now[name] is not old[name]]
        changed += [name for name in stale if not name.startswith("_tensor_constant")]
        for name in stale:
            del now[name]
        for name in old.keys() - now.keys():
            now[name] = old[name]
    return changed
