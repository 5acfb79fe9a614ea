"""Errors of public calls: for an argument that does not fit, they name the call that takes it, or the right spelling.

`placing_words` is a decorator, of a function or of a class with all its public methods. It does nothing unless Python refuses
the arguments: then it raises an `InputError` in place of Python's TypeError.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from types import FunctionType
from typing import Any, TypeVar

from pippy.ir.base.brief import brief, some
from pippy.ir.base.errors import InputError
from pippy.ir.base.placed_words import place_words, refuse_words

_Call = TypeVar("_Call", bound=Callable[..., Any])
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def placing_words(
    usage: str = "", methods: dict[str, str] | None = None, owner: str = "", more: Iterable[str] = ()
) -> Callable[[_Call], _Call]:
    """The decorator. ``usage`` is the text of a call of the function, or of the class; ``methods`` has the texts of methods.

    Errors of other calls advise a call with a usage if it takes the word. ``owner`` is the usual name for an object of the
    class, and ``more`` are words that the call takes without naming them.

    >>> @placing_words("area(width)")
    ... def area(width, *, height=1):
    ...     return width * height
    >>> area(2, hight=3)
    Traceback (most recent call last):
    pippy.ir.base.errors.InputError: area() takes no hight=; did you mean height=?
    >>> area(2, width=3)
    Traceback (most recent call last):
    pippy.ir.base.errors.InputError: area(): multiple values for argument 'width'; it is called as area(width)
    """

    def decorate(call: Any) -> Any:
        if not isinstance(call, type):
            return _told(call, call.__name__, usage, more)
        for name, value in list(vars(call).items()):
            if name != "__init__" and name.startswith("_"):
                continue
            if isinstance(value, staticmethod):
                setattr(call, name, staticmethod(_told(value.__func__, f"{call.__name__}.{name}", "")))
            elif isinstance(value, FunctionType) and name == "__init__":
                setattr(call, name, _told(value, call.__name__, usage, more))
            elif isinstance(value, FunctionType):
                setattr(call, name, _told(value, f"{owner or call.__name__}.{name}", (methods or {}).get(name, "")))
        return call

    return decorate


def words_of(*calls: Callable[..., Any]) -> set[str]:
    """The words that calls take by name, but for ``self``."""
    parameters = [each for call in calls for each in inspect.signature(call).parameters.values()]
    return {each.name for each in parameters if each.kind not in (*_VARIABLE, each.POSITIONAL_ONLY)} - {"self"}


def takes_any(call: Callable[..., Any]) -> bool:
    """Whether a call takes words that it does not name."""
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(call).parameters.values())


def check_words(
    call: str, keywords: dict[str, Any], callee: Callable[..., Any], accepted: Collection[str] = (), filled: str = ""
) -> None:
    """Raise if words that are passed on to ``callee`` are not taken by it, or are ``filled`` by the call already.

    ``accepted`` are the words of the call itself.
    """
    try:
        known = None if takes_any(callee) else words_of(callee)
    except (TypeError, ValueError):  # what is written in C may have no signature
        known = None
    if known is not None:
        refuse_words(call, keywords, [*accepted, *sorted(known - {filled})])


def _told(function: Any, label: str, usage: str, more: Iterable[str] = ()) -> Any:
    signature = inspect.signature(function)
    if usage:
        place_words(usage, [*(name for name in words_of(function) if not name.startswith("_")), *more])

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            told = _unfit(signature, label, usage, args, kwargs)
            if told is None or isinstance(error, InputError):
                raise
        raise told

    return call


def _unfit(signature: inspect.Signature, label: str, usage: str, args: Any, kwargs: Any) -> InputError | None:
    """The error for arguments that a call cannot be made with; None if it can."""
    try:
        signature.bind(*args, **kwargs)
        return None
    except TypeError:
        pass
    parameters = [
        each.name for each in signature.parameters.values() if each.kind not in _VARIABLE and each.name != "self"
    ]
    any_word = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    try:
        refuse_words(label, {} if any_word else kwargs, [each for each in parameters if not each.startswith("_")])
    except InputError as error:
        return error
    written = usage or f"{label}({', '.join(parameters)})"
    return InputError(f"{label}(): {misfits(signature, args, kwargs)}; it is called as {written}")


def misfits(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """All faults of the arguments of a call, where Python names only the first; empty if it finds another kind of fault.

    >>> misfits(inspect.signature(lambda x, mask, *, scale: 0), (1,), {"masks": 2, "scales": 3})
    "missing required arguments: 'mask', 'scale'; got unexpected keyword arguments 'masks', 'scales'"
    """
    parameters = list(signature.parameters.values())
    kinds = {each.kind for each in parameters}
    by_position = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    named = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    passed = {each.name for each in by_position[: len(args)]} | {*kwargs}
    stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [each.name for each in parameters if each.default is each.empty and each.kind not in stars]
    unknown = [] if stars[1] in kinds else [name for name in kwargs if name not in named]
    twice = [each.name for each in by_position[: len(args)] if each.name in kwargs]
    return "; ".join(
        [
            *_listed("missing a required argument: {}", "missing required arguments: {}", required, passed),
            *_listed("got an unexpected keyword argument {}", "got unexpected keyword arguments {}", unknown),
            *_listed("multiple values for argument {}", "multiple values for arguments {}", twice),
            *["too many positional arguments"] * (len(args) > len(by_position) and stars[0] not in kinds),
        ]
    )


def _listed(one: str, several: str, names: Sequence[str], without: Set[str] = frozenset()) -> Iterator[str]:
    left = [brief(name) for name in names if name not in without]
    if left:
        yield (one if len(left) == 1 else several).format(", ".join(some(left)))
