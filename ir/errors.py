"""The library's own errors. Each message shows what was given, why it cannot work and what to do."""


class PippyError(Exception):
    """The base of every error that pippy raises on purpose.

    >>> issubclass(TracingError, PippyError)
    True
    """


class MarkError(PippyError, ValueError):
    """A split point that names no module, or a mark that cuts nothing off."""


class TracingError(PippyError):
    """The model does what symbolic tracing cannot follow."""


class SplitError(PippyError):
    """The model was traced, but cannot be cut where it is marked."""


class BalanceError(PippyError, ValueError):
    """A model cannot be cut into stages as `pipeline(model, split=...)` was asked to."""


class SharedParameterError(PippyError, ValueError):
    """A parameter that several stages use was configured in a way that cannot work."""


class LossError(PippyError, ValueError):
    """The loss, or the specification of which output is the loss, does not fit the model."""


class VerificationError(PippyError):
    """A Pipe breaks the rules of the IR. ``faults`` lists every broken rule."""

    def __init__(self, message: str, faults: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.faults = faults


class InputError(PippyError, TypeError):
    """The arguments of a call do not fit the Pipe's inputs."""


class NameLookupError(PippyError, KeyError):
    """A qualified name that neither the model nor the Pipe has."""

    __str__ = Exception.__str__  # KeyError would show the message as a quoted literal


class StageError(PippyError, RuntimeError):
    """A stage raised while it ran; the message names the stage, its inputs' shapes and the user's source line."""


class ModeError(PippyError, RuntimeError):
    """A Pipe is run in a mode, train or eval, that it was not traced for and that its model treats differently."""


class StateDictError(PippyError, RuntimeError):
    """A state dict does not fit the Pipe: names are missing or unknown, or shapes differ."""


class PippyWarning(UserWarning):
    """Something that works, but perhaps not as it was meant."""
