"""The marks that say where to cut a model: `pipe_split()` in its code, or a mark on one of its modules.

A mark on a module is a private attribute of plain strings. It changes no name, type or state-dict key, survives
deepcopy and pickle, and only the tracer reads it.
"""

import dis
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from enum import Enum
from types import CodeType
from typing import Any

import torch
from torch import fx, nn

from pippy.ir.base.compiling import original_of
from pippy.ir.base.errors import MarkError
from pippy.ir.base.node_notes import SourceLine
from pippy.ir.base.public_calls import placing_words
from pippy.ir.base.readable import brief, did_you_mean

_ATTRIBUTE = "_pippy_split_points"
_OPERATOR = "pippy_marks::pipe_split"
torch.library.define(_OPERATOR, "() -> ()")
torch.library.impl(_OPERATOR, "BackendSelect")(lambda: None)
EXPORTED_MARK = torch.ops.pippy_marks.pipe_split.default
"""What `pipe_split()` is in a program of `torch.export`."""
fx.node.has_side_effect(EXPORTED_MARK)  # so that it stays, though nobody uses its result

ON_SPLIT: ContextVar[Callable[[], None] | None] = ContextVar("on_split", default=None)
"""What `pipe_split()` calls, in this thread."""


class SplitPoint(Enum):
    """Whether to cut before or after a module's call.

    >>> SplitPoint.END.value
    'end'
    """

    BEGINNING = "beginning"
    END = "end"


def pipe_split() -> None:
    """Cut the model here: the operations before this call and those after it are in different stages.

    Outside of `pipeline()` the call does nothing, so a marked model stays an ordinary model. A program of `torch.export`
    keeps the mark.

    >>> import torch
    >>> class Net(torch.nn.Module):
    ...     def forward(self, x):
    ...         x = torch.relu(x)
    ...         pipe_split()
    ...         return x + 1
    >>> Net()(torch.tensor([-1.0, 1.0]))
    tensor([1., 2.])
    """
    if torch.compiler.is_exporting():
        EXPORTED_MARK()
    elif (record := ON_SPLIT.get()) is not None:
        record()


class recording_splits:
    """Inside, `pipe_split()` calls ``record``, in this thread only."""

    __slots__ = ("_record", "_token")

    def __init__(self, record: Callable[[], None]) -> None:
        self._record = record

    def __enter__(self) -> None:
        self._token = ON_SPLIT.set(self._record)

    def __exit__(self, *raised: object) -> None:
        ON_SPLIT.reset(self._token)


@placing_words()
def annotate_split_points(model: nn.Module, spec: Mapping[str, SplitPoint]) -> None:
    """Cut before (BEGINNING) or after (END) every call of the named modules, without changing the model's code.

    Several calls add marks to each other; `clear_split_points` removes all marks. A module that is called several
    times is cut at each call.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> annotate_split_points(model, {"1": SplitPoint.END})
    >>> list(model.state_dict())
    ['0.weight', '0.bias', '2.weight', '2.bias']
    """
    if not isinstance(model, nn.Module):
        raise MarkError(f"annotate_split_points takes an nn.Module; this is a {type(model).__name__}")
    if not isinstance(spec, Mapping):
        raise MarkError(f"the split points are {brief(spec)}; give a dict: {{'layer.3': SplitPoint.END}}")
    modules = dict(original_of(model).named_modules(remove_duplicate=False))
    for name, point in spec.items():
        _check_annotation(modules, name, point)
    for name, point in spec.items():
        _mark(modules[name], point)


def _check_annotation(modules: Mapping[str, nn.Module], name: str, point: object) -> None:
    if not isinstance(point, SplitPoint):
        raise MarkError(
            f"the split point of {brief(name)} is {brief(point)}; give SplitPoint.BEGINNING or SplitPoint.END"
        )
    if name == "":
        raise MarkError(
            "'' names the whole model, and a cut before or after everything cuts nothing; name a part of it"
        )
    if name not in modules:
        hint = did_you_mean(name, filter(None, modules)) or "see model.named_modules() for its names"
        raise MarkError(f"the model has no module named {brief(name)}; {hint}")


def _mark(module: nn.Module, point: SplitPoint) -> None:
    points = set(getattr(module, _ATTRIBUTE, ())) | {point.value}
    setattr(module, _ATTRIBUTE, tuple(sorted(points)))


def clear_split_points(model: nn.Module) -> None:
    """Remove every mark that `annotate_split_points` and `PipeSplitWrapper` made in ``model``.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    >>> annotate_split_points(model, {"0": SplitPoint.END})
    >>> clear_split_points(model)
    >>> list(annotated_modules(model))
    []
    """
    for module in model.modules():
        module.__dict__.pop(_ATTRIBUTE, None)


def has_marks_inside(module: nn.Module) -> bool:
    """Whether a part of a module is marked, or the code of a forward in it calls `pipe_split()`.

    A mark before or after the module itself is not inside.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    >>> annotate_split_points(model, {"0": SplitPoint.END})
    >>> has_marks_inside(model), has_marks_inside(model[0])
    (True, False)
    """
    return next(marks_inside(module), None) is not None


def marks_inside(module: nn.Module) -> Iterator[str]:
    """The marks that `has_marks_inside` finds, for an error: modules by their names in ``module``, and lines of code."""
    for name, each in module.named_modules():
        if each is not module and split_points(each):
            yield f"  the mark on {name!r} ({type(each).__name__})"
        code = getattr(inspect.unwrap(type(each).forward), "__code__", None)
        yield from () if code is None else map(SourceLine.excerpt, _lines_that_split(code))


def _lines_that_split(code: CodeType) -> Iterator[SourceLine]:
    for each in dis.get_instructions(code) if pipe_split.__name__ in code.co_names else ():
        if each.argval == pipe_split.__name__ and each.positions is not None:
            yield SourceLine(code.co_filename, each.positions.lineno or code.co_firstlineno, code.co_name)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _lines_that_split(each)


def split_points(module: nn.Module) -> tuple[SplitPoint, ...]:
    """The marks on this one module."""
    return tuple(SplitPoint(value) for value in module.__dict__.get(_ATTRIBUTE, ()))


def annotated_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The marked modules of ``model`` and their names."""
    return ((name, module) for name, module in model.named_modules() if split_points(module))


class PipeSplitWrapper:
    """Mark a module while the model is built: ``self.encoder = PipeSplitWrapper(Encoder(), SplitPoint.END)``.

    The call returns the module itself. Nothing is wrapped, so no qualified name, type or state-dict key changes.

    >>> from torch import nn
    >>> layer = nn.Linear(4, 4)
    >>> PipeSplitWrapper(layer, SplitPoint.END) is layer
    True
    """

    SplitPoint = SplitPoint

    def __new__(cls, module: nn.Module, split_point: Any = SplitPoint.BEGINNING) -> nn.Module:  # type: ignore[misc]
        if not isinstance(module, nn.Module):
            raise MarkError(f"PipeSplitWrapper takes an nn.Module; this is a {type(module).__name__}")
        if not isinstance(split_point, SplitPoint):
            raise MarkError(f"the split point is {brief(split_point)}; give SplitPoint.BEGINNING or SplitPoint.END")
        _mark(module, split_point)
        return module
