"""pippy's errors. Each message shows the value that was given, the reason why it cannot work, and what to do."""

from pippy.ir.base.shown_errors import show_briefly


class PippyError(Exception):
    """The base of every error that pippy raises on purpose.

    >>> issubclass(TracingError, PippyError)
    True
    """


show_briefly(PippyError)


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
