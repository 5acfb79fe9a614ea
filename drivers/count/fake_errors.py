"""What is said where a model cannot run with fake tensors, with which its bytes are counted."""

from collections.abc import Iterator
from contextlib import contextmanager

from pippy.drivers.base.errors import DriverError
from pippy.ir.base.errors import PippyError


class UncountedError(DriverError):
    """Bytes cannot be counted, because the model cannot run with fake tensors. ``reason`` is what they cannot do.

    >>> print(UncountedError("aten.nonzero.default", "leave memory= out"))
    what a step holds is counted with fake tensors, which have shapes and no numbers, and this model cannot run with them:
    aten.nonzero.default
    What to do: leave memory= out
    """

    def __init__(
        self, reason: str, remedy: str = "measure it, in a step that runs: with driver.record(memory=True) as recording"
    ) -> None:
        super().__init__(reason, remedy)
        self.reason, self.remedy = reason, remedy

    def __str__(self) -> str:
        return (
            "what a step holds is counted with fake tensors, which have shapes and no numbers, and this model cannot run with "
            f"them:\n{self.reason}\nWhat to do: {self.remedy}"
        )


@contextmanager
def explain_fake_errors() -> Iterator[None]:
    """Inside, what fake tensors cannot do is an error that says what to do."""
    try:
        yield
    except PippyError as error:
        raise UncountedError(str(error)) from error
    except Exception as error:
        raise UncountedError(f"{type(error).__name__}: {error}") from error
