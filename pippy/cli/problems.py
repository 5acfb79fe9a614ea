"""How the command line reports what goes wrong.

A user's mistake gives one message. If the user's code raises, the message has a traceback of the user's own lines. An error in
pippy itself gives the whole traceback.
"""

import codecs
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import click

from pippy.ir.base.errors import PippyError, PippyWarning
from pippy.ir.base.near_names import did_you_mean
from pippy.ir.base.shown_errors import LIBRARY, without_end

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
