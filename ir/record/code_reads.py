"""What functions of the user's read beside their arguments: globals, what closures hold, keywords of a `functools.partial`.

    loss_fn = lambda output, target: mse(output, target) * beta + SETTINGS["decay"] * helper(output)

    loss_fn ─global─▶ beta, SETTINGS, SETTINGS["decay"], helper ─global─▶ what helper reads

Only code of the project is followed, not that of installed packages. What is inside of lists and of other objects is not noted.
"""

import contextlib
import dis
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from cloudpickle.cloudpickle import _should_pickle_by_reference
from torch import nn

from pippy.ir.base import source

GONE = object()
_OF_MODULES = vars(nn.Module())  # what is no option of a module
_LONGEST = 64  # entries of a dictionary that are noted
_MOST_NUMBERS = 1 << 16  # of a tensor that are copied


@dataclass(frozen=True)
class Read:
    """A place that code reads: its name, how to look there, and what was there.

    If it ``travels``, a process that the code is sent to has what is there now; else that process imports its own. ``numbers``
    are those of a tensor that the script may write, with its version.
    """

    name: str
    look: Callable[[], Any]
    value: Any
    travels: bool
    numbers: tuple[int, torch.Tensor] | None = None

    def may_have_changed(self) -> bool:
        """Whether another object is there now, or a tensor was written. This is asked before each step."""
        return self.look() is not self.value or (self.numbers is not None and self.value._version != self.numbers[0])

    def has_changed(self) -> bool:
        """Whether something else is there now, or other numbers. An equal number or string is the same."""
        return not is_same(self.look(), self.value) or self._is_written()

    def _is_written(self) -> bool:
        if self.numbers is None or not self.may_have_changed():
            return False
        return not torch.equal(_numbers_of(self.value), self.numbers[1])

    def looked_again(self) -> "Read":
        """The place with what is there now."""
        value = self.look()
        is_noted = self.numbers is not None and isinstance(value, torch.Tensor)
        return replace(self, value=value, numbers=(value._version, _numbers_of(value)) if is_noted else None)


def noting_numbers(reads: Iterable[Read]) -> list[Read]:
    """The places, where those with a tensor that only the script writes note its numbers."""
    return [
        replace(each, numbers=(each.value._version, _numbers_of(each.value))) if _may_be_written(each.value) else each
        for each in reads
    ]


def _may_be_written(value: Any) -> bool:
    is_plain = isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta
    return is_plain and not value.requires_grad and not value.is_inference()


def _numbers_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the numbers; of many, sums that show what was written."""
    numbers = tensor.detach()
    if numbers.numel() <= _MOST_NUMBERS:
        return numbers.clone()
    return torch.stack([numbers.double().sum(), numbers.double().square().sum()])


PLAIN = (bool, int, float, complex, str, bytes, type(None))


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are one object, or equal numbers, strings and the like of one class."""
    return one is other or (type(one) is type(other) and is_plain_value(one) and one == other)


