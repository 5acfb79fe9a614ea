"""What a user names on the command line, `module:Name` or `path/to/file.py:Name`, is found; and what goes wrong is reported.

A user's mistake gives one message. If the user's code raises, the message has a traceback of the user's own lines. An error in
pippy itself gives the whole traceback.
"""

import ast
import codecs
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, TextIO

import click

from pippy.ir.base.errors import LIBRARY, PippyError, PippyWarning, without_end
from pippy.ir.base.readable import did_you_mean, near_names

_NEAREST = str.maketrans(
    dict(zip("─│┌┐└┘├┬╌╎▶▼◆●", "-|++++++-|>v*o", strict=True)) | {"…": "...", "→": "->", "≥": ">="}
)
_RUNNERS = [("importlib", "__init__.py"), (f"python{sys.version_info.major}.{sys.version_info.minor}", "runpy.py")]
_PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".pdf", ".ps", ".eps", ".tif", ".tiff", ".dot", ".gv")
# The option that stands for an argument of the calls in Python, which errors name.
_OPTIONS = {"example_args": "--input", "chunks=": "-m", "num_stages=": "--num-stages", "Replicate()": "-m 1"}
INTERRUPTED = 130  # the exit status that shells use after Ctrl-C


class CommandGroup(click.Group):
    """A group of commands. Errors about what the user gave are printed as messages, and not as tracebacks."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line, on any terminal."""
        write_nearest(sys.stdout, sys.stderr)
        return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        from pippy.drivers.plan.language.errors import ScheduleError

        try:
            return super().invoke(ctx)
        except (PippyError, ScheduleError) as error:
            raise click.ClickException(str(error) + self._options_in(str(error), ctx)) from error
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise click.ClickException("torch is not installed here; `pippy doctor` says what is needed") from error
        except KeyboardInterrupt:
            click.echo("Interrupted", err=True)
            ctx.exit(INTERRUPTED)

    def _options_in(self, text: str, ctx: click.Context) -> str:
        """A line with the options of the command for the arguments that a text names."""
        command = self.get_command(ctx, ctx.invoked_subcommand or "")
        known = {option for each in command.params for option in each.opts} if command else set[str]()
        said = [f"{typed} for {name}" for name, typed in _OPTIONS.items() if name in text and typed.split()[0] in known]
        return f"\nOn the command line, use {', '.join(said)}" if said else ""


def with_options(command: Callable[..., Any], *options: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these options, in this order."""
    for option in reversed(options):
        command = option(command)
    return command


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Inside, pippy's warnings are printed without the line of pippy's code that they come from."""
    shown = warnings.showwarning

    def say(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, PippyWarning):
            click.echo(f"Warning: {message}", err=True)
        else:
            shown(message, category, *where, **more)

    with warnings.catch_warnings():
        warnings.simplefilter("always", PippyWarning)
        warnings.showwarning = say
        yield


def hint_at(name: str, known: list[str]) -> str:
    """A hint: names like this one, or else the first of all names.

    >>> hint_at("Modle", ["Model", "Net"])
    "did you mean 'Model'?"
    >>> hint_at("xyz", ["Model", "Net"])
    'there are Model, Net'
    """
    names = f"there are {', '.join(known[:12])}{', …' if len(known) > 12 else ''}" if known else "there is none"
    return did_you_mean(name, known, cutoff=0.5) or names


def own_trace(trace: TracebackType | None, *, whole: bool = False) -> TracebackType | None:
    """A traceback without the frames that run the user's code; unless ``whole``, also without pippy's frames at its end.

    It begins at the first frame that is neither in this folder nor in the import system. If there is none, it is None.
    """
    frame = trace
    while frame is not None and _is_ours(frame):
        frame = frame.tb_next
    return frame if whole or frame is None else without_end(frame)


def _is_ours(trace: TracebackType) -> bool:
    file = Path(trace.tb_frame.f_code.co_filename)
    return file.is_relative_to(LIBRARY / "cli") or str(file).startswith("<frozen ") or file.parts[-2:] in _RUNNERS


def user_code_error(what: str, error: BaseException) -> click.ClickException:
    """The message after the user's code raised: what raised, and the user's lines.

    >>> user_code_error("model.py", ValueError("3 layers")).message
    'model.py raised ValueError: 3 layers'
    """
    *place, cause = traceback.format_exception_only(error)  # only a SyntaxError says where it is
    trace = own_trace(error.__traceback__)
    place = place or traceback.format_tb(trace)
    return click.ClickException("\n".join([f"{what} raised {cause.strip()}", *"".join(place).rstrip().splitlines()]))


def check_can_be_written(path: str) -> None:
    """Refuse a file whose name says that it is a picture of a kind that pippy does not draw."""
    suffix = Path(path).suffix.lower()
    if suffix in _PICTURES:
        raise click.ClickException(
            f"{path!r}: pippy writes no {suffix} files. Write {Path(path).with_suffix('.svg')} instead, a picture that "
            f"browsers and editors show, and convert that (or print it from a browser) where a {suffix} is needed"
        )


def write(path: str, text: str) -> None:
    """Write a file that the user named."""
    check_can_be_written(path)
    try:
        Path(path).write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{path!r} cannot be written: {error.strerror}") from error
    click.echo(f"written: {path}", err=True)


def put_first_in_path(folder: str) -> None:
    """Put a folder first in ``sys.path``, as Python does with a script's folder."""
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def nearest(error: UnicodeError) -> tuple[str, int]:
    """What to write in place of characters that cannot be written: an error handler of `codecs`.

    >>> "0 ─▶ 1 …".encode("latin-1", "pippy.nearest")
    b'0 -> 1 ...'
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_NEAREST)
    return "".join(each if each.isascii() else "?" for each in text), error.end


codecs.register_error("pippy.nearest", nearest)


def write_nearest(*streams: TextIO) -> None:
    """Have streams write the nearest letters where they would raise a UnicodeEncodeError."""
    for stream in streams:
        if isinstance(stream, TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="pippy.nearest")


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
