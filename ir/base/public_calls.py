"""Errors of public calls, for words and for values.

For a word that a call does not take, the error names the call that takes it, or the right spelling. `placing_words` is a
decorator, of a function or of a class with all its public methods. Public calls note their words with it.

Whole numbers, flags and amounts are checked in every layer alike. The error says what the argument is for.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from math import inf
from types import FunctionType
from typing import Any, TypeGuard, TypeVar

from pippy.ir.base.errors import InputError, PippyError
from pippy.ir.base.readable import near_names, some
from pippy.ir.base.trees import describe

_Call = TypeVar("_Call", bound=Callable[..., Any])
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_calls: dict[str, list[str]] = {}  # the calls that take a word, as one writes them


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


def place_words(usage: str, words: Iterable[str]) -> None:
    """Note that a call takes these words. It is written as in "pipeline(model, loss_fn)"."""
    for word in words:
        written = [each.partition("=")[0].strip() for each in usage.partition("(")[2].rstrip(")").split(",")]
        shown = usage if word in written else f"{usage[:-1]}, {word}=...)"
        if shown not in _calls.setdefault(word, []):
            _calls[word].append(shown)


def hint(word: str, accepted: Collection[str]) -> str:
    """The advice for a word that a call with the words ``accepted`` does not take; empty if there is none.

    >>> place_words("sew(pieces, x)", ["pieces", "buttonholes"])
    >>> hint("pieces", ["x"]), hint("butonholes", ["x"])
    ('it belongs to sew(pieces, x)', 'did you mean buttonholes=, as in sew(pieces, x, buttonholes=...)?')
    >>> hint("loss_fun", ["loss_fn", "split"])
    'did you mean loss_fn=?'
    """
    if word in _calls:
        return f"it belongs to {' or '.join(_calls[word][:2])}"
    near = near_names(word, accepted, most=2, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(f'{each}=' for each in near)}?"
    far = near_names(word, _calls, most=1, cutoff=0.75)
    return f"did you mean {far[0]}=, as in {_calls[far[0]][0]}?" if far else ""


def hints(words: Iterable[str], accepted: Collection[str]) -> str:
    """The hints for several words, each with its word if there are more."""
    by_word = {word: hint(word, accepted) for word in words}
    told = [f"{word}=: {text}" if len(by_word) > 1 else text for word, text in by_word.items() if text]
    return "; ".join(told)


def refuse_words(
    call: str, keywords: Mapping[str, object], accepted: Collection[str], unless_known: bool = False
) -> None:
    """Raise if a call gets words that are not its own. With ``unless_known``, only for words with a hint.

    >>> refuse_words("make", {"sise": 3}, ["size"])
    Traceback (most recent call last):
    pippy.ir.base.errors.InputError: make() takes no sise=; did you mean size=?
    """
    unknown = [word for word in keywords if word not in accepted]
    told = hints(unknown, accepted)
    if unknown and (told or not unless_known):
        words = ", ".join(f"{word}=" for word in unknown)
        raise InputError(f"{call}() takes no {words}; {told or 'it takes ' + ', '.join(some(accepted, most=30))}")


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
    known = words_of(function)
    accepted = [name for name in inspect.signature(function).parameters if name in known and not name.startswith("_")]
    if usage:
        place_words(usage, [*accepted, *more])
    if takes_any(function):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.keys() <= known:
            refuse_words(label, {word: value for word, value in kwargs.items() if word not in known}, accepted)
        return function(*args, **kwargs)

    return call


def is_whole(value: Any, least: int = 1) -> TypeGuard[int]:
    """Whether this is a whole number, not less than the least.

    >>> is_whole(3), is_whole(True), is_whole(0), is_whole(2.0)
    (True, False, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_count(name: str, value: Any, what: str, error: type[PippyError], *, least: int = 1, none: str = "") -> None:
    """Raise unless this is a whole number. ``none`` says what None stands for, where it may be given.

    >>> check_count("keep", None, "how many to keep", PippyError, none="for all")
    >>> check_count("keep", 0, "how many to keep", PippyError, none="for all")
    Traceback (most recent call last):
    pippy.ir.base.errors.PippyError: keep=0: give how many to keep, 1 or more, or None for all
    """
    if not is_whole(value, least) and not (none and value is None):
        raise error(f"{name}={describe(value)}: give {what}, {least} or more{none and f', or None {none}'}")


def check_flag(name: str, value: Any, error: type[PippyError], *, true: str = "", false: str = "") -> None:
    """Raise unless this is True or False. ``true`` and ``false`` say what they stand for.

    >>> check_flag("strict", "no", PippyError, true="to have every name")
    Traceback (most recent call last):
    pippy.ir.base.errors.PippyError: strict='no': give True to have every name, or False
    """
    if not isinstance(value, bool):
        words = f"True{true and f' {true},'} or False{false and f' {false}'}"
        raise error(f"{name}={describe(value)}: give {words}")


def check_amount(
    name: str, value: Any, what: str, error: type[PippyError], *, most: float = inf, zero: bool = False, none: str = ""
) -> None:
    """Raise unless this is a number above 0, or 0 if ``zero`` may be given, and not above the ``most``.

    >>> check_amount("timeout", -1, "how many seconds to wait", PippyError)
    Traceback (most recent call last):
    pippy.ir.base.errors.PippyError: timeout=-1: give how many seconds to wait, more than 0
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and (value > 0 or (zero and value == 0)) and value <= most) and not (none and value is None):
        bounds = "more than 0" if most == inf else f"from 0 to {most:g}"
        raise error(f"{name}={describe(value)}: give {what}, {bounds}{none and f', or None {none}'}")