def have_same_values(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two dictionaries have the same names, with the same values."""
    return one.keys() == other.keys() and all(is_same(value, other[name]) for name, value in one.items())


def is_plain_value(value: Any) -> bool:
    """Whether a value is a number, a string, None, or a tuple of such."""
    return all(map(is_plain_value, value)) if type(value) is tuple else type(value) in PLAIN


def code_reads(roots: Iterable[Any], known: Collection[int] = ()) -> list[Read]:
    """What functions and callable objects read, and the functions that they name. Of a class, its forward and what that names.

    Modules with ``known`` ids are not looked into.

    >>> smoothing = 0.1
    >>> def loss(output, target):
    ...     return (output - target).square().sum() * smoothing
    >>> [each.name.partition(" of ")[0] for each in code_reads([functools.partial(loss, target=0)])]
    ["'target'", "the global 'smoothing'"]
    """
    found: dict[tuple[int, str], Read] = {}
    seen: dict[int, Any] = {}
    pending = list(roots)
    while pending:
        each = pending.pop()
        if id(each) in seen or id(each) in known:
            continue
        seen[id(each)] = each
        for holder, key, read in _reads_of(each, pending):
            found.setdefault((id(holder), key), read)
            pending.append(read.value)
    return list(found.values())


def _reads_of(value: Any, pending: list[Any]) -> Iterator[tuple[Any, str, Read]]:
    if isinstance(value, functools.partial):
        pending += [value.func, *value.args]
        yield from _entries(value.keywords, "of a functools.partial", True)
    elif isinstance(value, MethodType):
        pending += [value.__func__, value.__self__]
    elif isinstance(value, FunctionType) and source.is_of_project(value.__code__.co_filename):
        yield from _in_function(value)
    elif isinstance(value, type) and issubclass(value, nn.Module):
        pending += reached_methods(value)
    elif isinstance(value, nn.Module):
        pending += [type(value), *value.children()]
        options = {name: each for name, each in vars(value).items() if name not in _OF_MODULES}
        yield from _entries(vars(value), f"of a {type(value).__name__}", True, options)
        yield from _entries(value._buffers, f"of a {type(value).__name__}", True, tensors=True)
    elif callable(value) and not isinstance(value, (type, FunctionType, ModuleType)):
        call = vars(type(value)).get("__call__")
        if isinstance(call, FunctionType) and source.is_of_project(call.__code__.co_filename):
            pending.append(call)
            yield from _entries(vars(value) if hasattr(value, "__dict__") else {}, f"of a {type(value).__name__}", True)


def _in_function(function: FunctionType) -> Iterator[tuple[Any, str, Read]]:
    travels = not _should_pickle_by_reference(function)
    code, known = function.__code__, function.__globals__
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # a cell that is not filled yet
            what = f"{name!r} in the closure of {function.__qualname__}"
            yield cell, name, Read(what, functools.partial(_content, cell), cell.cell_contents, travels)
    writes_items = bool(_names(code, "STORE_SUBSCR"))  # a cache, perhaps
    for name in _names(code, "LOAD_GLOBAL") - _names(code, "STORE_GLOBAL"):
        value = known.get(name, GONE)
        if value is not GONE and not isinstance(value, ModuleType):
            what = f"the global {name!r} of {known.get('__name__')}"
            yield known, name, Read(what, functools.partial(known.get, name, GONE), value, travels)
            if type(value) is dict and not writes_items:
                yield from _entries(value, f"of {what}", travels)


@functools.lru_cache(4096)
def _names(code: CodeType, operation: str) -> frozenset[str]:
    """What the instructions of a kind name, those of functions inside of the code, too."""
    inner = [_names(each, operation) for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(str(each.argval) for each in dis.get_instructions(code) if each.opname == operation).union(*inner)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return GONE


def _entries(
    content: dict[str, Any], of: str, travels: bool, some: Mapping[str, Any] | None = None, tensors: bool = False
) -> Iterator[tuple[Any, str, Read]]:
    for name, value in (content if some is None else some).items() if len(content) <= _LONGEST else ():
        is_read = is_plain_value(value) or callable(value) or (tensors and isinstance(value, torch.Tensor))
        if type(name) is str and is_read:
            yield content, name, Read(f"{name!r} {of}", functools.partial(content.get, name, GONE), value, travels)


def reached_methods(kind: type) -> list[FunctionType]:
    """The forward of a class, and the methods that it names, and so on: those of the project."""
    found: dict[str, FunctionType] = {}
    pending = ["forward"]
    while pending:
        name = pending.pop()
        method = getattr(kind, name, None)
        if name not in found and isinstance(method, FunctionType) and source.is_of_project(method.__code__.co_filename):
            found[name] = method
            pending += method.__code__.co_names
    return list(found.values())


def assigned_attributes(functions: Iterable[Any]) -> frozenset[str]:
    """The attributes that functions assign, of whatever object."""
    codes = [code for each in functions if isinstance(code := getattr(each, "__code__", None), CodeType)]
    return frozenset[str]().union(*[_names(code, "STORE_ATTR") for code in codes])
