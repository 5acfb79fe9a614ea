"""Finds what a user names on the command line: `module:Name` or `path/to/file.py:Name`."""

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from pippy.cli.problems import hint_at, put_first_in_path, user_code_error
from pippy.ir.base.near_names import near_names


def find(target: str) -> Any:
    """The object with this name. Modules are searched in the current folder, too.

    >>> find("math:pi")
    3.141592653589793
    >>> find("math:factorail")
    Traceback (most recent call last):
    click.exceptions.ClickException: math has no 'factorail'; did you mean 'factorial'?
    """
    where, colon, name = target.rpartition(":")
    if not colon:
        where, name = name, ""
    if not where:
        raise click.ClickException(
            f"{target!r} names nothing; say where it is and what it is called, as in model.py:Net"
        )
    module = _module_of_file(where) if where.endswith(".py") else _module(where)
    if not name:
        raise click.ClickException(f"{target!r} names a module; name the model in it, too{_choices(where, module)}")
    return _inside(where, module, name)


def find_loss(target: str) -> Any:
    """The loss with this name: one of torch by the name of its class alone, or one of the user's, as `find` finds it.

    >>> find_loss("CrossEntropyLoss")
    CrossEntropyLoss()
    >>> find_loss("CrossEntropy")
    Traceback (most recent call last):
    click.exceptions.ClickException: torch.nn has no loss 'CrossEntropy'; did you mean 'CrossEntropyLoss'? ...
    """
    if not target.isidentifier():
        value = find(target)
        return call(target, value, {}) if inspect.isclass(value) else value
    from torch.nn.modules import loss

    every = {name: getattr(loss, name) for name in loss.__all__}
    known = {name: kind for name, kind in every.items() if _needs(kind) == 0 and _needs(kind.forward) == 3}
    if target not in known:
        hint = hint_at(target, list(known))
        raise click.ClickException(f"torch.nn has no loss {target!r}; {hint} Name one of yours as in model.py:loss")
    return known[target]()


def _needs(function: Callable[..., Any]) -> int:
    """How many arguments have to be given."""
    return sum(each.default is each.empty for each in inspect.signature(function).parameters.values())


def _inside(where: str, module: ModuleType, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            known = [each for each in vars(value) if not each.startswith("_")] if hasattr(value, "__dict__") else []
            hint = hint_at(part, known if near_names(part, known, cutoff=0.6) else _own(value) or known)
            raise click.ClickException(f"{where} has no {name!r}; {hint}") from None
    return value


def _own(holder: Any) -> list[str]:
    """The names that a module defines, without those that it imports."""
    return [name for name, each in vars(holder).items() if getattr(each, "__module__", "") == holder.__name__]


def _choices(where: str, module: ModuleType) -> str:
    own = _own(module)
    return f", as in {where}:{own[0]}; {hint_at('', own)}" if own else f", as in {where}:Net"


def _module(name: str) -> ModuleType:
    put_first_in_path(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise user_code_error(name, error) from error
        known = [each.name for each in pkgutil.iter_modules([str(Path.cwd())])]
        raise click.ClickException(
            f"there is no module {error.name!r}, neither in this folder nor where Python looks; {hint_at(name, known)}"
        ) from None
    except (Exception, SystemExit) as error:
        raise user_code_error(name, error) from error


def _module_of_file(path: str) -> ModuleType:
    file = Path(path).resolve()
    if not file.is_file():
        known = [each.name for each in file.parent.glob("*.py")]
        raise click.ClickException(f"there is no file {path!r}; {hint_at(file.name, known)}")
    put_first_in_path(str(file.parent))
    taken = file.stem in sys.modules or file.stem in sys.stdlib_module_names
    spec = importlib.util.spec_from_file_location(f"_file_{file.stem}" if taken else file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise user_code_error(path, error) from error
    return module


def call(what: str, function: Callable[..., Any], keywords: dict[str, Any]) -> Any:
    """Call a function or class of the user with these arguments.

    >>> call("m.py:double", lambda x: 2 * x, {"x": 4})
    8
    >>> call("m.py:double", lambda x: 2 * x, {})
    Traceback (most recent call last):
    click.exceptions.ClickException: m.py:double needs x; give --arg x=VALUE
    """
    _check_arguments(what, function, keywords)
    try:
        return function(**keywords)
    except (Exception, SystemExit) as error:
        raise user_code_error(
            f"{what}({', '.join(f'{name}={value!r}' for name, value in keywords.items())})", error
        ) from error


def _check_arguments(what: str, function: Callable[..., Any], names: Iterable[str]) -> None:
    try:
        parameters = inspect.signature(function).parameters
    except (ValueError, TypeError):  # of a C extension
        return
    named = {
        name: each for name, each in parameters.items() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }
    if len(named) == len(parameters) or not any(each.kind == each.VAR_KEYWORD for each in parameters.values()):
        for name in names:
            if name not in named:
                takes = hint_at(name, list(named)) if named else "it takes no arguments"
                raise click.ClickException(f"{what} has no argument {name!r}; {takes}")
    missing = [name for name, each in named.items() if each.default is each.empty and name not in names]
    if missing:
        remedy = " ".join(f"--arg {name}=VALUE" for name in missing)
        raise click.ClickException(f"{what} needs {', '.join(missing)}; give {remedy}")


def value_from_text(text: str) -> Any:
    """A value from its Python text. Other text is a string.

    >>> value_from_text("4"), value_from_text("[1, 2]"), value_from_text("relu")
    (4, [1, 2], 'relu')
    """
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
