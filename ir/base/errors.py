"""pippy's errors. Each message shows the value that was given, the reason why it cannot work, and what to do.

Where an error ends a script, Python shows the script's lines and the message, without pippy's own frames. The error itself
keeps its frames and its cause, for `except`, for debuggers and for `logging`. With PIPPY_TRACEBACK=full in the environment,
all of them are shown.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

LIBRARY = Path(__file__).parents[2]


class PippyError(Exception):
    """The base of every error that pippy raises on purpose.

    >>> issubclass(TracingError, PippyError)
    True
    """


class MarkError(PippyError, ValueError):
    """A split point that names no module, or a mark that cuts nothing off."""


class TracingError(PippyError):
    """Symbolic tracing cannot follow the model's code. ``marks`` names the marks that keep that code in the graph."""

    marks = ""


class SplitError(PippyError):
    """The model was traced, but cannot be cut at its marks."""


class BalanceError(PippyError, ValueError):
    """The model cannot be cut as the arguments of `pipeline(model, split=...)` ask."""


class SharedParameterError(PippyError, ValueError):
    """A parameter that several stages use was configured in a way that cannot work."""


class LossError(PippyError, ValueError):
    """The loss, or the specification of which output is the loss, does not fit the model."""


class BatchNormError(PippyError, TypeError):
    """A batch norm cannot become a `DeferredBatchNorm`."""


class VerificationError(PippyError):
    """A Pipe breaks the rules of the IR. ``faults`` lists what is wrong: of the top-level graph, the first difference."""

    def __init__(self, message: str, faults: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.faults = faults


class InputError(PippyError, TypeError):
    """The arguments of a call do not fit the Pipe's inputs."""


class GuardError(InputError):
    """A call, or a micro-batch of it, for which forward would go on in another way than when it was traced.

    A driver traces the model again for such a call; where that cannot be done, this error says why.

    >>> issubclass(GuardError, InputError)
    True
    """


class NameLookupError(PippyError, KeyError):
    """Neither the model nor the Pipe has this name."""

    __str__ = Exception.__str__  # KeyError would show the message as a quoted literal


class StageError(PippyError, RuntimeError):
    """A stage raised while it ran; the message names the stage, its inputs' shapes and the user's source line."""


class ModeError(PippyError, RuntimeError):
    """The Pipe was not traced for its current mode, train or eval, in which the model runs other operations."""


class GenerationError(PippyError, ValueError):
    """`driver.generate` cannot do what it is asked for, or not with this model."""


class SliceError(PippyError, ValueError):
    """A driver cannot cut the sequences of this model, or of this call, into slices."""


class InitializationError(PippyError, ValueError):
    """The modules of a model on the meta device cannot make their parameters as `driver.initialize` has them do."""


class StateDictError(PippyError, RuntimeError):
    """A state dict does not fit the Pipe: names are missing or unknown, or shapes differ."""


class PippyWarning(UserWarning):
    """Something works, but perhaps not as the user expects."""


def show_briefly(kind: type[BaseException]) -> None:
    """From now on, `sys.excepthook` gets errors of this kind in brief."""
    shown = sys.excepthook

    def show(each: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, kind):
            return shown(each, error, trace)
        with in_brief(error.with_traceback(trace)):
            return shown(each, error, error.__traceback__)

    sys.excepthook = show


@contextmanager
def in_brief(error: BaseException) -> Iterator[None]:
    """Inside, an error has only the frames that are shown, and no cause: its message says what was wrong."""
    if shows_all():
        yield
        return
    whole, cause, suppressed = error.__traceback__, error.__cause__, error.__suppress_context__
    error.__traceback__, error.__cause__, error.__suppress_context__ = whole and without_end(whole), None, True
    try:
        yield
    finally:
        error.__traceback__, error.__cause__, error.__suppress_context__ = whole, cause, suppressed


def shows_all() -> bool:
    """Whether all frames are shown."""
    return os.environ.get("PIPPY_TRACEBACK") == "full"


def without_end(trace: TracebackType) -> TracebackType:
    """A traceback up to its last frame that is not in pippy."""
    links = [trace]
    while (following := links[-1].tb_next) is not None:
        links.append(following)
    while len(links) > 1 and Path(links[-1].tb_frame.f_code.co_filename).is_relative_to(LIBRARY):
        links.pop()
    shortened = None
    for link in reversed(links):
        shortened = TracebackType(shortened, link.tb_frame, link.tb_lasti, link.tb_lineno)
    assert shortened is not None
    return shortened


show_briefly(PippyError)
